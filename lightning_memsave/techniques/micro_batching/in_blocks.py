"""Run each block on a few samples of the batch at a time, if it computes each by itself."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lightning_memsave.core.blocks import (
    BlockSelector,
    ancestors,
    as_selectors,
    compiled_in,
    find_blocks,
    is_given_cache,
)
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.nested import items_of, leaves_of, map_tensors
from lightning_memsave.core.out_of_memory import is_out_of_memory
from lightning_memsave.core.patching import (
    is_patched_with,
    own,
    patch_method,
    previous_method,
    set_own,
)
from lightning_memsave.core.saved_state import RandomState, with_attribute
from lightning_memsave.core.technique import Exactness, Handle, Technique
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques.micro_batching.loss_probe import SavesBeforeWrites
from lightning_memsave.techniques.micro_batching.module_state import ModuleState
from lightning_memsave.techniques.micro_batching.technique import MicroBatching

_CHUNKS = "_memsave_chunks"  # its copies run on whole batches


@dataclass(frozen=True)
class BlockMicroBatching(Technique[nn.Module]):
    """Run each block on a few samples of the batch at a time.

    In a block, the activations of these samples only exist at once, in forward and in backward. As
    with micro-batches of the whole model, but weights that wait on the host come once for the whole
    batch, the loss stays that of the batch, and what is outside of blocks is unchanged.

    All tensors in a block's arguments that have the batch as their first dimension are split, and
    its outputs are joined. Whether the block computes each sample by itself is checked with the
    first batch. Use it with `ActivationCheckpointing`, which then recomputes a few samples at a
    time: without it all activations exist until backward.

    In a Trainer it is ``MemSaveCallback(micro_batch_size=MicroBatching(1, of="blocks"))``.

    Args:
        size: Samples that pass a block at once.
        blocks: The repeated blocks, as for `ActivationCheckpointing`; ``None`` finds them.

    Raises:
        ConfigurationError: If ``size`` or ``blocks`` is invalid.

    Note:
        Exactness is *rounding*: sums over the batch, as in gradients of weights, are computed in
        another order. With dropout other masks are drawn than for the whole batch. A block that
        mixes samples (batch normalisation in training), changes a buffer in forward, or returns
        what is not one entry per sample (an auxiliary loss) is refused in its first forward pass,
        with an `IncompatibleError`. Blocks that get a key-value cache run on the whole batch.

    Example:
        >>> model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)])
        >>> with BlockMicroBatching(2).apply(model) as handle:
        ...     handle.changes
        ('3 blocks run on 2 samples at a time',)

    References:
        Huang et al. (2019), GPipe, arXiv:1811.06965, for micro-batches.
    """

    name: ClassVar[str] = "block_micro_batching"
    argument: ClassVar[str] = MicroBatching.argument
    why_not_compiled: ClassVar[str] = "for batches of one size"
    exactness: ClassVar[Exactness] = Exactness.ROUNDING

    size: int
    _: KW_ONLY
    blocks: BlockSelector | Sequence[BlockSelector] | None = None

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise ConfigurationError(
                f"`size={self.size!r}` is not a number of samples: it must be at least 1. Use "
                "`BlockMicroBatching(1)` for the least memory."
            )
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_selectors(self.blocks))

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Read micro-batches of blocks; ``None`` for those of batches."""
        if not isinstance(value, MicroBatching) or value.of != "blocks":
            return None
        return cls(value.micro_batch_size, blocks=value.blocks)  # type: ignore[arg-type]

    def check(self, target: nn.Module) -> list[Problem]:
        """Find blocks that are compiled, or changed already; the first batch shows if they mix."""
        blocks = find_blocks(target, self.blocks)
        if any(is_patched_with(block.module, forward) for block in blocks):
            what, why = f"`{type(target).__name__}`", "its blocks run on a few samples already"
            return [Problem(what, why, "Call `handle.undo()` of the first one.")]
        # A block that was replaced by its compiled form is inside of it.
        pairs: list[tuple[str, nn.Module]] = []
        for block in blocks:
            pairs += block.module.named_modules(prefix=block.name)
            pairs += [(name, target.get_submodule(name)) for name in ancestors(block.name)]
        return self.problems_of_compiled(compiled_in(pairs))

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        blocks = [
            block
            for block in find_blocks(target, self.blocks)
            if not isinstance(block.module, torch.jit.ScriptModule)
        ]
        if not blocks:
            why_not = f"no repeated block was found in `{type(target).__name__}`"
            return Handle(target, (), [why_not])
        undo: list[Callable[[], Any]] = []
        for block in blocks:
            undo.append(set_own(block.module, _CHUNKS, _Chunks(block.name, self.size)))
            undo.append(patch_method(block.module, forward, is_outer=True))
        samples = f"{self.size} sample{'s' if self.size > 1 else ''}"
        return Handle(target, [f"{len(blocks)} blocks run on {samples} at a time"], (), undo)


