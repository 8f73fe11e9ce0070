"""What stands against updates during the backward pass in a Trainer."""

from typing import Any

from torch.nn.parameter import is_lazy

from lightning_memsave import host
from lightning_memsave.callbacks._foreign_hooks import has_foreign, owners_of
from lightning_memsave.errors import Problem
from lightning_memsave.techniques.optimizer_in_backward import OptimizerInBackward

"""Strategies that cut parameters into shares."""

_OFF = "set `optimizer_in_backward=None`"


def find_conflicts(
    trainer: Any, pl_module: Any, technique: OptimizerInBackward, what: str
) -> list[Problem]:
    """Find every reason why the module cannot be updated in backward.

    Args:
        trainer: A Trainer in ``setup``.
        pl_module: Its LightningModule.
        technique: What was asked for.
        what: The setting, as the user wrote it.

    Returns:
        All problems, empty if it can.
    """
    problems = []
    if not pl_module.automatic_optimization:
        problems.append(
            Problem(
                what,
                f"`{type(pl_module).__name__}.automatic_optimization=False`: only the module "
                "knows which of its backward passes completes the gradients",
                "Set `optimizer_in_backward=None` and use `OptimizerInBackward` in "
                "`training_step`.",
            )
        )
    problems += _of_clipping(trainer, technique, what)
    if not host.is_strategy(trainer, *host.SHARDED):  # refused below, whatever its precision
        problems += find_scaler(trainer, what)
    problems += _of_compilation(pl_module, what)
    problems += _of_module(pl_module, what)
    problems += _of_hooks(trainer, pl_module, what)
    # DDP of one process hands its gradients around, too.
    if trainer.world_size > 1 or host.is_strategy(trainer, *host.SHARDED, "DDPStrategy"):
        problems.append(
            Problem(
                what,
                f"`{type(trainer.strategy).__name__}` shares gradients between processes after "
                "they are complete",
                "Set `optimizer_in_backward=None`, or train in one process without a strategy.",
            )
        )
    return problems


def find_risks(pl_module: Any, what: str) -> list[Problem]:
    """Find what may end the run in a later step, for updates that nobody has asked for by name."""
    owner = type(pl_module).__name__
    whys = {
        "optimizer_step": "may leave out a step, whose backward pass has updated parameters",
        "backward": "may run several backward passes in a step, and only the last one may update",
    }
    return [
        Problem(what, f"`{owner}.{hook}` {why}", "Set `optimizer_in_backward=True` by name.")
        for hook, why in whys.items()
        if has_foreign(pl_module, hook)
    ]


def clipping_of(trainer: Any) -> dict[str, Any]:
    """Find out what the Trainer clips.

    Args:
        trainer: The Trainer.

    Returns:
        The same as settings of `OptimizerInBackward`; empty if it clips nothing.
    """
    bound = trainer.gradient_clip_val
    if bound is None or bound <= 0:  # for Lightning, both mean no bound
        return {}
    algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
    # Without an algorithm, Lightning clips the norm.
    return {"clip_value" if algorithm == "value" else "clip_norm": bound}


def advice_for(pl_module: Any) -> tuple[str, str]:
    """Say where a second gradient in a step may come from in a Trainer.

    Args:
        pl_module: The LightningModule.

    Returns:
        The likely cause, as a clause, and what to do about it.
    """
    owner = type(pl_module).__name__
    if has_foreign(pl_module, "optimizer_step"):
        return (
            f"`{owner}.optimizer_step` is overridden, and has probably left out `optimizer.step()` "
            "for an earlier batch, whose backward pass has updated the parameters already",
            f"Call `optimizer.step(closure=optimizer_closure)` there for every batch, or {_OFF}.",
        )
    return (
        f"from a second backward pass in `{owner}.backward`, or from a block that is used twice "
        "under checkpointing with `use_reentrant=True`",
        f"Leave the backward pass to Lightning, checkpoint with `use_reentrant=False`, or {_OFF}.",
    )


def _of_clipping(trainer: Any, technique: OptimizerInBackward, what: str) -> list[Problem]:
    return [
        Problem(
            what,
            f"the Trainer was given `gradient_clip_val={bound}`, another bound than "
            f"`{setting}={own}`",
            f"Remove one of the two, or pass `{setting}={bound}` here too.",
        )
        for setting, bound in clipping_of(trainer).items()
        if (own := getattr(technique, setting)) not in (None, bound)
    ]


def find_scaler(trainer: Any, what: str) -> list[Problem]:
    """Find a GradScaler, which may leave out a step after its backward pass."""
    if host.gradient_scaler(trainer) is None:
        return []
    why = (
        f"`precision={trainer.precision!r}` scales losses, and whether a step is left out is known "
        "only after backward, when parameters are updated already"
    )
    return [Problem(what, why, f'Use `precision="bf16-mixed"`, or {_OFF}.')]


def _of_compilation(pl_module: Any, what: str) -> list[Problem]:
    total = _trained_bytes(pl_module)
    if getattr(pl_module, "_compiler_ctx", None):  # as Lightning marks a compiled LightningModule
        compiled = [(type(pl_module).__name__, pl_module)]
    else:
        compiled = [
            (name or type(pl_module).__name__, module)
            for name, module in pl_module.named_modules()
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        ]
    return [
        Problem(
            what,
            f"`{name}` is compiled as a whole: its graph gives all gradients at once, so nothing "
            "would be saved",
            f"Compile its blocks one by one, or {_OFF}.",
        )
        for name, module in compiled[:1]
        if 2 * _trained_bytes(module) > total
    ]


def _trained_bytes(module: Any) -> int:
    return sum(p.nbytes for p in module.parameters() if p.requires_grad and not is_lazy(p))


def _of_module(pl_module: Any, what: str) -> list[Problem]:
    owner = type(pl_module).__name__
    whys = {
        "configure_gradient_clipping": "would find no gradients",
        # Momentum and weight decay move a parameter whose gradient is zero, not one without.
        "optimizer_zero_grad": "may keep zeros as gradients, where a parameter that a step does "
        "not use has none after its update in backward, and is left alone; Lightning's own method "
        "sets gradients to `None`",
    }
    return [
        Problem(what, f"`{owner}.{hook}` {why}", f"Remove that method, or {_OFF}.")
        for hook, why in whys.items()
        if has_foreign(pl_module, hook)
    ]


# Between backward and step, where gradients and settings of the optimizer are read and changed.
def _of_hooks(trainer: Any, pl_module: Any, what: str) -> list[Problem]:
    return [
        Problem(
            what,
            f"`{owner}` runs when parameters are updated already and gradients are gone: "
            "what it does to gradients, learning rates or weight decay would be without effect",
            f"Remove that method, or {_OFF}.",
        )
        for hook in ("on_after_backward", "on_before_optimizer_step")
        for owner in owners_of(trainer, pl_module, hook)
    ]
