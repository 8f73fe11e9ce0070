"""Find and select the repeated blocks of any module."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_memsave.errors import ConfigurationError

BlockSelector: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A class name, ``"re:"`` and a regular expression over module names, a class, or a function of the
name and the module."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_TORCH_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# A family of blocks must lower the cost by this share of all candidates, so that a few small
# repeated modules next to the transformer do not count as its blocks.
_MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Block:
    """One repeated unit of a model, such as a transformer layer.

    Args:
        name: Its name in ``model.named_modules()``.
        module: The module itself.
    """

    name: str
    module: nn.Module


def find_blocks(
    model: nn.Module, selectors: BlockSelector | Sequence[BlockSelector] | None = None
) -> list[Block]:
    """Find the repeated blocks of a model.

    Without selectors: Hugging Face's ``GradientCheckpointingLayer`` and torch's transformer layers,
    then, outside of these, the classes of repeated modules that together leave the least of the
    model outside of blocks and have the smallest largest block (in parameters).

    Args:
        model: Any module.
        selectors: Selectors of blocks: one `BlockSelector`, or several.

    Returns:
        The blocks in the order of ``model.named_modules()``, outermost ones only, each once even if
        it has several names.

    Example:
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)]
        >>> [block.name for block in find_blocks(nn.Sequential(nn.Linear(8, 8), *layers))]
        ['1', '2', '3']
        >>> [block.name for block in find_blocks(nn.Sequential(*layers), "re:[01]")]
        ['0', '1']
    """
    named = dict(model.named_modules())
    if selectors is not None:
        predicates = [as_predicate(s) for s in as_selectors(selectors)]
        chosen = {n for n, m in named.items() if n and any(p(n, m) for p in predicates)}
        return _outermost(named, chosen)
    known = {n for n, m in named.items() if n and isinstance(m, _known_block_classes())}
    # In Swin, a stage is such a layer, and so are the layers inside it.
    inside = Counter(parent for name in known for parent in ancestors(name))
    known = {block.name for block in _outermost(named, {n for n in known if inside[n] < 2})}
    return _outermost(named, known | _repeated_outside(named, known))


def owners_of(
    params: Sequence[nn.Parameter], model: nn.Module, blocks: Sequence[Block]
) -> dict[nn.Parameter, Block | None]:
    """Find the block of each parameter; those that several blocks share belong to none."""
    found: dict[nn.Parameter, set[int | None]] = {param: set() for param in params}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in found:
            found[param].add(
                next(
                    (i for i, block in enumerate(blocks) if name.startswith(f"{block.name}.")), None
                )
            )
    owners: dict[nn.Parameter, Block | None] = {}
    for param, indices in found.items():
        index = next(iter(indices)) if len(indices) == 1 else None
        owners[param] = None if index is None else blocks[index]
    return owners


def as_selectors(selectors: BlockSelector | Sequence[BlockSelector]) -> tuple[BlockSelector, ...]:
    several = (
        tuple(selectors)
        if isinstance(selectors, Sequence) and not isinstance(selectors, str)
        else (selectors,)
    )
    for selector in several:
        if isinstance(selector, str) and selector.startswith("re:"):
            _compile(selector)
        elif not _is_selector(selector):
            raise ConfigurationError(
                f"`blocks={selector!r}` does not select blocks. Pass a class name such as "
                '"BertLayer", a class, "re:" and a regular expression over module names, or a '
                "function of name and module."
            )
    if not several:
        raise ConfigurationError("`blocks=()` selects nothing. Pass a class name, or `None`.")
    return several


def _is_selector(selector: object) -> bool:
    if isinstance(selector, type):
        return issubclass(selector, nn.Module)
    if isinstance(selector, str):
        return bool(selector)
    return callable(selector) and not isinstance(selector, nn.Module)


def as_predicate(selector: BlockSelector) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, str) and not selector.startswith("re:"):
        return lambda _, module: any(c.__name__ == selector for c in type(module).__mro__)
    if isinstance(selector, str):
        pattern = _compile(selector)
        return lambda name, _: pattern.fullmatch(name) is not None
    if isinstance(selector, type):
        return lambda _, module: isinstance(module, selector)
    return selector


def repeated_classes(model: nn.Module, limit: int = 8) -> str:
    """List repeated classes of a model that could be blocks, for messages."""
    counts = Counter(
        type(module).__name__
        for name, module in model.named_modules()
        if not isinstance(module, _CONTAINERS) and _can_be_block(name, module)
    )
    repeated = [f"`{name}` ({count})" for name, count in counts.most_common(limit) if count > 1]
    return ", ".join(repeated)


def _compile(selector: str) -> re.Pattern[str]:
    try:
        return re.compile(selector.removeprefix("re:"))
    except re.error as error:
        raise ConfigurationError(
            f"`blocks={selector!r}` is not a regular expression: {error}. Write for example "
            r'"re:encoder\.layer\.\d+".'
        ) from error


def _known_block_classes() -> tuple[type[nn.Module], ...]:
    # Without an import of transformers there is no instance of its classes.
    layers = sys.modules.get("transformers.modeling_layers")
    hugging_face = getattr(layers, "GradientCheckpointingLayer", None)
    return _TORCH_BLOCKS if hugging_face is None else (*_TORCH_BLOCKS, hugging_face)


def _outermost(named: dict[str, nn.Module], chosen: Iterable[str]) -> list[Block]:
    chosen = set(chosen)
    return [
        Block(name, module)
        for name, module in named.items()
        if name in chosen and not any(parent in chosen for parent in ancestors(name))
    ]


def is_hugging_face(module: nn.Module) -> bool:
    # Without an import of transformers there is no instance of its classes.
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def is_given_cache(args: Any, kwargs: Any) -> bool:
    # Without an import of transformers there is no instance of its classes.
    cache_utils = sys.modules.get("transformers.cache_utils")
    return cache_utils is not None and any(
        isinstance(value, cache_utils.Cache) for value in (*args, *kwargs.values())
    )


def compiled_in(named: Iterable[tuple[str, nn.Module]]) -> str:
    """Return the name of the first module that is compiled, of a root its class; empty for none."""
    for name, module in named:
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return name or type(module).__name__
    return ""


def ancestors(name: str) -> list[str]:
    """Return the names of all modules around a module, without the root."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not isinstance(p, UninitializedParameter))


