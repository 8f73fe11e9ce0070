"""Choose the attention kernel of Hugging Face models."""

import difflib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.errors import ConfigurationError, MemsaveWarning, NoEffectWarning, Problem

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_KERNELS = ("sdpa", *_FLASH, "flex_attention")
# Attribute of a Hugging Face model: its configurations with their former kernels.
_BEFORE = "_memsave_attention_before"
# Attribute of a Hugging Face model until the padding of its first batch was checked.
_IS_NEW = "_memsave_attention_is_new"
_IGNORED = -100  # the label that Hugging Face's losses ignore


@dataclass(frozen=True)
class AttentionKernel(Technique[nn.Module]):
    """Compute the attention of Hugging Face models in a kernel that does not save the scores.

    Eager attention saves three tensors of (batch, heads, tokens, tokens) for backward: the scores
    after softmax, those after dropout, and dropout's mask. A fused kernel saves one value per row
    of them, and is faster. `PreTrainedModel.set_attn_implementation` sets it.

    Args:
        kernel: ``"sdpa"``, torch's own, replaces eager attention. Any other kernel replaces any
            current one: ``"flash_attention_2"``, ``"flash_attention_3"``, ``"flash_attention_4"``,
            ``"flex_attention"``, a kernel of the hub such as ``"kernels-community/flash-attn2"``,
            or one that you registered with ``AttentionInterface.register``.

    Raises:
        ConfigurationError: If ``kernel`` is none of these.

    Note:
        Exactness is *rounding*: sums are computed in another order, and with dropout on the scores
        other random masks are drawn. Models that do not support the kernel stay unchanged, with the
        reason in ``Handle.skipped``. A model that is called with ``output_attentions=True`` returns
        to its former kernel from that call on, with a warning. More limits, such as padding on the
        left, are in docs/techniques.md.

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
    argument: ClassVar[str] = "attention"
    examples: ClassVar[str] = '"sdpa"'
    offers: ClassVar[tuple[Offer, ...]] = (
        Offer("attention with sdpa", "sdpa", "nothing; mostly faster"),
    )
    exactness: ClassVar[Exactness] = Exactness.ROUNDING

    kernel: str = "sdpa"

    def __post_init__(self) -> None:
        why_not = _why_unknown(self.kernel)
        if why_not is not None:
            raise ConfigurationError(f"`attention={self.kernel!r}` {why_not}")

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Read the name of a kernel."""
        return cls(value) if isinstance(value, str) else super().from_value(value)

    def check(self, target: nn.Module) -> list[Problem]:
        """Find missing packages, and dropout with ``"flex_attention"``; changes nothing.

        A model that does not support the kernel is not a problem: it stays unchanged.
        """
        parts = _find_parts(target)
        _, problems = self._set(parts)
        for part in parts:
            part.restore()
        return problems

    def is_served(self, target: nn.Module) -> bool:
        """Return whether a model has such a kernel already; any fused one serves as ``"sdpa"``."""
        return any(part.has(self.kernel) for part in _find_parts(target))

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        parts = _find_parts(target)
        if not parts:
            why_not = f"`{type(target).__name__}` contains no Hugging Face model"
            return Handle(target, (), [why_not])
        skipped, _ = self._set(parts)
        changed = [part for part in parts if part.kernel != part.before]
        undo = [part.restore for part in changed]
        for root in {id(part.root): part.root for part in changed}.values():
            before = [part for part in changed if part.root is root]
            models = [m for m in root.modules() if _is_model(m) and _BEFORE not in vars(m)]
            undo += [_watch(model, before) for model in models]
        lines = [f"{part}: {part.before} -> {part.kernel}" for part in changed]
        return Handle(target, lines, skipped, undo)

    def _set(self, parts: "list[_Part]") -> tuple[list[str], list[Problem]]:
        """Set the kernel where that works; return why not elsewhere, and what the machine lacks."""
        skipped, problems = [], {}
        for part in parts:
            why_not = _why_unchanged(part, parts, self.kernel)
            try:
                if why_not is None and not part.set(self.kernel):
                    why_not = f"the attention of `{type(part.model).__name__}` cannot be changed"
            except ValueError as error:  # the class does not support it
                why_not = str(error).partition(". ")[0]
            except Exception as error:  # packages, drivers, the hub: of any class
                what = f'`attention="{self.kernel}"`'
                why = f"transformers says: {str(error).strip().rstrip('.')}"
                fix = 'Install that package, or use `attention="sdpa"`, which comes with torch.'
                problems[why] = Problem(what, why, fix)
            if why_not is not None:
                part.restore()  # an outer model may have set it
                skipped.append(f"{part}: {why_not}")
            elif self.kernel == "flex_attention":
                problems |= {problem.why: problem for problem in _problems_of_dropout(part)}
        return skipped, list(problems.values())


def _why_unknown(kernel: object) -> str | None:
    # Kernels that the user registered, if transformers is imported. Paged ones are for generation.
    transformers = sys.modules.get("transformers.modeling_utils")
    registered = getattr(transformers, "ALL_ATTENTION_FUNCTIONS", {})
    known = dict.fromkeys([*_KERNELS, *(n for n in registered if not n.startswith("paged|"))])
    if kernel in known or (isinstance(kernel, str) and "/" in kernel):
        return None
    if kernel == "eager":
        return "is the implementation that saves the scores. Use `None` to keep it."
    close = difflib.get_close_matches(str(kernel), known, n=1, cutoff=0.5)  # "chunked_sdpa", too
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return (
        f"is not an attention kernel. {guess}Use one of {', '.join(map(repr, known))}, or `None`."
    )


