"""Attention that does not keep its scores."""

import difflib
import sys
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_memsave.core.technique import Exactness, Handle, Technique
from lightning_memsave.errors import ConfigurationError, NoEffectWarning, Problem
from lightning_memsave.techniques.attention_kernel.chunked import (
    CHUNKED,
    can_be_checked,
    warn_of_labels_after_padding,
)
from lightning_memsave.techniques.attention_kernel.models import (
    ModelPart,
    find_parts,
    problems_of_flex,
    resolve,
    scores_left_out,
    why_left_alone,
)

_KERNELS = (
    "sdpa",
    CHUNKED,
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
# On a Hugging Face model: pairs of a configuration and the kernel that it had.
_BEFORE = "_memsave_attention_before"
# On one until the padding of its first batch was looked at.
_IS_NEW = "_memsave_attention_is_new"


@dataclass(frozen=True)
class AttentionKernel(Technique[nn.Module]):
    """Compute the attention of Hugging Face models in a kernel that does not keep its scores.

    Eager attention keeps three tensors of (batch, heads, tokens, tokens) for backward: the scores
    after softmax, those after dropout, and dropout's mask. A fused kernel keeps one number for each
    row of them, and takes less time.

    Args:
        kernel: ``"sdpa"``, torch's own, takes the place of eager attention. What else there is
            takes the place of any other: ``"chunked_sdpa"``, the same for a few samples at a time,
            which are computed again in backward, for where torch has no kernel without scores, as
            on a CPU with dropout; ``"flash_attention_2"``, ``"flash_attention_3"``,
            ``"flash_attention_4"``, ``"flex_attention"``, a kernel of the hub such as
            ``"kernels-community/flash-attn2"``, or what you registered with
            ``AttentionInterface.register``.
        device: Where the model will be trained; ``None`` for where its parameters are. The callback
            passes that of the Trainer, which moves the model later.

    Raises:
        ConfigurationError: If ``kernel`` is none of these.

    Note:
        Exactness is *rounding*: sums are taken in another order. With dropout on the scores other
        random masks are drawn. Where all keys of a query are masked, as at the padding of a decoder
        with padding on the left, its output is another one. Hugging Face's causal loss depends on
        it, as the first real token is predicted from the padding before it: set the label of that
        token to -100, or pad on the right. The first such batch is warned about.

        Left alone, and said so in ``Handle.skipped``: models whose class does not support the
        kernel, models that return attention weights (``config.output_attentions``), GPT-2 with
        ``reorder_and_upcast_attn``, models that use such a kernel already, and what is not a
        model of Hugging Face. A model that is called with ``output_attentions=True`` (or, in old
        versions of transformers, ``head_mask``) goes back to what it was from that call on, with a
        warning. What is called by itself and is no model of transformers, such as the encoder
        inside of BERT, is not watched: it returns ``None`` for attention weights.

        On tensors without data all kernels are predicted as ``"sdpa"``, which keeps as much.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=8)
        >>> model = BertModel(BertConfig(attn_implementation="eager", **sizes))
        >>> with AttentionKernel().apply(model) as handle:
        ...     handle.changes, model.config._attn_implementation
        (('`BertModel`: eager -> sdpa',), 'sdpa')
        >>> model.config._attn_implementation
        'eager'

    References:
        Dao et al. (2022), FlashAttention: Fast and Memory-Efficient Exact Attention with
        IO-Awareness, arXiv:2205.14135.
    """

    name: ClassVar[str] = "attention_kernel"
    exactness: ClassVar[Exactness] = Exactness.ROUNDING
    source: ClassVar[str] = (
        "Dao et al. (2022), FlashAttention: Fast and Memory-Efficient Exact Attention with "
        "IO-Awareness, arXiv:2205.14135"
    )

    kernel: str = "sdpa"
    _: KW_ONLY
    device: torch.device | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        why_not = _why_unknown(self.kernel)
        if why_not is not None:
            raise ConfigurationError(f"`attention={self.kernel!r}` {why_not}")

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why the kernel cannot be used; changes nothing.

        Args:
            target: The model, or what it is in.

        Returns:
            What the machine lacks for it, and what would end the first step: ``"flex_attention"``
            has no dropout and no backward pass on a CPU. That a model does not support it is none:
            it is left alone.
        """
        problems: dict[str, Problem] = {}
        for part, why_not in self._judged(target):
            if why_not is not None:
                continue
            if self.kernel == "flex_attention":
                problems |= {p.why: p for p in problems_of_flex(part, self.device)}
            try:
                resolve(part, self.kernel)
            except Exception as error:  # packages, drivers, the hub: of any class
                problem = Problem(
                    f'`attention="{self.kernel}"`',
                    f"transformers says: {str(error).strip().rstrip('.')}",
                    'Install what it needs, or use `attention="sdpa"`, which comes with torch.',
                )
                problems[problem.why] = problem
        return list(problems.values())

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        judged = self._judged(target)
        if not judged:
            why_not = f"there is no model of Hugging Face in `{type(target).__name__}`"
            return Handle(target, (), [why_not])
        changes, saved = [], []
        before: dict[int, list[tuple[Any, str | None]]] = {}  # for each outermost model
        undo: list[Callable[[], None]] = []
        for part in [part for part, why_not in judged if why_not is None]:
            kernel = resolve(part, self.kernel)
            changes.append(f"{part}: {part.kernel} -> {kernel}")
            saved.append(scores_left_out(part, kernel, self.device))
            moved = before.setdefault(id(part.root), [])
            moved.append((part.config, part.kernel))
            undo.append(_set(part, kernel))
            undo += [_watch(m, moved) for m in (part.root, *part.models) if _BEFORE not in vars(m)]
        skipped = [f"{part}: {why_not}" for part, why_not in judged if why_not is not None]
        said = (f"{c} ({s})" if s else c for c, s in zip(changes, saved, strict=True))
        return Handle(target, changes, skipped, undo, "; ".join(said))

    # With what speaks against the kernel.
    def _judged(self, target: nn.Module) -> list[tuple[ModelPart, str | None]]:
        parts = find_parts(target)
        return [(part, why_left_alone(part, parts, self.kernel)) for part in parts]


def _why_unknown(kernel: object) -> str | None:
    known = _known_kernels()
    if kernel in known or (isinstance(kernel, str) and "/" in kernel):
        return None
    if kernel == "eager":
        return "is what keeps the scores. Use `None` to leave attention as it is."
    close = difflib.get_close_matches(str(kernel), known, n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"is no attention kernel. {guess}Use one of {', '.join(map(repr, known))}."


def _known_kernels() -> list[str]:
    # What a user has registered; without transformers imported, nothing.
    transformers = sys.modules.get("transformers.modeling_utils")
    registered = getattr(transformers, "ALL_ATTENTION_FUNCTIONS", {})
    # Paged attention is for generation.
    return list(dict.fromkeys([*_KERNELS, *(n for n in registered if not n.startswith("paged|"))]))


def _set(part: ModelPart, kernel: str) -> Callable[[], None]:
    config, before = part.config, part.kernel
    # Not by its property, which sets sub-configurations as well.
    config._attn_implementation_internal = kernel

    def undo() -> None:
        if config._attn_implementation_internal == kernel:
            config._attn_implementation_internal = before

    return undo


def _watch(model: nn.Module, before: list[tuple[Any, str | None]]) -> Callable[[], None]:
    vars(model).update({_BEFORE: before, _IS_NEW: True})
    hook = model.register_forward_pre_hook(_before_forward, with_kwargs=True)

    def undo() -> None:
        hook.remove()
        for name in (_BEFORE, _IS_NEW):
            vars(model).pop(name, None)

    return undo


# A function of the module, so that copies of the model work.
def _before_forward(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    _go_back_for_weights(model, kwargs)
    if _IS_NEW in vars(model) and can_be_checked(model, kwargs):
        del vars(model)[_IS_NEW]
        warn_of_labels_after_padding(model, kwargs)


# Kernels give no attention weights, and transformers would leave them out with no more than a line
# in its log. For good, as a block that is checkpointed must find in backward what it found in
# forward.
def _go_back_for_weights(model: nn.Module, kwargs: dict[str, Any]) -> None:
    asked = [name for name in ("output_attentions", "head_mask") if _is_asked(kwargs.get(name))]
    before = vars(model).get(_BEFORE)
    if not asked or not before:
        return
    for config, kernel in before:
        config._attn_implementation_internal = kernel
    before.clear()  # of all models that are in the same one
    warnings.warn(
        f"attention_kernel does nothing any more: `{type(model).__name__}` was called with "
        f"`{asked[0]}`, which its kernel does not support. Leave that out, or set `attention=None`",
        NoEffectWarning,
        stacklevel=3,
    )


def _is_asked(value: object) -> bool:
    return value is not None and value is not False
