"""Activation checkpointing of selected repeated blocks."""

import difflib
import functools
import inspect
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from lightning_memsave.core.blocks import (
    Block,
    BlockSelector,
    ancestors,
    as_selectors,
    find_blocks,
    is_given_cache,
    is_hugging_face,
    repeated_classes,
)
from lightning_memsave.core.patching import (
    is_patched_with,
    own,
    patch_method,
    previous_method,
    set_own,
)
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, NoEffectWarning, Problem
from lightning_memsave.techniques.activation_checkpointing.block_state import forget_state
from lightning_memsave.techniques.activation_checkpointing.recompute import recompute
from lightning_memsave.techniques.activation_checkpointing.tiles import Tiles, norms_of

T = TypeVar("T")


def parts_of(blocks: Sequence[Block]) -> list[Block]:
    """Return the submodules of blocks with layers inside, such as attention and feed-forward."""
    return [
        Block(f"{block.name}.{name}", child)
        for block in blocks
        for name, child in block.module.named_children()
        if not isinstance(child, nn.ModuleList | nn.ModuleDict)
        and any(p.ndim > 1 for inner in child.children() for p in inner.parameters())
    ]


def methods_of(blocks: Sequence[Block]) -> list[Block]:
    """Return blocks whose feed-forward layers are called by a method of their own."""
    with_method = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return [
        Block(f"{block.name}{_METHOD}", block.module)
        for block in blocks
        if isinstance(block.module, with_method)
    ]


def is_chain(module: nn.Module) -> bool:
    has_own_forward = type(module).forward is not nn.Sequential.forward
    return isinstance(module, nn.Sequential) and len(module) >= 4 and not has_own_forward


def inplace_problems(blocks: Sequence[Block]) -> list[Problem]:
    why = 'it would overwrite an output that "selective" keeps'
    fix = 'Set `inplace=False` there, or use `activation_checkpointing="all"`.'
    return [
        Problem(f"`{block.name}.{name}` has `inplace=True`", why, fix)
        for block in blocks
        for name, module in block.module.named_modules()
        if getattr(module, "inplace", False) is True
    ]


_VALUES = (
    '"all", "nested", "selective", "tiled", "sqrt", "every:2", a number of blocks such as 6, a '
    'share such as "50%", or numbers of blocks in order such as "nested:2,full:4,selective:4"'
)
_KINDS = ("tiled", "nested", "full", "selective")
_TILES = "_memsave_tiles"  # its copies run on all tokens
_METHOD = "._ff_block"  # of torch's layers