# Groups of modules that could be blocks: repeated, with parameters, not a single layer.
def _families(named: dict[str, nn.Module], free: set[str]) -> list[list[Block]]:
    families: dict[tuple[str, type[nn.Module]], list[Block]] = {}
    for name, module in named.items():
        if name not in free or not _can_be_block(name, module):
            continue
        # Sequentials only form a family inside the same container, as they may hold anything.
        parent = name.rpartition(".")[0] if isinstance(module, nn.Sequential) else ""
        if isinstance(module, nn.Sequential) and not isinstance(named[parent], _CONTAINERS):
            continue
        families.setdefault((parent, type(module)), []).append(Block(name, module))
    outermost = (_outermost(named, [b.name for b in family]) for family in families.values())
    return [family for family in outermost if len(family) > 1]


def _can_be_block(name: str, module: nn.Module) -> bool:
    # Experts run side by side: most of a mixture's parameters, but few of its activations.
    is_expert = name.split(".")[-2:-1] == ["experts"]
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_expert or is_list or _is_layer(module) or isinstance(module, torch.jit.ScriptModule):
        return False
    return any(True for _ in module.parameters())


# A Linear, a norm or an embedding, torch's own or a subclass: recomputing it alone saves nothing.
def _is_layer(module: nn.Module) -> bool:
    bases = [c for c in type(module).__mro__ if c.__module__.startswith("torch.nn.modules")]
    return bases[0] is not nn.Module and not any(True for _ in module.children())


# Chooses families of repeated modules outside of the known blocks. The cost estimates activation
# memory by parameters: everything outside of blocks, plus one block that is being recomputed.
def _repeated_outside(named: dict[str, nn.Module], known: set[str]) -> set[str]:
    around = {parent for name in known for parent in ancestors(name)}
    free = {
        name
        for name in named
        if name and name not in around and not known.intersection([*ancestors(name), name])
    }
    families = _families(named, free)
    sizes = {b.name: _num_parameters(b.module) for family in families for b in family}
    total = sum(sizes[b.name] for b in _outermost(named, sizes))
    min_gain = _MIN_GAIN * (total + sum(_num_parameters(named[name]) for name in known))

    def cost(chosen: set[str]) -> int:
        blocks = [sizes[b.name] for b in _outermost(named, chosen)]
        return total - sum(blocks) + max(blocks, default=0)

    chosen: set[str] = set()
    while True:
        options = [chosen | {b.name for b in f} for f in families if not _overlaps(chosen, f)]
        best = min(options, key=cost, default=chosen)
        if cost(chosen) - cost(best) <= min_gain:
            return chosen
        chosen = best


def _overlaps(chosen: set[str], family: list[Block]) -> bool:
    names = {block.name for block in family}
    inner = any(parent in chosen for name in names for parent in [*ancestors(name), name])
    return inner or any(parent in names for name in chosen for parent in ancestors(name))
