"""Which weights of a model wait on the host, and which blocks keep theirs on the device."""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import nn

from lightning_memsave.core.blocks import Block, owners_of
from lightning_memsave.core.memory import is_fake
from lightning_memsave.errors import Problem
from lightning_memsave.techniques.offloading.quantized import has_4_bits, has_8_bits

AUTO = "auto"
_PERCENT = re.compile(r"(\d+(\.\d+)?)%")


def is_number_of_blocks(value: object) -> bool:
    """Say whether a value is a number of blocks, or a share of them such as ``"60%"``."""
    if isinstance(value, str):
        found = _PERCENT.fullmatch(value)
        return found is not None and Fraction(found[1]) <= 100
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def first_blocks(blocks: Sequence[Block], resident: int | str) -> Sequence[Block]:
    """Return the blocks that wait on the host; a share that stays is rounded down."""
    if resident == AUTO:
        return blocks
    return blocks[: len(blocks) - number_of(resident, len(blocks))]


def number_of(value: int | str, num_blocks: int) -> int:
    """Return how many blocks a number or a share means, at most all."""
    if isinstance(value, str):
        return int(Fraction(value.removesuffix("%")) * num_blocks / 100)
    return min(value, num_blocks)


def problems_of_number(blocks: Sequence[Block], resident: int | str) -> list[Problem]:
    if resident == AUTO:
        why = "only a prediction for a GPU, or for the device of a fit, knows how much fits"
        fix = 'Use a number such as 4 or "60%", or train with `MemSaveCallback`.'
        return [Problem(f"`resident={resident!r}`", why, fix)]
    if not blocks or isinstance(resident, str) or resident <= len(blocks):
        return []
    why, fix = f"the model has {len(blocks)} blocks", f"Use a number up to {len(blocks)}."
    return [Problem(f"`resident={resident}`", why, fix)]


# What stays on the device would need DDP beside this.
def problems_of_trained(model: nn.Module, params: Sequence[nn.Parameter]) -> list[Problem]:
    chosen = {id(param) for param in params}
    left = [
        f"`{name}`"
        for name, param in model.named_parameters()
        if param.requires_grad and id(param) not in chosen
    ]
    if not left:
        return []
    why = "it is trained and cannot be offloaded, and processes of DDP share all or nothing"
    fix = 'Use dense gradients and ordinary parameters, or `offload="activations"`.'
    return [Problem(", ".join(left), why, fix)]


# Those in blocks are streamed even if they are frozen.
def choose_weights(
    model: nn.Module,
    blocks: Sequence[Block],
    on_host: Sequence[Block],
    tables: Sequence[nn.Parameter],
    *,
    is_streamed: bool,
) -> tuple[list[nn.Parameter], str]:
    """Return the parameters to offload, those of some blocks among them, and why not the others."""
    own = {block.module for block in on_host}
    in_blocks = {p for module in own for p in module.parameters() if is_streamed}
    owners = owners_of([*model.parameters()], model, blocks)
    sparse = {
        param
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for param in module.parameters(recurse=False)
    }
    # Their forward runs no hooks of Python that could move weights.
    scripted = {
        param
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule)
        for param in module.parameters()
    }
    sharing, done = shared_parameters(model), {id(param) for param in tables}

    def reason(param: nn.Parameter) -> str:
        block = owners[param]
        if block is not None and block.module not in own:
            return "of resident blocks"
        if not param.requires_grad and param not in in_blocks:
            return "frozen"
        if not is_plain(param):
            return "of a special class"
        if param in scripted:
            return "of scripted modules"
        if param in sparse:
            return "with sparse gradients"
        return "with shared memory" if param in sharing else ""

    reasons = {param: reason(param) for param in model.parameters() if id(param) not in done}
    counts = sorted(Counter(why for why in reasons.values() if why).items())
    left = ", ".join(f"{number} {why}" for why, number in counts)
    return [param for param, why in reasons.items() if not why], left


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose memory is that of other ones, too."""
    plain = [param for param in model.parameters() if is_plain(param)]
    number = Counter(param.untyped_storage()._cdata for param in plain)
    return {param for param in plain if number[param.untyped_storage()._cdata] > 1}


# Not a lazy one, a DTensor, or a quantized one of another kind.
def is_plain(param: nn.Parameter) -> bool:
    is_own = type(param) is nn.Parameter or has_4_bits(param)
    is_own = is_own or (is_fake(param) and not has_8_bits(param))
    return is_own and param.layout == torch.strided