@dataclass(frozen=True)
class ActivationCheckpointing(Technique[nn.Module]):
    """Recompute the activations of each block in the backward pass.

    Only the input of a checkpointed block is saved; everything inside is computed a second time.
    With all blocks checkpointed, activation memory falls from the sum over blocks to one block plus
    the block inputs, for about one third more compute.

    Args:
        which: ``"all"`` blocks; a whole number m for the first m blocks, which is the best simple
            choice when not all are needed; ``"50%"`` for that share of the blocks, first ones
            first, rounded up; ``"every:k"`` for each k-th block; ``"nested"`` for all blocks, and
            for their submodules (attention, feed-forward) once more while a block is recomputed, so
            that the activations of one submodule exist at a time; ``"tiled"`` for the same with
            long sequences: norms, and submodules that compute each position by itself, such as
            feed-forward ones (and those layers of torch's transformer layers), run and are
            recomputed on `tile` tokens at a time;
            ``"selective"`` for all blocks, but the outputs of matrix products, convolutions and
            attention are saved and only the rest is recomputed; ``"sqrt"`` to split each long
            ``nn.Sequential`` into about sqrt(n) segments (Chen et al.). For transformer blocks
            ``"all"`` needs less memory than ``"sqrt"`` for the same recomputation, because the
            activations inside a block are far larger than its input. ``"nested:2,full:4,
            selective:4"`` treats the first 2 blocks as ``"nested"``, the next 4 as ``"all"``, the
            next 4 as ``"selective"``, and leaves the others as they are; `plan_memory` finds such
            numbers.
        tile: Tokens at a time for ``"tiled"``, those of all samples together.
        blocks: Selectors of blocks: class names, classes, ``"re:..."`` regular expressions
            over module names, or functions of name and module. ``None`` finds them: see
            `find_blocks`.

    Raises:
        ConfigurationError: If ``which``, ``tile`` or ``blocks`` is none of these.

    Note:
        Exactness is *bitwise*, dropout and BatchNorm included: random numbers are drawn again from
        the same state, and state that a block changes in ``forward`` is changed once. Of
        ``"tiled"`` it is *rounding*: gradients of weights are sums over tiles, in 16 bits if the
        weights have 16, and dropout draws other masks. The first batch shows which submodules
        compute each position by itself, by their operators and by a few positions; the others are
        recomputed whole. A block must compute the same twice: without state in globals, and
        without a change of its arguments in place. Hugging Face models are trained with
        ``use_cache=False``. More limits
        are in docs/checkpointing_and_micro_batches.md.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        >>> with ActivationCheckpointing(blocks=nn.Linear).apply(model) as handle:
        ...     handle.changes
        ('0', '1', '2', '3')
        >>> ActivationCheckpointing(2, blocks="Linear").apply(model).changes
        ('0', '1')

    References:
        Chen et al. (2016), Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """

    name: ClassVar[str] = "activation_checkpointing"
    argument: ClassVar[str] = "activation_checkpointing"
    examples: ClassVar[str] = ""
    remedy: ClassVar[str] = "Use `blocks=` with the class of the blocks"
    offers: ClassVar[tuple[Offer, ...]] = (
        Offer("recompute selectively", "selective", "less than recomputing all blocks", 0.1),
        Offer("recompute half of the blocks", "50%", "about 1/6 more compute", 1 / 6),
        Offer("recompute all blocks", "all", "about 1/3 more compute", 1 / 3),
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    which: str | int = "all"
    _: KW_ONLY
    tile: int = 4096
    blocks: BlockSelector | Sequence[BlockSelector] | None = None

    def __post_init__(self) -> None:
        which: Any = self.which
        if isinstance(which, float) and which.is_integer():
            object.__setattr__(self, "which", int(which))
        if not _is_valid(self.which):
            is_share = isinstance(self.which, float) and 0 < self.which < 1
            share = f'Write "{100 * self.which:g}%" for this share. ' if is_share else ""
            raise ConfigurationError(
                f"`activation_checkpointing={self.which!r}` is not a valid choice of blocks. "
                f"{share}Use {_VALUES}, or `None`."
            )
        is_tiled = "tiled" in str(self.which)
        if type(self.tile) is not int or self.tile < 1:
            raise ConfigurationError(
                f"`tile={self.tile!r}` is not a number of tokens: it must be at least 1. Use "
                '`ActivationCheckpointing("tiled", tile=4096)`.'
            )
        if self.tile != type(self).tile and not is_tiled:
            raise ConfigurationError(
                f"`tile={self.tile}` is not used with {self.which!r}. Use "
                f'`ActivationCheckpointing("tiled", tile={self.tile})`, or remove `tile`.'
            )
        if is_tiled:
            object.__setattr__(self, "exactness", Exactness.ROUNDING)
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_selectors(self.blocks))

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse a strategy that checkpoints activations already."""
        if not facts.checkpoints_activations:
            return []
        why = f"`{facts.strategy}` was told to checkpoint activations, and twice is too much"
        fix = f"Remove that setting from `{facts.strategy}`, or set `{self.argument}=None` here."
        return [Problem(written, why, fix)]

    def is_served(self, target: nn.Module) -> bool:
        """Return whether there are blocks, which checkpoint themselves already."""
        return bool(self._blocks(target))

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing."""
        if self.which == "sqrt":
            if self._chains(target) or not self._blocks(target):
                return []
            why = (
                f"`{type(target).__name__}` has no `nn.Sequential` of four or more layers to split"
            )
            fix = 'Use "all", which needs less memory for transformer blocks at the same '
            return [Problem('`activation_checkpointing="sqrt"`', why, f"{fix}recomputation.")]
        blocks = self._blocks(target)
        problems = []
        runs = _runs(str(self.which))
        wanted = sum(count for _, count in runs or ())
        if isinstance(self.which, int):
            wanted = self.which
        if 0 < (number := len(blocks)) < wanted:
            what, fix = (
                f"`{self.argument}={self.which!r}`",
                f'Use a number up to {number}, or "all".',
            )
            problems.append(Problem(what, f"the model has {number} blocks", fix))
        selective = [block for block, kind in self.kinds_of(blocks) if kind == "selective"]
        return problems + inplace_problems(selective)

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        if self.which == "sqrt":
            chains = self._chains(target)
            undo = [patch_method(chain.module, _Segments.forward) for chain in chains]
            undo += [functools.partial(forget_state, chain.module) for chain in chains]
            undo += _switch_caches_off(target, chains)
            words = f"{len(chains)} split into segments: {_counted(chains)}"
            return Handle(target, [chain.name for chain in chains], (), undo, summary=words)
        blocks = self._blocks(target)
        if not blocks:
            return Handle(target, (), [self._nothing_found(target)])
        kinds = {block.name: kind for block, kind in self.kinds_of(blocks)}
        chosen = [block for block in blocks if block.name in kinds]
        plain = _plain(chosen)
        free = [block for block in plain if not _checkpoints_itself(target, block)]
        skipped = []
        if len(plain) < len(chosen):
            skipped.append(f"{len(chosen) - len(plain)} of {len(chosen)} blocks are TorchScript")
        if len(free) < len(plain):
            skipped.append(
                f"{len(plain) - len(free)} of {len(chosen)} blocks checkpoint themselves already"
            )
        full = [block for block in free if kinds[block.name] != "selective"]
        selective = [block for block in free if kinds[block.name] == "selective"]
        tiled = [block for block in full if kinds[block.name] == "tiled"]
        nested = [block for block in full if kinds[block.name] == "nested"]
        parts = _plain(parts_of(nested))
        in_tiles = _plain([*parts_of(tiled), *methods_of(tiled)])
        norms = _plain(norms_of(tiled))
        all_parts = [*parts, *in_tiles, *norms]
        summary = []
        if full or not selective:
            summary.append(f"{len(full)} of {len(blocks)} blocks recomputed: {_counted(full)}")
        if parts:
            summary[-1] += f"; of them once more: {_counted(parts)}"
        if tiled:
            summary[-1] += (
                f"; of them on {self.tile:,} tokens at a time, if they compute each position by "
                f"itself: {_counted([*in_tiles, *norms])}"
            )
        if selective:
            summary.append(f"{len(selective)} recomputed selectively: {_counted(selective)}")
        undo = [patch_method(b.module, _Full.forward) for b in (*full, *parts)]
        undo += [patch_method(block.module, _Selective.forward) for block in selective]
        undo += _in_tiles(in_tiles, norms, self.tile)
        undo += [functools.partial(forget_state, each.module) for each in (*free, *all_parts)]
        undo += _switch_caches_off(target, free)
        names = [block.name for block in (*free, *all_parts)]
        return Handle(target, names, skipped, undo, summary="; ".join(summary))

    def _blocks(self, model: nn.Module) -> list[Block]:
        return find_blocks(model, self.blocks)

    def _chains(self, model: nn.Module) -> list[Block]:
        if self.blocks is not None:
            return [b for b in self._blocks(model) if is_chain(b.module)]
        return find_blocks(model, lambda _, module: is_chain(module)) or (
            [Block("", model)] if is_chain(model) else []
        )

    def kinds_of(self, blocks: Sequence[T]) -> list[tuple[T, str]]:
        """Say of all blocks, in order, which are checkpointed, and how.

        Example:
            >>> ActivationCheckpointing("full:1,selective:1").kinds_of(["a", "b", "c"])
            [('a', 'full'), ('b', 'selective')]
        """
        if isinstance(self.which, int):
            return [(block, "full") for block in blocks[: self.which]]
        if (percent := _percent(self.which)) is not None:
            return [(block, "full") for block in blocks[: math.ceil(percent * len(blocks) / 100)]]
        if self.which.startswith("every:"):
            every = int(self.which.removeprefix("every:"))
            return [(block, "full") for block in blocks[::every]]
        if (runs := _runs(self.which)) is not None:
            kinds = [kind for kind, count in runs for _ in range(count)]
            return list(zip(blocks, kinds, strict=False))
        kind = self.which if self.which in _KINDS else "full"
        return [(block, kind) for block in blocks]

    def _nothing_found(self, model: nn.Module) -> str:
        name, repeated = type(model).__name__, repeated_classes(model)
        if self.blocks is None:
            return (
                f"no repeated block was found in `{name}`: no module class with layers inside is "
                "used twice, and recomputing single layers saves nothing"
            )
        selectors = ", ".join(
            s if isinstance(s, str) else repr(s) for s in as_selectors(self.blocks)
        )
        names = {type(module).__name__ for module in model.modules()}
        close = difflib.get_close_matches(selectors, names, n=1)
        guess = f". Did you mean `{close[0]}`?" if close else ""
        others = f". Classes that repeat: {repeated}" if repeated and not close else ""
        return f"nothing in `{name}` matches `blocks={selectors!r}`{guess}{others}"


