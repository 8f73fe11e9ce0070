"""How much each part of a batch counts in the loss of the whole."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from lightning_memsave.core.batches import count_samples
from lightning_memsave.errors import ConfigurationError

LossWeight: TypeAlias = (
    Literal["auto", "samples", "tokens", "tokens_shifted"] | Callable[[Any], float | Tensor]
)
NAMES = ("auto", "samples", "tokens", "tokens_shifted")

_IGNORED = -100  # the label that torch's and Hugging Face's losses leave out


def weight_function(kind: LossWeight, batch: Any) -> Callable[[Any], float | Tensor]:
    """Find what gives the weight of a part's loss.

    Args:
        kind: What ``resolve`` gave.
        batch: The whole batch.

    Returns:
        A function of a part; weights need not sum to 1.

    Raises:
        ConfigurationError: If tokens are to be counted and the batch has no labels.
    """
    if callable(kind):
        return kind
    if kind == "samples":
        return count_samples
    if _labels(batch) is None:
        raise ConfigurationError(
            f"`loss_weight={kind!r}` counts the labels that are not {_IGNORED}, but the "
            "batch has no tensor named `labels`. Use `loss_weight=lambda part: ...` to count them, "
            'or `loss_weight="samples"`.'
        )
    start = 1 if kind == "tokens_shifted" else 0
    return lambda part: _count_tokens(part, start)


def resolve(loss_weight: LossWeight, batch: Any, module: nn.Module | None) -> LossWeight:
    """Decide what ``"auto"`` means for a batch.

    Args:
        loss_weight: A name or a function.
        batch: The whole batch.
        module: The model, if it is known.

    Returns:
        Where the batch has ``labels`` of two or more dimensions and some of them are -100:
        ``"tokens_shifted"`` for causal language models of Hugging Face, whose loss leaves out the
        first label of each sequence, and ``"tokens"`` for others. ``"samples"`` otherwise. What
        is not ``"auto"`` as it is.

    Example:
        >>> import torch
        >>> resolve("auto", {"labels": torch.tensor([[5, -100]])}, None)
        'tokens'
    """
    if loss_weight != "auto":
        return loss_weight
    labels = _labels(batch)
    if labels is None or labels.ndim < 2 or not bool((labels == _IGNORED).any()):
        return "samples"
    is_causal = module is not None and any(
        type(child).__name__.endswith(("ForCausalLM", "LMHeadModel")) for child in module.modules()
    )
    return "tokens_shifted" if is_causal else "tokens"


def _count_tokens(part: Any, start: int) -> Tensor:
    labels = _labels(part)
    assert labels is not None, "parts of a batch have what the batch has"
    return (labels[..., start:] != _IGNORED).sum()


def _labels(batch: Any) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    return labels if isinstance(labels, Tensor) else None
