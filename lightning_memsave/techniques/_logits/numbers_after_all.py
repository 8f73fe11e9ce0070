"""Logits that were to be left out, and had to be computed after all."""

import warnings

import torch
from torch import nn

from lightning_memsave.errors import NoEffectWarning
from lightning_memsave.techniques._logits.product import Part, Product, live_products
from lightning_memsave.units import format_bytes


def warn_of_numbers(part: Part, who: str) -> None:
    """Warn, once for each head, that training needs its logits themselves.

    Args:
        part: What is about to be computed.
        who: What needs them.
    """
    settings = part.product.settings
    is_training = torch.is_grad_enabled() and part.product.has_graph
    if settings.has_warned or not is_training or part.is_computed:
        return
    settings.has_warned = True
    warnings.warn(
        f"`chunked_cross_entropy` saves nothing while the logits of `{settings.name}` are there: "
        f"{who} needs them, so that {format_bytes(_num_bytes(part.product))} were computed. "
        "`F.cross_entropy` and `argmax` do without; see the limits in "
        "docs/techniques/chunked_cross_entropy.md.",
        NoEffectWarning,
        stacklevel=2,
    )


def compute_kept_logits(model: nn.Module) -> None:
    """Compute logits that somebody holds, before the weights that they are made of change.

    Args:
        model: Whose heads are meant.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for product in live_products():
        if not any(id(weight) in own for weight in product.operands.weights):
            continue
        for part in list(product.parts):
            if part.shown() is not None and not part.is_computed:
                warn_of_numbers(part, "what was kept of a training step")
                part.compute()


def _num_bytes(product: Product) -> int:
    num_rows = product.operands.inputs[0].shape[:-1].numel()
    return num_rows * len(product.operands.weights[0]) * product.dtype.itemsize
