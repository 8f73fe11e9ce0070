"""Compute cross-entropy on a linear head in chunks, without materializing the logits."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from lightning_memsave.core.blocks import Block, BlockSelector, as_selectors
from lightning_memsave.core.patching import is_patched_with, patch_method, previous_method
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.techniques.chunked_cross_entropy.deferred_logits import defer
from lightning_memsave.techniques.chunked_cross_entropy.heads import (
    NODES,
    can_share,
    find_heads,
    read_head,
)
from lightning_memsave.techniques.chunked_cross_entropy.heads import forward as look_up
from lightning_memsave.techniques.chunked_cross_entropy.kernel import COUNTED, READY
from lightning_memsave.techniques.chunked_cross_entropy.products import HeadSettings, Product
from lightning_memsave.techniques.host_weight import asks_for_host_weights

_SETTINGS = "_memsave_head"


@dataclass(frozen=True)
class ChunkedCrossEntropy(Technique[nn.Module]):
    """Compute the loss of a linear head in chunks, without materializing the logits.

    Logits and the tensors of cross-entropy need up to 16 bytes per token and vocabulary entry; one
    chunk of them needs a quarter of the head's weight. Tokens without a label are skipped, which
    for masked language models makes the head several times faster.

    Args:
        heads: The linear layers: names, class names, classes, ``"re:..."`` regular expressions
            over module names, or functions of name and module. ``None``
            finds them: the result of Hugging Face's ``get_output_embeddings``, and in other models
            layers outside of the blocks with at least 1,024 outputs and more outputs than inputs.
        chunk_size: Rows (tokens) of logits per chunk. ``None`` makes a chunk about as large as
            the inputs of the head or a quarter of its weight in 32 bits. Smaller chunks are slower.

    Raises:
        ConfigurationError: If ``heads`` or ``chunk_size`` is invalid.

    Note:
        Exactness is *rounding*: sums over tokens have another order, and in low precision losses
        and gradients are closer to those in float32. The head returns deferred logits.
        ``F.cross_entropy``, ``nn.CrossEntropyLoss`` and ``argmax`` over classes do not need their
        values, also through views, slices and type conversions; any other use materializes them,
        once for all uses, and saves nothing. LoRA on the head is supported. More limits are in
        docs/checkpointing_and_micro_batches.md.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5000, 16), nn.Linear(16, 5000))
        >>> with ChunkedCrossEntropy().apply(model) as handle:
        ...     tokens = torch.arange(8)
        ...     nn.functional.cross_entropy(model(tokens), tokens).backward()
        ...     handle.changes
        ('1',)

    References:
        Wijmans et al. (2024), Cut Your Losses in Large-Vocabulary Language Models,
        arXiv:2411.09009.
    """

    name: ClassVar[str] = "chunked_cross_entropy"
    argument: ClassVar[str] = "chunked_cross_entropy"
    examples: ClassVar[str] = "True, 512"
    offers: ClassVar[tuple[Offer, ...]] = (
        Offer("chunked cross-entropy", True, "several small matrix products", 0.05),
    )
    exactness: ClassVar[Exactness] = Exactness.ROUNDING

    heads: BlockSelector | Sequence[BlockSelector] | None = None
    _: KW_ONLY
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        size = self.chunk_size
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigurationError(
                f"`chunk_size={size!r}` is not a number of tokens: it must be at least 1. "
                "Use `None`, or for example 512."
            )
        if self.heads is not None:
            object.__setattr__(self, "heads", _as_heads(self.heads))

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Convert True, or a number of rows per chunk."""
        is_size = type(value) is int and value > 0
        return cls(chunk_size=value) if is_size else super().from_value(value)

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse strategies that free weights between forward and loss, and compiled modules."""
        problems = []
        if facts.is_strategy("FSDPStrategy", "DeepSpeedStrategy"):
            why = f"`{facts.strategy}` may have freed the head's weight when the loss is computed"
            problems.append(Problem(written, why, f"Set `{self.argument}=None`."))
        if facts.compiled:
            why = f"`{facts.compiled}` is compiled as a whole, and the compiler needs logits"
            fix = f"Compile its blocks one by one, or set `{self.argument}=None`."
            problems.append(Problem(written, why, fix))
        return problems

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing."""
        heads, _ = self._find(target)
        why = "its loss is computed in chunks already"
        fix = "Undo the first `ChunkedCrossEntropy` before applying another."
        done = (block for block in heads if is_patched_with(block.module, forward))
        return [Problem(f"`{block.name}`", why, fix) for block in done]

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        heads, skipped = self._find(target)
        if not heads and not skipped:
            skipped = [self._nothing_found(target)]
        undo: list[Callable[[], None]] = []
        for block in heads:
            undo.append(functools.partial(_forget_marks, block.module))
            undo.append(patch_method(block.module, forward))
            undo.append(_set(block.module, HeadSettings(block.name, self.chunk_size)))
        tied = _tied_embeddings(target, heads)
        undo += [patch_method(block.module, look_up) for block in tied]
        names = ", ".join(f"`{block.name}`" for block in heads)
        # Wide layers are treated as heads by their shape, even if no cross-entropy follows.
        summary = f"no logits of {names} where a cross-entropy follows" if heads else ""
        if tied:
            names = ", ".join(f"`{block.name}`" for block in tied)
            summary += f", one gradient for it and {names}"
        return Handle(target, [block.name for block in heads], skipped, undo, summary)

    def _find(self, target: nn.Module) -> tuple[list[Block], list[str]]:
        heads: Any = self.heads
        found, skipped = find_heads(target, heads)
        free = [block for block in found if not _is_replaced(block.module)]
        skipped += [
            f"`{block.name}` stays unchanged: its `forward` has been replaced"
            for block in found
            if _is_replaced(block.module)
        ]
        return free, skipped

    def _nothing_found(self, model: nn.Module) -> str:
        name = type(model).__name__
        if self.heads is not None:
            return f"nothing in `{name}` matches `heads={self.heads!r}`"
        return (
            f"no linear layer of `{name}` with at least 1,024 outputs, and more outputs than "
            'inputs, is outside of its blocks. Name it: `ChunkedCrossEntropy(heads="lm_head")`'
        )