# `patch_method` needs functions named "forward", one per kind of recomputation.
class _Full:
    @staticmethod
    def forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _forward(block, args, kwargs, is_selective=False)


class _Selective:
    @staticmethod
    def forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _forward(block, args, kwargs, is_selective=True)


class _Tiled:
    @staticmethod
    def forward(part: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _run_in_tiles(part, "forward", args, kwargs)

    @staticmethod
    def _ff_block(layer: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _run_in_tiles(layer, "_ff_block", args, kwargs)


class _Segments:
    @staticmethod
    def forward(chain: nn.Sequential, input: Any) -> Any:
        if not torch.is_grad_enabled():
            return previous_method(chain, "forward")(input)
        layers = list(chain)
        size = math.ceil(len(layers) / round(math.sqrt(len(layers))))
        for start in range(0, len(layers), size):
            segment = layers[start : start + size]
            run = functools.partial(_run_chain, segment)
            # Backward would recompute the last segment at once, which saves nothing.
            is_last = start + size >= len(layers)
            input = run(input) if is_last else recompute(run, segment, (input,), {})
        return input


_FORWARDS = (_Full.forward, _Selective.forward, _Segments.forward)


def _forward(block: nn.Module, args: Any, kwargs: Any, *, is_selective: bool) -> Any:
    run = previous_method(block, "forward")
    if not torch.is_grad_enabled() or _runs_without(block, args, kwargs):
        return run(*args, **kwargs)
    return recompute(run, [block], args, kwargs, is_selective=is_selective)


def _run_in_tiles(part: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
    run, tiles = previous_method(part, name), own(part, _TILES)
    if tiles is None or not torch.is_grad_enabled() or _runs_without(part, args, kwargs):
        return run(*args, **kwargs)
    return tiles.run(part, run, args, kwargs)


# Recomputation would write to a key-value cache a second time.
def _runs_without(block: nn.Module, args: Any, kwargs: Any) -> bool:
    is_given = is_given_cache(args, kwargs)
    if is_given and block.training:
        warnings.warn(
            f"activation_checkpointing has no effect on `{type(block).__name__}`: it is called "
            "with a key-value cache, such as a learned prefix or a cache that another part of the "
            "model reads. Train without a cache, or set `activation_checkpointing=None`.",
            NoEffectWarning,
            stacklevel=3,
        )
    return is_given


# As Hugging Face's own checkpointing does, for all models that create caches by default.
def _without_cache(model: nn.Module, args: Any, kwargs: Any, *, is_inner: bool) -> tuple[Any, Any]:
    # Older caches are tuples. transformers renamed `past_key_values` to `cache` in 5.24.
    is_given = is_given_cache(args, kwargs) or kwargs.get("past_key_values") is not None
    if is_given or not model.training or not torch.is_grad_enabled():
        return args, kwargs
    # An outer model that passes `use_cache=True` to an inner one reads the cache, as Pi0 does.
    if is_inner and kwargs.get("use_cache"):
        return args, kwargs
    if kwargs.get("use_cache"):
        warnings.warn(
            f"`use_cache=True` has no effect in training of `{type(model).__name__}`: checkpointed "
            "blocks cannot fill a cache. Remove it, or set `activation_checkpointing=None`.",
            NoEffectWarning,
            stacklevel=3,
        )
    place = [*inspect.signature(type(model).forward).parameters].index("use_cache") - 1
    if place < len(args):
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, kwargs | {"use_cache": False}


def _switch_caches_off(model: nn.Module, blocks: Sequence[Block]) -> list[Callable[[], None]]:
    if not blocks:
        return []
    names = {"", *(name for block in blocks for name in ancestors(block.name))}
    modules = {name: model.get_submodule(name) for name in sorted(names)}
    models = {name: module for name, module in modules.items() if is_hugging_face(module)}
    undo = []
    for name, module in models.items():
        if "use_cache" in inspect.signature(type(module).forward).parameters:
            is_inner = bool(name) and any(around in models for around in ["", *ancestors(name)])
            hook = functools.partial(_without_cache, is_inner=is_inner)
            undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    return undo


def _in_tiles(
    parts: Sequence[Block], norms: Sequence[Block], size: int
) -> Iterator[Callable[[], Any]]:
    reasons: dict[str, str] = {}  # shared: only where all parts stay whole, that is said
    for part in (*parts, *norms):
        tiles = Tiles(part.name, size, None if part in norms else reasons, len(parts))
        yield set_own(part.module, _TILES, tiles)
        is_method = part.name.endswith(_METHOD)
        yield patch_method(part.module, _Tiled._ff_block if is_method else _Tiled.forward)


def _plain(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if not isinstance(block.module, torch.jit.ScriptModule)]


def _run_chain(layers: list[nn.Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


def _counted(blocks: Sequence[Block]) -> str:
    classes = Counter(
        f"{type(block.module).__name__}{_METHOD if block.name.endswith(_METHOD) else ''}"
        for block in blocks
    )
    return ", ".join(f"{count} x {name}" for name, count in classes.items())


def _is_valid(which: object) -> bool:
    if isinstance(which, bool):
        return False
    if isinstance(which, int):
        return which >= 1
    if not isinstance(which, str):
        return False
    if (percent := _percent(which)) is not None:
        return 0 < percent <= 100
    every = which.removeprefix("every:")
    if every != which:
        return every.isdecimal() and int(every) >= 1
    return which in ("all", "nested", "tiled", "selective", "sqrt") or _runs(which) is not None


def _percent(which: str) -> float | None:
    found = re.fullmatch(r"(\d+\.?\d*)%", which)
    return None if found is None else float(found[1])


# Of "nested:2,full:4": pairs of kind and number; `None` of any other text.
def _runs(which: str) -> list[tuple[str, int]] | None:
    pairs = [part.strip().partition(":") for part in which.split(",")]
    if any(kind not in _KINDS or not n.isdecimal() or int(n) < 1 for kind, _, n in pairs):
        return None
    return [(kind, int(n)) for kind, _, n in pairs]


# Hugging Face sets the flag on blocks or, in older models, on the module that calls them.
def _checkpoints_itself(model: nn.Module, block: Block) -> bool:
    around = [model, *(model.get_submodule(name) for name in ancestors(block.name))]
    return any(_is_checkpointing(m) for m in (*around, *block.module.modules()))


def _is_checkpointing(module: nn.Module) -> bool:
    return (
        getattr(module, "gradient_checkpointing", False) is True
        or type(module).__name__ == "CheckpointWrapper"
        or any(is_patched_with(module, forward) for forward in _FORWARDS)
    )
