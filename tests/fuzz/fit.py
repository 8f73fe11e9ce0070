"""Run a program, alone or with a setting, and keep what the user could compare."""

import contextlib
import linecache
import logging
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memsave import MemSaveCallback
from lightning_memsave.errors import MemsaveError, MemsaveWarning
from tests.conftest import ProcessState
from tests.fuzz.settings import arguments_of

TIME_LIMIT_S = 20.0
_NAME = "program"
_HOOKS = (
    *("forward", "forward_pre", "backward", "backward_pre", "state_dict", "state_dict_pre"),
    "load_state_dict_pre",
)


@dataclass
class Outcome:
    """The end of a fit: values, or an error and where it was raised."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    trace: str = ""
    step: int = 0
    left: dict[str, Any] = field(default_factory=dict)
    """What a fit may leave behind in modules, parameters, optimizers and the process."""
    warned: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)

    def status(self, names: Collection[str]) -> str:
        """Whether all of these techniques are on."""
        on = {row.name for row in self.rows if row.status == "on"}
        if isinstance(self.error, MemsaveError):
            return "refused"
        return "on" if on.issuperset(names) else "off"

    def rounds(self) -> bool:
        """Whether the table promises less than the same bits."""
        less = ("rounding", "approximate")
        return any(row.status == "on" and row.exactness in less for row in self.rows)


class _Jitter(Callback):
    """Changes of weights that are as small as those of rounding."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            for param in pl_module.parameters():
                param.flatten()[::2].mul_(1 + 2**-22)


def run(source: str, setting: str = "", *, has_jitter: bool = False) -> Outcome:
    """Run a program; with jitter, its outcome tells how far rounding grows in it."""
    module, outcome, callback = types.ModuleType(_NAME), Outcome(source), None
    process = ProcessState()
    with _installed(module, source), _time_limit(TIME_LIMIT_S), quiet() as warned:
        try:
            exec(compile(source, f"<{_NAME}>", "exec"), vars(module))
            if setting:
                callback = MemSaveCallback(report=False, predict=False, **arguments_of(setting))
            callbacks = [callback] if callback is not None else [_Jitter()] * has_jitter
            lit, trainer = module.fit(*callbacks)
            outcome.values, outcome.left = _values(lit, trainer), _fingerprint(lit, trainer)
        except Exception as error:
            outcome.error, outcome.trace = error, "".join(traceback.format_exception(error))
            if last := getattr(module, "LAST", []):
                lit, trainer = last
                outcome.step, outcome.left = trainer.global_step, _marks(lit)
    outcome.left["process"] = process.restore()
    outcome.warned = [str(w.message) for w in warned if issubclass(w.category, MemsaveWarning)]
    outcome.rows = [] if callback is None else [*callback.rows]
    return outcome


@contextlib.contextmanager
def _installed(module: types.ModuleType, source: str) -> Iterator[None]:
    """Let a program be found by its name, so that it can be pickled and traced."""
    sys.modules[_NAME] = module
    lines = source.splitlines(keepends=True)
    linecache.cache[f"<{_NAME}>"] = (len(source), None, lines, f"<{_NAME}>")
    try:
        yield
    finally:
        del sys.modules[_NAME]
        if hasattr(module, "PATH"):
            Path(module.PATH).unlink(missing_ok=True)


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError("the fit takes too long")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def quiet() -> Iterator[list[Any]]:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield warned
    finally:
        logging.disable(disabled)


def _values(lit: Any, trainer: Any) -> dict[str, Any]:
    tensors = {**dict(lit.named_parameters()), **dict(lit.named_buffers())}
    metrics = trainer.callback_metrics.items()
    return {
        "random": torch.rand(2).sum(),  # before anything else draws
        "weights": {name: each.detach().clone() for name, each in tensors.items()},
        "metrics": {name: float(v) for name, v in metrics if not name.startswith("memory/")},
        "optimizer": dict(_leaves(trainer.optimizers[0].state_dict())),
        "seen": [*lit.seen],
    }


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _leaves(each, f"{path}.{key}")
    else:
        yield path, value.detach().clone() if isinstance(value, torch.Tensor) else value


def _fingerprint(lit: Any, trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"state_dict": [*lit.state_dict()]}
    for name, module in lit.named_modules():
        counts = [len(vars(module).get(f"_{each}_hooks", ())) for each in _HOOKS]
        found[f"module {name}"] = type(module).__name__, sorted(vars(module)), counts
    for name, p in lit.named_parameters():
        hooks = len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())
        kind = type(p).__name__, p.dtype, p.requires_grad
        found[f"parameter {name}"] = *kind, hooks, sorted(vars(p))
    for optimizer in trainer.optimizers:
        found["optimizer"] = type(optimizer).__name__, sorted(vars(optimizer))
    return found


def _marks(lit: Any) -> dict[str, Any]:
    """Name attributes of ours in the modules of a fit that has failed."""
    found = [
        f"{name}.{key}"
        for name, module in lit.named_modules()
        for key in vars(module)
        if key.startswith("_memsave") or key == "forward"
    ]
    return {"marks": found} if found else {}
