"""Functions of deferred logits: cross-entropy, arg-max, views and conversions."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memsave.techniques.chunked_cross_entropy.call import Call, LossSettings
from lightning_memsave.techniques.chunked_cross_entropy.chunks import (
    Chunk,
    each_chunk,
    tiled_argmax,
    without_autograd,
)
from lightning_memsave.techniques.chunked_cross_entropy.kernel import linear_cross_entropy
from lightning_memsave.techniques.chunked_cross_entropy.products import Layout, Part, is_plain

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
    if later:
        return cross_entropy_of(part, target, weight, **dict(zip(_LATER, later, strict=False)))
    is_usual = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not is_usual or not 0.0 <= label_smoothing <= 1.0 or not _fits(part, target, weight):
        return NotImplemented
    product = part.product
    product.check_unchanged()
    chunk_size = product.settings.chunk_size
    settings = LossSettings(reduction, ignore_index, label_smoothing, chunk_size)
    has_graph = part.requires_grad and torch.is_grad_enabled()
    with torch.set_grad_enabled(has_graph), product.trained_as_deferred():
        loss = linear_cross_entropy(
            product.flat_operands(part),
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
    dim, keepdim = _dim_and_keepdim(*args, **kwargs)
    layout, product = part.layout, part.product
    is_class_dim = isinstance(dim, int) and dim % len(layout.size) == layout.dim_of_range
    if not is_class_dim or part.is_computed:
        return NotImplemented
    product.check_unchanged()
    lead = [n for i, n in enumerate(layout.size) if i != layout.dim_of_range]
    operands = product.flat_operands(part)
    rows = layout.rows(product.device)
    num_rows = len(operands.inputs[0] if rows is None else rows)
    found = torch.empty(num_rows, dtype=torch.int64, device=product.device)
    call = Call(operands, found, rows, None, LossSettings(chunk_size=product.settings.chunk_size))

    def rounded(logits: Tensor) -> Tensor:  # to the type of the logits, to keep ties
        return logits.to(product.dtype).to(part.dtype)

    def choose(chunk: Chunk) -> None:
        found[chunk.place] = rounded(chunk.logits).argmax(1)

    if operands.host is not None:
        found = tiled_argmax(call, rounded)
    else:
        with without_autograd(call):
            each_chunk(call, choose)
    found = found.view(lead)
    return found.unsqueeze(dim) if keepdim else found


def _dim_and_keepdim(dim: Any = None, keepdim: bool = False, axis: Any = None) -> tuple[Any, bool]:
    return dim if axis is None else axis, keepdim


def _fits(part: Part, target: Tensor, weight: Tensor | None) -> bool:
    layout, product = part.layout, part.product
    lead = [n for i, n in enumerate(layout.size) if i != layout.dim_of_range]
    is_in_place = layout.dim_of_range == (1 if len(layout.size) > 1 else 0)
    is_index = target.dtype is torch.int64 and target.device == product.device
    num_classes = 0 if layout.dim_of_range is None else layout.size[layout.dim_of_range]
    has_weights = weight is None or weight.shape == (num_classes,)
    is_wide = part.dtype is not torch.float64 or product.dtype is torch.float64
    return is_in_place and is_index and list(target.shape) == lead and has_weights and is_wide


_VIEWS = frozenset(
    (
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze"),
        *("unsqueeze", "narrow", "__getitem__", "select", "split", "chunk", "tensor_split"),
        *("unbind", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),
        *("mT", "expand", "expand_as", "detach", "data", "alias"),
    )
)
_COPIES = frozenset(
    (
        *("reshape", "reshape_as", "flatten", "contiguous", "to", "type", "type_as"),
        *("float", "half", "bfloat16", "double"),
    )
)
_AFFINE = frozenset(("mul", "multiply", "div", "divide", "true_divide", "add"))
VIEWS = _VIEWS | _COPIES | _AFFINE
"""Names of the functions that `view_of` may support."""

_BY_SHAPE: dict[str, Any] = {
    "view_as": Tensor.view,
    "reshape_as": Tensor.reshape,
    "expand_as": Tensor.expand,
}
_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)


def view_of(
    part: Part, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Apply a view, conversion or scaling to deferred logits."""
    if name == "add":  # copy the vector, which may be changed later
        args = tuple(a.detach().clone() if _is_vector(part, a) else a for a in args)
    affine = _affine(part, name, args, kwargs)
    if affine is None:
        return NotImplemented
    plain = _without_tensors(part, name, func, args, kwargs)
    if plain is None:
        return NotImplemented
    func, args, kwargs = plain
    with _disable_current_modes(), torch.no_grad():
        meta = part.layout.to_meta(part.dtype)
        try:
            found = func(meta, *tree_map_only(Tensor, _to_meta, args), **kwargs)
        except _ERRORS:
            return NotImplemented  # the materialized tensor raises the right error
    if found is meta:
        return part
    has_graph = part.requires_grad and torch.is_grad_enabled() and func is not Tensor.detach
    parts = []
    for i, tensor in enumerate((found,) if isinstance(found, Tensor) else found):
        layout = _layout_of(part.layout, meta, tensor, name)
        if layout is None or not _is_supported(part, layout) or not tensor.is_floating_point():
            return NotImplemented
        index = None if isinstance(found, Tensor) else i
        make = functools.partial(_call, func, args, kwargs, index)
        kind = part.product, layout, tensor.dtype
        parts.append(Part(*kind, requires_grad=has_graph, parent=part, make=make))
        parts[-1].affine = affine
    return parts[0] if isinstance(found, Tensor) else parts


