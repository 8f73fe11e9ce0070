"""Run each block on a few samples of the batch at a time."""

import warnings
from collections.abc import Callable, Sequence
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
from lightning_memsave.core.nested import leaves_of, map_tensors
from lightning_memsave.core.patching import (
    is_patched_with,
    own,
    patch_method,
    previous_method,
    set_own,
)
from lightning_memsave.core.technique import Exactness, Handle, Technique
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques.micro_batching.separability import tensors_in, why_not_separable
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

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse a module that is compiled as a whole."""
        return [compiled_problem(facts.compiled)] if facts.compiled else []

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing.

        Args:
            target: The model.

        Returns:
            Blocks that are compiled, or changed already. Whether blocks mix samples is seen with
            the first batch.
        """
        blocks = find_blocks(target, self.blocks)
        if any(is_patched_with(block.module, forward) for block in blocks):
            what, why = f"`{type(target).__name__}`", "its blocks run on a few samples already"
            return [Problem(what, why, "Call `handle.undo()` of the first one.")]
        # A block that was replaced by its compiled form is inside of it.
        pairs: list[tuple[str, nn.Module]] = []
        for block in blocks:
            pairs += block.module.named_modules(prefix=block.name)
            pairs += [(name, target.get_submodule(name)) for name in ancestors(block.name)]
        compiled = compiled_in(pairs)
        return [compiled_problem(compiled)] if compiled else []

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


def compiled_problem(name: str) -> Problem:
    return Problem(
        f"`{name}`",
        "it is compiled, for batches of one size",
        f"Do not compile it, or set `{BlockMicroBatching.argument}=None`.",
    )


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
        if is_given_cache(args, kwargs):
            self._warn_of_cache(block)
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

    def _warn_of_cache(self, block: nn.Module) -> None:
        if block.training:
            warnings.warn(
                f"Micro-batches in blocks have no effect on `{type(block).__name__}`: it is called "
                "with a key-value cache. Train with `use_cache=False`.",
                NoEffectWarning,
                stacklevel=4,
            )


def forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a block on a few samples at a time; replaces its ``forward``."""
    run = previous_method(block, "forward", is_outer=True)
    chunks = None if torch.compiler.is_compiling() else own(block, _CHUNKS)
    return run(*args, **kwargs) if chunks is None else chunks.run(block, run, args, kwargs)
