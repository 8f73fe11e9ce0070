"""Padding on the left, from which causal models of Hugging Face predict the first token."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.errors import MemsaveWarning

_IGNORED = -100  # the label that Hugging Face's losses leave out


def can_be_checked(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Say whether a call of a model computes a shifted loss over a masked batch.

    Args:
        model: A Hugging Face model.
        kwargs: What it is called with.

    Returns:
        False too where values cannot be read: in ``torch.compile`` and on tensors without data.
    """
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return False
    mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
    if type(mask) is not Tensor or type(labels) is not Tensor or torch.compiler.is_compiling():
        return False
    return mask.ndim == 2 and mask.shape == labels.shape


def warn_of_labels_after_padding(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Warn if a token is predicted from padding, whose attention every kernel computes otherwise.

    It waits for the GPU once.

    Args:
        model: A Hugging Face model.
        kwargs: What it is called with, so that it ``can_be_checked``.
    """
    is_real, labels = kwargs["attention_mask"] != 0, kwargs["labels"]
    first = is_real.int().argmax(dim=1, keepdim=True)
    counts = labels.to(is_real.device).gather(1, first)[:, 0] != _IGNORED
    # A sequence of nothing but padding has no first token.
    if bool((~is_real[:, 0] & is_real.any(dim=1) & counts).any()):
        warnings.warn(
            f"`{type(model).__name__}` is trained on padding on the left: the first token of a "
            "sequence that counts in the loss is predicted from the padding before it, where each "
            "attention kernel computes something else. Set the label of the first token that is "
            "not masked to -100, or pad on the right.",
            MemsaveWarning,
            stacklevel=2,
        )