@dataclass
class _Part:
    """A Hugging Face model with a configuration of its own."""

    name: str
    model: Any
    root: Any  # the outermost Hugging Face model around it

    def __post_init__(self) -> None:
        self.config = self.model.config
        self.before = self.after = self.kernel

    def __str__(self) -> str:
        kind = f"`{type(self.model).__name__}`"
        return f"{kind} at `{self.name}`" if self.name else kind

    @property
    def kernel(self) -> str | None:
        kernel: str | None = self.config._attn_implementation
        return kernel

    def has(self, kernel: str) -> bool:
        return self.before == kernel or (kernel == "sdpa" and self.before != "eager")

    def set(self, kernel: str) -> bool:
        if not hasattr(self.model, "set_attn_implementation"):  # old versions of transformers
            return False
        # Predictions run without the packages and the GPU of the other kernels.
        if any(is_fake(tensor) for tensor in self.root.parameters()):
            kernel = "sdpa"
        # Without its sub-configurations, which have a `_Part` of their own.
        self.model.set_attn_implementation({"": kernel})
        self.after = self.kernel
        return self.after != self.before

    def restore(self) -> None:
        # Only if the user has not changed it since. The property would set sub-configurations too.
        if self.kernel == self.after:
            self.config._attn_implementation_internal = self.before


def _find_parts(module: nn.Module) -> list[_Part]:
    parts: dict[int, _Part] = {}
    root_name, root = "", None
    for name, inner in module.named_modules():
        if not _is_model(inner):
            continue
        if root is None or not f"{name}.".startswith(f"{root_name}."):
            root_name, root = name, inner
        parts.setdefault(id(inner.config), _Part(name, inner, root))
    return list(parts.values())


def _is_model(module: nn.Module) -> bool:
    # Without an import of transformers there is no instance of its classes.
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _why_unchanged(part: _Part, parts: list[_Part], kernel: str) -> str | None:
    if part.before == kernel:
        return f"its attention is `{kernel}` already"
    if part.has(kernel):
        return f"its attention is `{part.before}`, not `eager`"
    same_root = [other.config for other in parts if other.root is part.root]
    if any(getattr(config, "output_attentions", False) for config in same_root):
        return (
            "it returns attention weights (`output_attentions=True`), which only `eager` supports"
        )
    if getattr(part.config, "reorder_and_upcast_attn", False):  # GPT-2's
        return "it uses `reorder_and_upcast_attn` (float32 attention), which only `eager` supports"
    return None


def _problems_of_dropout(part: _Part) -> list[Problem]:
    return [
        Problem(
            '`attention="flex_attention"`',
            f"it does not support dropout, and `{type(part.config).__name__}.{name}={rate}`",
            f'Build the model with `{name}=0.0`, or use `attention="sdpa"`.',
        )
        for name, rate in _attention_dropouts(part)
    ]


# Encoders and decoders of the T5 family have one rate for all of their dropout.
def _attention_dropouts(part: _Part) -> list[tuple[str, float]]:
    config = vars(part.config)
    names = [name for name in config if "att" in name and "drop" in name]
    if not names and "dropout_rate" in config:
        names = ["dropout_rate"]
    rates = [(name, config[name]) for name in names]
    return [(name, rate) for name, rate in rates if isinstance(rate, float) and rate > 0]


def _watch(model: nn.Module, before: list[_Part]) -> Callable[[], None]:
    configs = [(part.config, part.before) for part in before]
    vars(model).update({_BEFORE: configs, _IS_NEW: True})
    hook = model.register_forward_pre_hook(_before_forward, with_kwargs=True)

    def undo() -> None:
        hook.remove()
        for name in (_BEFORE, _IS_NEW):
            vars(model).pop(name, None)

    return undo


# A module-level function, so that copies of the model work.
def _before_forward(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    _restore_for_weights(model, kwargs)
    if _IS_NEW in vars(model) and _can_be_checked(model, kwargs):
        del vars(model)[_IS_NEW]
        _warn_of_left_padding(model, kwargs)


# Fused kernels do not return attention weights, and transformers only logs that. Permanent, as a
# checkpointed block must use the same kernel in forward and in recomputation.
def _restore_for_weights(model: nn.Module, kwargs: dict[str, Any]) -> None:
    asked = [n for n in ("output_attentions", "head_mask") if kwargs.get(n) not in (None, False)]
    before = vars(model).get(_BEFORE)
    if not asked or not before:
        return
    for config, kernel in before:
        config._attn_implementation_internal = kernel
    before.clear()  # shared by all models of the same root
    warnings.warn(
        f"attention_kernel has no effect any more: `{type(model).__name__}` was called with "
        f"`{asked[0]}`, which its kernel does not support. Remove `{asked[0]}`, or set "
        "`attention=None`",
        NoEffectWarning,
        stacklevel=3,
    )


def _can_be_checked(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call computes a shifted loss over a masked batch of real tensors."""
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return False
    mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
    if type(mask) is not Tensor or type(labels) is not Tensor or torch.compiler.is_compiling():
        return False
    return mask.ndim == 2 and mask.shape == labels.shape


# Synchronizes with the GPU once.
def _warn_of_left_padding(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    is_real, labels = kwargs["attention_mask"] != 0, kwargs["labels"]
    first = is_real.int().argmax(dim=1, keepdim=True)
    counts = labels.to(is_real.device).gather(1, first)[:, 0] != _IGNORED
    # A sequence of nothing but padding has no first token.
    if bool((~is_real[:, 0] & is_real.any(dim=1) & counts).any()):
        warnings.warn(
            f"`{type(model).__name__}` is trained with padding on the left: the loss includes the "
            "first token of a sequence, predicted from the padding before it, where attention "
            "kernels give different results. Set the label of the first token that is not masked "
            "to -100, or pad on the right.",
            MemsaveWarning,
            stacklevel=2,
        )