# A range of the classes would need a gradient of the whole weight, except on the host, where it is.
def _is_supported(part: Part, layout: Layout) -> bool:
    if layout.classes is None:
        return layout.class_dim is not None
    has_shift = part.affine[1] is not None
    return part.product.operands.host is not None and not has_shift


# Some models scale the logits, or add a vector over the classes.
def _affine(
    part: Part, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, Tensor | None] | None:
    scale, shift = part.affine
    if name not in _AFFINE:
        return scale, shift
    if kwargs or len(args) != 1:
        return None
    (other,) = args
    if name == "add":
        if not _is_vector(part, other):
            return None
        vector = other.reshape(-1)
        return scale, vector if shift is None else shift + vector
    if not isinstance(other, int | float) or not other:
        return None
    factor = 1.0 / other if "div" in name else float(other)
    return scale * factor, None if shift is None else shift * factor


def _is_vector(part: Part, other: object) -> bool:
    layout = part.layout
    return (
        isinstance(other, Tensor)
        and is_plain(other)
        and not other.requires_grad
        and other.device == part.product.device
        and other.shape[-1:] == (layout.num_classes,)
        and other.numel() == layout.num_classes
        and other.ndim <= len(layout.size)
        and layout.class_dim == len(layout.size) - 1
    )


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _layout_of(layout: Layout, meta: Tensor, tensor: Tensor, name: str) -> Layout | None:
    if tensor.untyped_storage()._cdata == meta.untyped_storage()._cdata:
        return layout.of_view(tensor)
    return layout.of_copy(tensor) if name in _COPIES | _AFFINE else None


# A meta tensor cannot be combined with tensors on a device.
def _without_tensors(
    part: Part, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    if name in ("detach", "data"):
        return Tensor.detach, (), {}
    if name in _BY_SHAPE and args:
        return _BY_SHAPE[name], (args[0].shape,), {}
    if name in ("to", "type_as"):
        return _conversion(part, args, kwargs)
    if name == "type" and not args and not kwargs:
        return None
    if name != "add" and any(isinstance(v, Tensor) for v in tree_leaves((args, kwargs))):
        return None
    return func, args, kwargs


def _conversion(
    part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    if kwargs.get("copy"):
        return None
    parse: Any = torch._C._nn._parse_to
    device, dtype, _, memory_format = parse(*args, **kwargs)
    if (device is not None and device != part.product.device) or memory_format is not None:
        return None
    return Tensor.to, (dtype or part.dtype,), {}


def _call(func: Any, args: Any, kwargs: Any, index: int | None, tensor: Tensor) -> Tensor:
    found = func(tensor, *args, **kwargs)
    result: Tensor = found if index is None else found[index]
    return result
