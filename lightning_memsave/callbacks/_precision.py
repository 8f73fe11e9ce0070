"""Precision set from the callback."""

from typing import Any

import torch
from torch import nn

from lightning_memsave import host
from lightning_memsave.callbacks._settings import AS_IT_IS, Row, Setting
from lightning_memsave.errors import ConfigurationError, Problem

PRECISIONS = (
    "32-true",
    "64-true",
    "bf16-mixed",
    "16-mixed",
    "bf16-true",
    "16-true",
    "transformer-engine",
    "transformer-engine-float16",
)
_SHORT = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_HALF = (torch.float16, torch.bfloat16)


def full_name(precision: str | int) -> str:
    """Give the long form of a precision.

    Args:
        precision: What Lightning's Trainer takes, such as ``"bf16"`` or 16.

    Returns:
        For example ``"bf16-mixed"``.

    Raises:
        ConfigurationError: If Lightning has no such precision.
    """
    name = _SHORT.get(str(precision), str(precision))
    if name not in PRECISIONS or isinstance(precision, bool):
        raise ConfigurationError(
            f"`precision={precision!r}` is not a precision that Lightning knows. Use "
            f'"auto", `None` or one of {", ".join(PRECISIONS)}.'
        )
    return name


class TrainerPrecision(Setting):
    """The Trainer's precision, as if its constructor had been given it.

    Lightning's own connector builds the plugin, so the gradient scaler is the one that it picks.

    Args:
        precision: A long name, ``"auto"``, or ``None`` to leave the Trainer's. ``"auto"`` means on
            CUDA ``"bf16-mixed"`` where the GPU has bfloat16 natively and ``"16-mixed"`` where not,
            unless the Trainer or a plugin says otherwise; elsewhere it changes nothing.
        written: How messages name it; the argument, if nothing is given.
        is_for_weights: Weights in bfloat16 need it, and cannot stay without.
    """

    name = "precision"
    is_for_evaluation = True

    def __init__(
        self, precision: str | None, written: str = "", is_for_weights: bool = False
    ) -> None:
        super().__init__()
        self.precision = precision
        self.written = written
        self.is_for_weights = is_for_weights

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find what stands against the precision that was asked for; ``"auto"`` gives way.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.

        Returns:
            All problems.
        """
        if self.precision is None or self.precision == "auto":
            return []
        return find_conflicts(trainer, pl_module, self.precision, self.written, self.is_for_weights)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Set the precision, or say why it stays as it is.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        current = host.precision_state(trainer).current
        wanted, reason = self.precision, ""
        if self.precision is None:
            # A reason that was there from the start stays; what an earlier Trainer left goes.
            given = [row for row in self.rows if row.status == "off"]
            self.rows = given or [Row(self.name, current, "unchanged", (AS_IT_IS,))]
            return
        if self.precision == "auto":
            wanted, reason = _choose(trainer, pl_module)
        if wanted is None:
            self.rows = [Row(self.name, current, "unchanged", (reason,))]
            return
        if wanted != current:
            host.set_precision(trainer, wanted)
        got = host.precision_state(trainer).current
        details = [reason] if reason else []
        if got != wanted:
            details.append(f"Lightning replaced {wanted} on this device")
        exactness = "" if got in ("32-true", "64-true") else "approximate"
        self.rows = [Row(self.name, got, "on", tuple(details), exactness)]


def find_conflicts(
    trainer: Any,
    pl_module: nn.Module,
    wanted: str,
    written: str = "",
    is_for_weights: bool = False,
) -> list[Problem]:
    """Find every reason why a Trainer cannot be given a precision.

    Args:
        trainer: A Trainer in ``setup``.
        pl_module: Its LightningModule.
        wanted: One of `PRECISIONS`.
        written: How messages name it; the argument, if nothing is given.
        is_for_weights: Weights in bfloat16 need it: without it they must go as well.

    Returns:
        All problems, empty if it can.
    """
    state = host.precision_state(trainer)
    what = written or f"`precision={wanted!r}`"
    # What the Trainer computes in is as good as ours, if it is the same.
    must_go_too = is_for_weights and state.current != wanted
    both = "`precision=None` and `low_precision_weights=None`"
    leave = f"or set {both if must_go_too else '`precision=None`'} here to leave it to the Trainer."
    problems = []
    if state.plugin is not None:
        why = f"the Trainer was given the plugin `{state.plugin}`, which decides the precision"
        problems.append(Problem(what, why, f"Remove that plugin, {leave}"))
    elif state.current not in ("32-true", wanted) and not state.is_ours:
        why = f"the Trainer was given `precision={state.current!r}`"
        problems.append(Problem(what, why, f"Remove one of the two, {leave}"))
    if state.has_own_mixed_precision:
        why = "`FSDPStrategy(mixed_precision=...)` wins over it, so that it would hold in part"
        problems.append(Problem(what, why, f"Remove `mixed_precision` from the strategy, {leave}"))
    if host.is_strategy(trainer, "ModelParallelStrategy") and wanted == "16-mixed":
        why = "`ModelParallelStrategy` has no gradient scaler for it"
        problems.append(Problem(what, why, 'Use `precision="bf16-mixed"`.'))
    if host.is_strategy(trainer, "ModelParallelStrategy") and wanted == "64-true":
        why = "`ModelParallelStrategy` does not support it"
        problems.append(Problem(what, why, 'Use `precision="32-true"`.'))
    if state.is_frozen and wanted != state.current:
        why = f"DeepSpeed was started with {state.current} and keeps it"
        problems.append(Problem(what, why, "Make a new Trainer with a new strategy."))
    if host.is_strategy(trainer, "XLAStrategy", "SingleDeviceXLAStrategy") and wanted not in (
        "32-true",
        "16-true",
        "bf16-true",
    ):
        why = "XLA devices run in one precision"
        problems.append(Problem(what, why, 'Use `precision="bf16-true"` or "32-true".'))
    return problems + _half_parameters(pl_module, wanted, what, is_for_weights)


# Under these precisions Lightning leaves parameters as they are, so ones that are half already
# stay half: rounding is lost for good, and fp16 gradients cannot be unscaled.
def _half_parameters(
    module: nn.Module, wanted: str, what: str, is_for_weights: bool
) -> list[Problem]:
    if wanted not in ("32-true", "16-mixed", "bf16-mixed"):
        return []
    half = {p.dtype for p in module.parameters() if p.requires_grad and p.dtype in _HALF}
    use = "set `low_precision_weights=None` and" if is_for_weights else "use"
    return [
        Problem(
            what,
            f"trainable parameters are {dtype} already and would stay so",
            f"Load the model in float32 (Hugging Face: `dtype=torch.float32`), or {use} "
            f'`precision="{"16-true" if dtype is torch.float16 else "bf16-true"}"`.',
        )
        for dtype in sorted(half, key=str)
    ]


def _choose(trainer: Any, pl_module: nn.Module) -> tuple[str | None, str]:
    state = host.precision_state(trainer)
    device = trainer.strategy.root_device
    if state.plugin is not None:
        return None, f"kept: the plugin `{state.plugin}` decides it"
    if state.current != "32-true" and not state.is_ours:
        return None, "kept: the Trainer was given it"
    if device.type != "cuda":
        return None, f"kept on {device.type}; pass a precision to change it"
    is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    wanted = "bf16-mixed" if is_native else "16-mixed"
    conflicts = find_conflicts(trainer, pl_module, wanted)
    if conflicts:
        return None, f"kept: {conflicts[0].what} is not possible, as {conflicts[0].why}"
    return wanted, "" if is_native else "this GPU has no native bfloat16"
