"""What stands against training batches in parts."""

from collections.abc import Iterator
from typing import Any

from lightning_memsave import host
from lightning_memsave.errors import Problem
from lightning_memsave.techniques.micro_batching import MicroBatching


def find_conflicts(
    trainer: Any, pl_module: Any, technique: MicroBatching, *, takes_half: bool
) -> list[Problem]:
    """Find every reason why the batches of a Trainer cannot pass in parts.

    Args:
        trainer: A Trainer in ``setup``.
        pl_module: Its LightningModule.
        technique: What was asked for.
        takes_half: Gradients of half-precision parameters are summed in float32.

    Returns:
        All problems, empty if they can.
    """
    what = f"`micro_batch_size={technique.micro_batch_size!r}`"
    is_auto = technique.micro_batch_size == "auto"
    problems = [] if takes_half else technique.check_module(pl_module)
    if not pl_module.automatic_optimization:
        problems.append(
            Problem(
                what,
                f"`{type(pl_module).__name__}.automatic_optimization=False`: the module runs "
                "its own backward passes",
                "Set `micro_batch_size=None` and split the batch in `training_step`.",
            )
        )
    if trainer.strategy.handles_gradient_accumulation:
        problems.append(
            Problem(
                what,
                f"`{type(trainer.strategy).__name__}` counts backward passes itself",
                "Set `micro_batch_size=None`, and use a smaller batch and "
                "`accumulate_grad_batches`.",
            )
        )
    else:
        problems.extend((_of_repetition if is_auto else _of_parts)(trainer, pl_module, what))
    return problems


# What stands against a process that repeats a batch while the others do not.
def _of_repetition(trainer: Any, pl_module: Any, what: str) -> Iterator[Problem]:
    meets = host.meets_in_forward(trainer, pl_module)
    own_way = host.shares_gradients_its_own_way(trainer)
    fix = "Use a fixed size such as `micro_batch_size=4`."
    if meets:
        yield Problem(what, f"{meets}, so none of them can repeat a batch alone", fix)
    elif own_way:
        why = f"{own_way}, which cannot wait until all processes had enough memory"
        yield Problem(what, why, fix)
    if _has_batch_size_finder(trainer):
        yield Problem(
            what,
            "`BatchSizeFinder` looks for the size at which memory runs out",
            "Remove that callback: batches shrink by themselves.",
        )


def _of_parts(trainer: Any, pl_module: Any, what: str) -> Iterator[Problem]:
    if trainer.world_size > 1 and host.has_static_graph(trainer):
        yield Problem(
            what,
            f"`{type(trainer.strategy).__name__}(static_graph=True)` must share gradients in every "
            "backward pass, also in those of the first parts of a batch",
            'Remove `static_graph`, or use `micro_batch_size="auto"`.',
        )


def _has_batch_size_finder(trainer: Any) -> bool:
    return any(
        base.__name__ == "BatchSizeFinder"
        for callback in trainer.callbacks
        for base in type(callback).__mro__
    )
