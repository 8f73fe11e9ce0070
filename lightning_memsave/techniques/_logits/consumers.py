"""What can be computed of logits without all of them at once: cross-entropy, and arg-max."""

from typing import Any

import torch
from torch import Tensor

from lightning_memsave.techniques._logits.chunks import chunks_of_logits, plain_numbers
from lightning_memsave.techniques._logits.linear_cross_entropy import linear_cross_entropy
from lightning_memsave.techniques._logits.operands import Call, LossSettings
from lightning_memsave.techniques._logits.product import Part

_LATER = ("size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def cross_entropy_of(
    part: Part,
    target: Tensor,
    weight: Tensor | None = None,
    *later: Any,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute ``F.cross_entropy``, whose arguments these are.

    Args:
        part: The logits.
        target: Classes.
        weight: Of the classes, or none.
        *later: What may be given by name too.
        size_average: Not supported.
        ignore_index: As in torch.
        reduce: Not supported.
        reduction: As in torch.
        label_smoothing: As in torch.

    Returns:
        The loss, or ``NotImplemented`` for what needs ordinary logits.
    """
    if later:
        return cross_entropy_of(part, target, weight, **dict(zip(_LATER, later, strict=False)))
    is_usual = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not is_usual or not 0.0 <= label_smoothing <= 1.0 or not _fits(part, target, weight):
        return NotImplemented
    product = part.product
    # In training the loss stands between forward and backward, where a GPU must not be waited for.
    product.check_unchanged(may_wait=not torch.is_grad_enabled())
    chunk_size = product.settings.chunk_size
    settings = LossSettings(reduction, ignore_index, label_smoothing, chunk_size)
    with torch.set_grad_enabled(part.requires_grad and torch.is_grad_enabled()):
        loss = linear_cross_entropy(
            product.flat_operands(part.affine),
            target.reshape(-1),
            rows=part.layout.rows(product.device),
            class_weight=weight,
            settings=settings,
        )
        product.has_loss = True
        if reduction == "none":
            loss = loss.view(target.shape)
        is_autocast = torch.is_autocast_enabled(product.device.type)
        is_wide = part.dtype is torch.float64 or not is_autocast
        return loss.to(part.dtype if is_wide else torch.float32)


def argmax_of(part: Part, *args: Any, **kwargs: Any) -> Any:
    """Find the class with the largest logit of each row.

    Args:
        part: The logits.
        *args: As for ``torch.argmax``.
        **kwargs: As for ``torch.argmax``.

    Returns:
        The classes, or ``NotImplemented`` for another axis, or if there are logits already.
    """
    dim, keepdim = _dim_and_keepdim(*args, **kwargs)
    layout, product = part.layout, part.product
    is_class_dim = isinstance(dim, int) and dim % len(layout.size) == layout.class_dim
    if not is_class_dim or part.is_computed:
        return NotImplemented
    product.check_unchanged()
    lead = [n for i, n in enumerate(layout.size) if i != layout.class_dim]
    operands = product.flat_operands(part.affine)
    rows = layout.rows(product.device)
    num_rows = len(operands.inputs[0] if rows is None else rows)
    found = torch.empty(num_rows, dtype=torch.int64, device=product.device)
    call = Call(operands, found, rows, None, LossSettings(chunk_size=product.settings.chunk_size))
    with plain_numbers(call):
        for chunk in chunks_of_logits(call):
            # Rounded as they would be, so that what is equal stays so.
            rounded = chunk.logits.to(product.dtype).to(part.dtype)
            found[chunk.place] = rounded.argmax(1)
    found = found.view(lead)
    return found.unsqueeze(dim) if keepdim else found


def _dim_and_keepdim(dim: Any = None, keepdim: bool = False, axis: Any = None) -> tuple[Any, bool]:
    return dim if axis is None else axis, keepdim


def _fits(part: Part, target: Tensor, weight: Tensor | None) -> bool:
    layout, product = part.layout, part.product
    lead = [n for i, n in enumerate(layout.size) if i != layout.class_dim]
    is_in_place = layout.class_dim == (1 if len(layout.size) > 1 else 0)
    is_index = target.dtype is torch.int64 and target.device == product.device
    has_weights = weight is None or weight.shape == (layout.num_classes,)
    is_wide = part.dtype is not torch.float64 or product.dtype is torch.float64
    return is_in_place and is_index and list(target.shape) == lead and has_weights and is_wide