def _why_whole(args: Any, kwargs: Any) -> str:
    if torch._C._are_functorch_transforms_active():
        return "`torch.func` hides the batch from it. Set `micro_batch_size=None`."
    if is_given_cache(args, kwargs):
        return "it is called with a key-value cache. Train with `use_cache=False`."
    return ""


@dataclass
class _Chunks:
    name: str
    size: int
    # By form of the arguments: of each tensor, whether its first dimension is the batch. A form
    # that was checked once stays: a mask with as many tokens as a later batch has samples is none
    # of samples.
    checked: dict[Any, list[bool]] = field(default_factory=dict)

    def run(self, block: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        num_samples = next((len(tensor) for tensor in tensors if tensor.ndim), 0)
        if num_samples <= self.size:
            return run(*args, **kwargs)
        if why := _why_whole(args, kwargs):
            self._warn_of_no_effect(block, why)
            return run(*args, **kwargs)
        per_sample = self._per_sample(block, run, args, kwargs, num_samples)
        # Each tensor once: torch's attention checks `query is key`.
        parts = {
            id(tensor): tensor.split(self.size)
            for tensor, is_split in zip(tensors, per_sample, strict=True)
            if is_split
        }
        outputs = []
        for index in range(-(-num_samples // self.size)):

            def take(tensor: Tensor, index: int = index) -> Tensor:
                return parts[id(tensor)][index] if id(tensor) in parts else tensor

            few_args, few_kwargs = map_tensors((args, kwargs), take)
            outputs.append(run(*few_args, **few_kwargs))
        columns = zip(*map(tensors_in, outputs), strict=True)
        return map_tensors(outputs[0], lambda _: torch.cat(next(columns)))

    def _per_sample(
        self, block: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, num_samples: int
    ) -> list[bool]:
        leaves = [(p, t) for p, t in leaves_of((args, kwargs)) if isinstance(t, Tensor)]
        form = (block.training, *((path, t.ndim, t.shape[:1] == (1,)) for path, t in leaves))
        is_of_samples = [t.shape[:1] == (num_samples,) for _, t in leaves]
        known = self.checked.get(form)
        if known is not None and all(
            is_now for is_now, was in zip(is_of_samples, known, strict=True) if was
        ):
            return known
        if why := why_not_separable(block, run, args, kwargs, is_of_samples):
            name = type(block).__name__
            what = f'`MicroBatching({self.size}, of="blocks")` with `{self.name}`, a `{name}`'
            fix = (
                f"Use `micro_batch_size={self.size}`, which splits the batch before it comes to "
                "the model. Layers of torch need `batch_first=True`."
            )
            raise IncompatibleError(BlockMicroBatching.name, [Problem(what, why, fix)])
        self.checked[form] = is_of_samples
        return is_of_samples

    def _warn_of_no_effect(self, block: nn.Module, why: str) -> None:
        if block.training:
            name = type(block).__name__
            warnings.warn(
                f"Micro-batches in blocks have no effect on `{name}`: {why}",
                NoEffectWarning,
                stacklevel=4,
            )


def forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a block on a few samples at a time; replaces its ``forward``."""
    run = previous_method(block, "forward", is_outer=True)
    chunks = None if torch.compiler.is_compiling() else own(block, _CHUNKS)
    return run(*args, **kwargs) if chunks is None else chunks.run(block, run, args, kwargs)


Call = Callable[..., Any]
"""The forward function of a block."""


def why_not_separable(
    block: nn.Module, run: Call, args: Any, kwargs: Any, per_sample: Sequence[bool]
) -> str:
    """Run a block on the first two samples of its input to find out whether it mixes samples.

    Random states, buffers and arguments are as before afterwards. Of fake tensors only shapes are
    compared.
    """
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if any(norm.training for norm in norms):
        return f"`{type(norms[0]).__name__}` in it computes with statistics of the whole batch"
    trial = _Trial(block, run, (args, kwargs), per_sample)
    try:
        with torch.no_grad(), _without_cast_cache():
            return trial.why_mixed() or trial.why_dependent_on_size()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"with its first two samples it raises {type(error).__name__}: {error}"
    finally:
        trial.random.restore()


class _Trial:
    """Calls of a block with the first samples of its input."""

    def __init__(
        self, block: nn.Module, run: Call, arguments: Any, per_sample: Sequence[bool]
    ) -> None:
        self._block, self._run = block, run
        self._arguments, self._per_sample = arguments, per_sample
        tensors = tensors_in(arguments)
        self._is_fake = any(map(is_fake, tensors))
        self.random = RandomState({t.device for t in tensors if t.is_cuda and not is_fake(t)})

    def why_mixed(self) -> str:
        """Compare what is computed for a sample beside two others."""
        with _restored(self._block) as state:
            one, is_kept = self._call(2)
            kept = state.kept()
            other, _ = self._call(2, _with_other_second)
            if why := state.why_changed() or _why_kept(kept, state.kept()):
                return why
        return _why_different(one, other) if is_kept else "it changes its arguments"

    def why_dependent_on_size(self) -> str:
        """Compare with the sample alone: what is split may be another dimension of that size."""
        if self._is_fake:
            return ""
        in_evaluation = with_attribute(self._block.modules(), "training", False)
        with in_evaluation, _restored(self._block):
            outputs = [self._call(number)[0] for number in (2, 1)]
        for both, alone in zip(*map(tensors_in, outputs), strict=True):
            if alone.shape != (1, *both.shape[1:]) or not _is_close(both[0], alone[0]):
                return "what it computes for a sample depends on how many there are"
        return ""

    def _call(
        self, num_samples: int, change: Callable[[Tensor], Tensor] = torch.clone
    ) -> tuple[Any, bool]:
        self.random.restore()
        flags = iter(self._per_sample)
        few = map_tensors(self._arguments, lambda t: change(t[:num_samples]) if next(flags) else t)
        versions = [tensor._version for tensor in tensors_in(few)]
        output = self._run(*few[0], **few[1])
        return output, [tensor._version for tensor in tensors_in(few)] == versions


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in any nesting, in the order of `map_tensors`."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


# The first sample must not notice it. Integers have a range, and stay.
def _with_other_second(samples: Tensor) -> Tensor:
    samples = samples.clone()
    if samples.is_floating_point():
        samples[1:] = 1 - samples[1:]
    return samples


def _why_different(one: Any, other: Any) -> str:
    for a, b in zip(_leaves(one), _leaves(other), strict=True):
        if not isinstance(a, Tensor):
            if a is not b and a != b:
                return f"it returns a `{type(a).__name__}`, which cannot be joined"
        elif a.shape[:1] != (2,):
            return (
                f"it returns a tensor of shape {tuple(a.shape)} for two samples, whose first "
                "dimension is not the batch"
            )
        elif not is_fake(a) and not torch.equal(_bits(a[0]), _bits(b[0])):
            return "what it computes for a sample depends on the others in the batch"
    return ""


# What does not depend on the samples, such as a table of positions, is the same for each part.
def _why_kept(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> str:
    for name, tensors in one.items():
        is_same = len(tensors) == len(other.get(name, ())) and all(
            a.shape == b.shape and (is_fake(a) or torch.equal(_bits(a), _bits(b)))
            for a, b in zip(tensors, other[name], strict=True)
        )
        if not is_same:
            return f"it keeps what it computes in `{name}`, which would be that of the last part"
    return ""


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return True
    kind = one.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else one.dtype
    one, other = (each.double().nan_to_num(0, 0, 0) for each in (one, other))
    return bool((one - other).norm() <= torch.finfo(dtype).eps ** 0.5 * one.norm())


# `equal` says that NaN, as in rows that are masked as a whole, differs from NaN.
def _bits(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor


def _leaves(value: Any) -> Iterator[Any]:
    items = items_of(value)
    if not items:
        yield value
    for _, item in items:
        yield from _leaves(item)


# Autocast would keep weights that were cast without a graph, and use them in the forward pass.
@contextlib.contextmanager
def _without_cast_cache() -> Iterator[None]:
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


class _State:
    """What a block holds: weights, buffers and attributes, to be restored."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._state = ModuleState(block, ())
        self._data = [(param, param.data) for param in block.parameters()]
        self._known = [t for m in block.modules() for t in tensors_in(_attributes_of(m))]
        self.watch = SavesBeforeWrites(self._state)

    def why_changed(self) -> str:
        """Say what a call has changed, as a clause; empty if it has changed nothing."""
        named = [*self._block.named_parameters(), *self._block.named_buffers()]
        for name, tensor in named:
            if self._state.has_other_values(tensor):
                return f"it changes `{name}`, and would do so once for each part"
        names = {id(param): name for name, param in self._block.named_parameters()}
        for param, data in self._data:
            if param.data_ptr() != data.data_ptr():
                return f"it replaces `{names[id(param)]}`, and would do so once for each part"
        return ""

    def kept(self) -> dict[str, list[Tensor]]:
        """List the tensors that the block has now, and had not before."""
        known = {id(tensor) for tensor in self._known}
        return {
            f"{name}.{attribute}".lstrip("."): found
            for name, module in self._block.named_modules()
            for attribute, value in _attributes_of(module).items()
            if (found := [t.detach() for t in tensors_in(value) if id(t) not in known])
        }

    def restore(self) -> None:
        for param, data in self._data:
            param.data = data
        self._state.restore()


@contextlib.contextmanager
def _restored(block: nn.Module) -> Iterator[_State]:
    state = _State(block)
    try:
        with state.watch:
            yield state
    finally:
        state.restore()


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


_OF_TORCH = {"_parameters", "_buffers", "_modules"}
