"""What a subcommand says, in one line, when code of the user does not run."""

import contextlib
import sys
from collections.abc import Iterator

from lightning_memsave.errors import ConfigurationError, MemsaveError


class StepError(MemsaveError):
    """The training step of the user's model failed on tensors without data."""


@contextlib.contextmanager
def running_code_of(name: str) -> Iterator[None]:
    """Run the user's model: its output goes to standard error, its exceptions become one line.

    Args:
        name: Of the model, as it was given.

    Yields:
        Nothing.

    Raises:
        MemsaveError: If the code raises one, or if we do.
        StepError: If the code raises anything else, or ends the process.
    """
    # What the code prints must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except MemsaveError:
            raise
        except TimeoutError as error:
            raise StepError(f"The training step of `{name}` does not end: {error}.") from error
        except (Exception, SystemExit) as error:
            raise StepError(_in_one_line(name, error)) from error


def _in_one_line(name: str, failure: BaseException) -> str:
    from lightning_memsave.analysis._targets_building import explained

    fix = "Does this batch go with the model? Name its tensors with --batch as the step takes them."
    try:
        with explained(f"The training step of `{name}`", fix):
            raise failure
    except ConfigurationError as error:
        return str(error)
