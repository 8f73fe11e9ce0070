"""Unknown names of arguments: an error with the nearest right one, or what to write instead."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec

from lightning_memsave.core.names import did_you_mean
from lightning_memsave.errors import ConfigurationError

P = ParamSpec("P")

_OF_OPTIMIZER = (
    'Write it as `optimizer=LowBitOptimizer("8bit", keep_32bit=["*.head.*"])`, with the name of '
    "the optimizer; in YAML with `class_path`."
)
INSTEAD: Mapping[str, str] = {
    "monitor": "Put `GPUMemoryMonitor(...)` beside `MemSaveCallback` in the Trainer's callbacks; "
    "nothing is measured with `report=False` and `predict=False`.",
    "block_micro_batch_size": 'Write `micro_batch_size=MicroBatching(8, of="blocks")`; in YAML '
    "with `class_path`.",
    "eval_micro_batch_size": "Evaluation follows `micro_batch_size`; "
    "`micro_batch_size=MicroBatching(..., evaluation=False)` leaves it out.",
    "optimizer_kwargs": _OF_OPTIMIZER,
    "keep_32bit": _OF_OPTIMIZER,
    "force_8bit": _OF_OPTIMIZER,
    "loss_weight": "Write `micro_batch_size=MicroBatching(8, loss_weight=...)`.",
    "split_batch": "Write `micro_batch_size=MicroBatching(8, split_batch=...)`.",
    "stack": "Write `preset=...`, with the same values.",
    "early_release": "Remove it: tensors are always freed early.",
    "tf32": 'Write `torch.set_float32_matmul_precision("high")` before fit.',
}
"""What to write for arguments that earlier versions had."""


def describe_unknown(name: str, known: Iterable[str]) -> str:
    known = list(known)
    listed = f"Use {', '.join(f'`{other}`' for other in known)}."
    fix = INSTEAD.get(name) or did_you_mean(name, known).strip() or listed
    return f"`{name}` is not an argument of `MemSaveCallback`. {fix}"


_OF_CLASS = r"'lightning_memsave[.\w]*\.MemSaveCallback':\s+"
_UNKNOWN = re.compile(
    rf"\bmemsave\.(\w+)|Group 'memsave' does not accept option '(\w+)|{_OF_CLASS}Option '(\w+)"
)


def advise_in_parsers(init: Callable[..., Any]) -> None:
    """Let LightningCLI, also the stock one, say what to write instead of an unknown argument.

    It refuses names by the signature, so that no code of ours would see them.
    """
    parser = getattr(sys.modules.get("jsonargparse"), "ArgumentParser", None)
    if parser is None or hasattr(parser.error, "__wrapped__"):
        return
    error, names = parser.error, ["enabled", *inspect.signature(init).parameters]

    @functools.wraps(error)
    def with_advice(self: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        found = dict.fromkeys("".join(groups) for groups in _UNKNOWN.findall(message))
        unknown = [describe_unknown(name, names) for name in found if name not in names]
        return error(self, "\n".join([message, *unknown]), *args, **kwargs)

    parser.error = with_advice


def known_names_only(init: Callable[P, None]) -> Callable[P, None]:
    """Refuse unknown arguments with what to write instead, where Python names them only."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if unknown := [describe_unknown(name, known) for name in kwargs if name not in known]:
            raise ConfigurationError(" ".join(unknown))
        init(*args, **kwargs)

    return checked