def _forget_marks(head: nn.Module) -> None:
    for weight in head.parameters():
        for name in (COUNTED, READY, NODES):
            vars(weight).pop(name, None)


# Named like the method that it replaces.
@asks_for_host_weights
def forward(head: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Return deferred logits; replaces the ``forward`` of a linear layer."""
    run = previous_method(head, "forward")
    values = (*args, *kwargs.values())
    settings = vars(head).get(_SETTINGS)  # None after `undo`, if `forward` was wrapped once more
    if settings is None or len(values) != 1 or not isinstance(values[0], torch.Tensor):
        return run(*args, **kwargs)
    found = read_head(head, values[0])
    if found is None:
        return run(*args, **kwargs)
    operands, dtype = found
    return defer(Product(operands, dtype, settings))


def _tied_embeddings(model: nn.Module, heads: list[Block]) -> list[Block]:
    weights: list[Any] = [getattr(block.module, "weight", None) for block in heads]
    return [
        Block(name, module)
        for name, module in model.named_modules()
        if any(can_share(module, w) for w in weights if w is not None) and not _is_replaced(module)
    ]


def _is_replaced(module: nn.Module) -> bool:
    method = vars(module).get("forward")
    own = (None, forward, look_up, type(module).forward)
    return getattr(method, "__func__", method) not in own


def _set(head: nn.Module, settings: HeadSettings) -> Callable[[], None]:
    vars(head)[_SETTINGS] = settings
    return lambda: vars(head).pop(_SETTINGS, None)


def _as_heads(heads: Any) -> tuple[BlockSelector, ...]:
    try:
        return as_selectors(heads)
    except ConfigurationError as error:
        raise ConfigurationError(
            f'`heads={heads!r}` does not select heads. Pass a name such as "lm_head", a class, '
            '"re:" and a regular expression over module names, or a function of name and module.'
        ) from error
