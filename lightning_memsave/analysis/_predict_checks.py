"""Refuse what nothing can be predicted for."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_memsave.callbacks._precision import full_name
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.storages import tensors_in


def check_arguments(device: str, time_limit_s: float | None) -> None:
    """Refuse a device or a time that there is not.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        time_limit_s: Seconds, or ``None``.

    Raises:
        ConfigurationError: If one of them is something else.
    """
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(
            f'`device={device!r}` is not known here. Use `"cuda"` or `"cpu"`; for one GPU in '
            'particular: `device="cuda", gpu="T4"`.'
        )
    if time_limit_s is not None and not (_is_number(time_limit_s) and time_limit_s > 0):
        raise ConfigurationError(
            f"`time_limit_s={time_limit_s!r}` is no time to predict in. Use seconds, such as "
            "`time_limit_s=60`, or `None` for no limit."
        )


def check_batch(batch: Any) -> None:
    """Refuse a batch with which nothing would be trained.

    Args:
        batch: Tensors in any nesting.

    Raises:
        ConfigurationError: If there is none, or no sample in it.
    """
    if batch is None:
        raise ConfigurationError(
            "`batch=None` is no batch. Pass one that `training_step` takes, on any device: for "
            "example `next(iter(train_dataloader))`."
        )
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    if sizes == {0}:
        raise ConfigurationError(
            "The batch has no samples: the first size of its tensors is 0. Pass one of the size "
            "that is trained with."
        )


def check_functions(optimizer: Any, loss: Any) -> None:
    """Refuse what makes no optimizer or gives no loss.

    Args:
        optimizer: Of `predict_memory`.
        loss: Of `predict_memory`.

    Raises:
        ConfigurationError: If one of them cannot be called so.
    """
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise ConfigurationError(
            f"`optimizer={name}(...)` is an optimizer of other parameters. Pass what makes one: "
            f"`optimizer=torch.optim.{name}`, or `lambda parameters: torch.optim.{name}(...)`."
        )
    if optimizer is not None and not callable(optimizer):
        raise ConfigurationError(
            f"`optimizer={optimizer!r}` does not make an optimizer. Pass a class such as "
            "`optimizer=torch.optim.AdamW`; for an 8-bit one add "
            '`settings={"optimizer": "8bit"}`.'
        )
    if loss is not None and not _takes_two(loss):
        raise ConfigurationError(
            f"`loss={loss!r}` is not a function of output and batch. Pass for example "
            "`loss=lambda output, batch: torch.nn.functional.mse_loss(output, batch[1])`."
        )


def check_mapping(value: Any, name: str, example: str) -> None:
    """Refuse arguments that are not given by name.

    Args:
        value: What was given.
        name: Of the argument that it was given for.
        example: What to write, as code.

    Raises:
        ConfigurationError: If it is not a mapping.
    """
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"`{name}={value!r}` is not a mapping of names to values. Write for example "
            f"`{name}={example}`."
        )


def check_trainer_values(arguments: Mapping[str, Any]) -> None:
    """Refuse values with which a Trainer could not train.

    Args:
        arguments: Of Lightning's Trainer, those that are not ``None``.

    Raises:
        ConfigurationError: If one is wrong.
    """
    if "precision" in arguments:
        full_name(arguments["precision"])
    rules: dict[str, tuple[Callable[[Any], bool], Any]] = {
        "accumulate_grad_batches": (lambda v: type(v) is int and v >= 1, 4),
        "gradient_clip_val": (_is_number, 1.0),
        "gradient_clip_algorithm": (lambda v: v in ("norm", "value"), "norm"),
        "max_epochs": (lambda v: type(v) is int, 3),
        "max_steps": (lambda v: type(v) is int, 1000),
    }
    for name, (is_right, example) in rules.items():
        if name in arguments and not is_right(arguments[name]):
            raise ConfigurationError(
                f"`{name}={arguments[name]!r}` is not a value of Lightning's Trainer. Use for "
                f"example `{name}={example!r}`, or remove it."
            )


def _takes_two(function: Any) -> bool:
    if isinstance(function, type) or not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some written in C do not say what they take
        return True
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
