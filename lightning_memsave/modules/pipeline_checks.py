"""What cannot be trained in stages, found before training."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.blocks import Block, compiled_in
from lightning_memsave.errors import Problem
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.trainer.trainer import averages_weights

_ALONE = "Train in one process."


def problems_of(
    trainer: Any, module: Any, blocks: Sequence[Block], num_micro_batches: int
) -> Iterator[Problem]:
    """Give every reason why a module cannot be divided."""
    number, name = dist.get_world_size(), f"`{type(module).__name__}`"
    if number < 2:
        yield Problem("one process", "a pipeline has two stages or more", "Use `devices=2`.")
    if len(blocks) < number:
        why = f"{len(blocks)} blocks were found in it, and each of {number} processes needs one"
        yield Problem(name, why, "Name them with `blocks=`, or use fewer `devices`.")
    if not module.automatic_optimization:
        why = "it steps its own optimizers, and runs backward itself"
        yield Problem(f"{name} with `automatic_optimization=False`", why, _ALONE)
    if compiled := compiled_in(module.named_modules()):
        why = "its compiled graph would hold blocks of other processes"
        yield Problem(f"`{compiled}`", why, "Do not compile it.")
    if callback := next((c for c in trainer.callbacks if averages_weights(c)), None):
        why = "it reads the weights of all blocks, and each process has some of them"
        yield Problem(f"`{type(callback).__name__}`", why, "Remove it.")
    yield from _problems_of_parts(module)
    if num_micro_batches > 1 and trainer.state.fn == "fit":
        for problem in MicroBatching(1).check_module(module):
            fix = 'Keep parameters in float32 with `precision="bf16-mixed"`.'
            yield Problem(f"`num_micro_batches={num_micro_batches}`", problem.why, fix)


def _problems_of_parts(module: nn.Module) -> Iterator[Problem]:
    for name, part in module.named_modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            why = "its own checkpointing may run blocks without gradients"
            fix = 'Use `MemSaveCallback(activation_checkpointing="all")`.'
            yield Problem(f"`{name}.gradient_checkpointing`", why, fix)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            why = "it has no values yet, which all processes begin with"
            yield Problem(f"`{name}`", why, "Make it on the CPU, and run a batch through it.")
        elif tensor.numel() and not tensor.untyped_storage().size():
            why = "an earlier run has ended with an error, and it is on another process"
            yield Problem(f"`{name}`", why, "Make the module anew.")


def problems_of_optimizer(optimizer: Any) -> Iterator[Problem]:
    """Give every reason why an optimizer cannot update a part of the parameters."""
    if isinstance(getattr(optimizer, "_optimizer", optimizer), torch.optim.LBFGS):
        why = "it computes with all parameters at once, of which each process has some"
        yield Problem(f"`{type(optimizer).__name__}`", why, "Use an optimizer such as AdamW.")
