"""What activation checkpointing asks of modules: chains, parts of blocks, layers in place."""

from collections.abc import Sequence

from torch import nn

from lightning_memsave.core.blocks import Block
from lightning_memsave.errors import Problem


def parts_of(blocks: Sequence[Block]) -> list[Block]:
    """Find what blocks are made of, such as attention and the feed-forward network.

    Args:
        blocks: The blocks.

    Returns:
        Their children that have layers with weights of their own inside.
    """
    return [
        Block(f"{block.name}.{name}", child)
        for block in blocks
        for name, child in block.module.named_children()
        if not isinstance(child, nn.ModuleList | nn.ModuleDict)
        and any(p.ndim > 1 for inner in child.children() for p in inner.parameters())
    ]


def is_chain(module: nn.Module) -> bool:
    """Say whether a module runs its layers one after the other.

    Args:
        module: Any module.

    Returns:
        True for an ``nn.Sequential`` of four or more.
    """
    has_own_forward = type(module).forward is not nn.Sequential.forward
    return isinstance(module, nn.Sequential) and len(module) >= 4 and not has_own_forward


def no_chain(model: nn.Module) -> Problem:
    """Say that there is nothing to cut up.

    Args:
        model: The model.

    Returns:
        The problem.
    """
    return Problem(
        '`activation_checkpointing="sqrt"`',
        f"`{type(model).__name__}` has no `nn.Sequential` of four or more layers to cut up",
        'Use "all", which needs less memory for transformer blocks at the same recomputation.',
    )


def inplace_problems(blocks: Sequence[Block]) -> list[Problem]:
    """Find layers that overwrite what another one has given.

    Args:
        blocks: The blocks.

    Returns:
        All problems.
    """
    return [
        Problem(
            f"`{block.name}.{name}` has `inplace=True`",
            'it would overwrite an output that "selective" keeps',
            'Set `inplace=False` there, or use `activation_checkpointing="all"`.',
        )
        for block in blocks
        for name, module in block.module.named_modules()
        if getattr(module, "inplace", False) is True
    ]
