"""Logits that are materialized only if something other than cross-entropy uses them."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

from lightning_memsave.errors import IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques.chunked_cross_entropy.consumers import (
    VIEWS,
    argmax_of,
    cross_entropy_of,
    view_of,
)
from lightning_memsave.techniques.chunked_cross_entropy.products import Part, Product, is_plain
from lightning_memsave.techniques.deferred import Deferred, live_products
from lightning_memsave.units import format_bytes


def warn_of_materialized_logits(part: Part, user: str) -> None:
    """Warn, once per head, that its logits are materialized in training."""
    settings = part.product.settings
    is_training = torch.is_grad_enabled() and part.product.has_graph
    if settings.has_warned or not is_training or part.is_computed:
        return
    settings.has_warned = True
    warnings.warn(
        f"`chunked_cross_entropy` saves nothing for `{settings.name}`: {user} needs its full "
        f"logits, which were materialized ({format_bytes(_num_bytes(part.product))}). Compute the "
        "loss with `F.cross_entropy`, which does not need them (nor does `argmax`); see the limits "
        "in docs/checkpointing_and_micro_batches.md.",
        NoEffectWarning,
        stacklevel=2,
    )


def materialize_referenced_logits(model: nn.Module) -> None:
    """Materialize logits of a model that are still referenced, before its weights change."""
    own = {id(parameter) for parameter in model.parameters()}
    for product in live_products():
        if not any(id(weight) in own for weight in product.operands.weights):
            continue
        for part in list(product.parts):
            if part.shown() is not None and not part.is_computed:
                warn_of_materialized_logits(part, "a reference kept after the training step")
                part.compute()


def _num_bytes(product: Product) -> int:
    num_rows = product.operands.inputs[0].shape[:-1].numel()
    return num_rows * product.operands.num_classes * product.dtype.itemsize


# Functions that need no values. Neither do all properties except those below.
_KNOWN = frozenset(
    (
        *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "dim_order"),
        *("storage_offset", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
        *("get_device", "is_inference", "has_names", "is_conj", "is_neg", "is_same_size"),
        *("__len__", "__hash__", "result_type", "requires_grad_", "_is_view", "is_tensor"),
    )
)
_PROPERTIES_OF_DATA = frozenset(("data", "grad", "T", "mT", "H", "mH", "real", "imag"))
_HOOKS = frozenset(("register_hook", "retain_grad"))
# Memory exposed by these may be written to without torch's knowledge.
_EXPOSING = frozenset(
    ("numpy", "__array__", "data_ptr", "storage", "untyped_storage", "__dlpack__", "to_dlpack")
)


class DeferredLogits(Deferred):
    """The output of a linear layer, or a view of it, that has not been computed.

    It has shape, type, device and autograd graph. Views and type conversions return deferred logits
    again, ``F.cross_entropy`` needs no more, and any other function materializes them.
    """

    part: Part

    @staticmethod
    def __new__(cls, part: Part) -> "DeferredLogits":
        """Make a wrapper with the shape of the logits, without memory."""
        make: Any = Tensor._make_wrapper_subclass
        layout = part.layout
        logits: DeferredLogits = make(
            cls,
            layout.size,
            strides=layout.stride,
            storage_offset=layout.offset,
            dtype=part.dtype,
            device=part.product.device,
        )
        logits.part = part
        part.shown = TensorWeakRef(logits)
        return logits

    # Lets memory counters see the memory that this tensor really holds.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["deferred_input"], None

    @property
    def deferred_input(self) -> Tensor:
        return self.part.product.operands.inputs[0]

    def computed(self) -> Tensor:
        return _ordinary(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, is_property = _name_of(func)
        logits = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if name in _KNOWN or (is_property and name not in _PROPERTIES_OF_DATA):
            return _ask(func, args, kwargs)
        result: Any = NotImplemented
        if func is nn.functional.cross_entropy:
            # The first argument may be passed by name.
            first = args[:1] or (kwargs.pop("input"),)
            if isinstance(first[0], DeferredLogits):
                result = _consume(cross_entropy_of, first[0], args[1:], kwargs)
            args = (*first, *args[1:])
        elif logits is not None and name == "argmax":
            result = _consume(argmax_of, logits, args[1:], kwargs)
        elif logits is not None and name in VIEWS:
            result = _view(name, func, logits, args[1:], kwargs)
        elif logits is not None and name in _HOOKS:
            _pin_for_hook(logits.part.product)
        elif logits is not None and name == "grad":
            computed = logits.part.computed
            result = _ask(func, args, kwargs) if computed is None else computed.grad
        return _call_materialized(name, func, args, kwargs) if result is NotImplemented else result

    # Only reached by code that bypasses `__torch_function__`.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(DeferredLogits, _values_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def defer(product: Product) -> Tensor:
    """Return deferred logits for a product; they keep its inputs and weights alive."""
    return _wrap(product.whole())


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Part, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.part = part
        return DeferredLogits(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        tensors = ctx.part.product.tensors()
        if gradients[0] is None:  # the logits were not used
            return None, *(None for _ in tensors)
        creates_graph = torch.is_grad_enabled()
        is_on_host = ctx.part.product.operands.host is not None  # its gradient goes there
        with torch.enable_grad():
            # Views as separate inputs: the layer's input may depend on the weight too.
            tensors = [tensor.view_as(tensor) for tensor in tensors]
            logits = ctx.part.compute_from(ctx.part.product.compute(tensors))
            inputs = [tensor for tensor in tensors if tensor.requires_grad]
            found = torch.autograd.grad(
                logits, inputs, gradients, create_graph=creates_graph, allow_unused=is_on_host
            )
        each = iter(found)
        return None, *(next(each) if tensor.requires_grad else None for tensor in tensors)


class _Linked(torch.autograd.Function):
    """Materialized values of deferred logits that are the output of a custom autograd function."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Tensor:
        ctx.set_materialize_grads(False)
        return _values_of(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def _wrap(part: Part) -> Tensor:
    if part.requires_grad:
        apply: Any = _Deferred.apply  # untyped in torch
        logits: Tensor = apply(part, *part.product.tensors())
        return logits
    return DeferredLogits(part)


def _name_of(func: Any) -> tuple[str, bool]:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        prop: str = func.__self__.__name__
        return (prop, True) if name == "__get__" else (f"{prop}_", False)
    return name.partition(".")[0], False


def _ask(func: Any, args: Any, kwargs: Any) -> Any:
    part: Part | None = getattr(args[0], "part", None) if args else None
    if part is not None and part.product.is_pinned and part.computed is not None:
        # After a change in place, the graph may be another one.
        is_hash = getattr(func, "__name__", "") == "__hash__"
        args = args if is_hash else (part.computed, *args[1:])
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# Below autograd, without a graph.
def _values_of(logits: DeferredLogits) -> Tensor:
    part = logits.part
    if part.computed is None:
        with torch.no_grad():
            return part.compute_from(part.product.compute()).detach()
    return part.computed.detach()


# False for the output of a custom autograd function, which has its own backward.
def _has_own_graph(logits: DeferredLogits) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        node = logits.grad_fn
        if not logits.part.requires_grad:
            return not logits.requires_grad
        return getattr(node, "part", None) is logits.part


def _ordinary(logits: DeferredLogits) -> Tensor:
    if _has_own_graph(logits):
        return logits.part.compute()
    apply: Any = _Linked.apply
    with torch._C.DisableTorchFunctionSubclass():
        linked: Tensor = apply(logits)
    return linked


def _call_materialized(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    changed = tree_leaves((args[:1], kwargs.get("out")))
    if _changes_its_input(name, kwargs):
        for logits in changed:
            if isinstance(logits, DeferredLogits):
                _pin(logits.part.product)
    deferred = [value for value in tree_leaves((args, kwargs)) if isinstance(value, DeferredLogits)]
    for logits in deferred:
        warn_of_materialized_logits(logits.part, f"`{name.strip('_')}`")
    args, kwargs = tree_map_only(DeferredLogits, _ordinary, (args, kwargs))
    found = func(*args, **kwargs)
    for logits in deferred:
        if name in _EXPOSING or _shares_memory(found, logits.part.computed):
            _pin(logits.part.product)
    return found


# Tensors that share memory with logits may be changed in place.
def _shares_memory(found: Any, values: Tensor | None) -> bool:
    if values is None or not is_plain(values):
        return False
    storage = values.untyped_storage()._cdata
    return any(
        isinstance(tensor, Tensor)
        and is_plain(tensor)
        and tensor.untyped_storage()._cdata == storage
        for tensor in tree_leaves(found)
    )


def _changes_its_input(name: str, kwargs: Any) -> bool:
    is_dunder = name.startswith("__") and name.endswith("__")
    in_place = name[2:3] == "i" and name not in ("__iter__", "__invert__", "__index__", "__int__")
    is_changing = in_place or name in ("__setitem__", "__delitem__")
    is_changing = is_changing if is_dunder else name.endswith("_")
    return is_changing or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


# Materialize all views, before a change in place: views must see it, copies must not.
def _pin(product: Product) -> None:
    for part in list(product.parts):
        part.compute()
    product.is_pinned = True


def _pin_for_hook(product: Product) -> None:
    if product.has_loss:
        why = "the loss was computed without materializing them, so they get no gradient"
        fix = "Call `register_hook` or `retain_grad` before the loss."
        problem = Problem("a hook on logits after the loss", why, fix)
        raise IncompatibleError("chunked_cross_entropy", [problem])
    product.is_pinned = True


def _view(name: str, func: Any, logits: DeferredLogits, args: Any, kwargs: Any) -> Any:
    if logits.part.product.is_pinned or not _has_own_graph(logits):
        return NotImplemented
    found = view_of(logits.part, name, func, args, kwargs)
    if isinstance(found, list):
        return tuple(_wrap(part) for part in found)
    if found is NotImplemented or found is logits.part:
        return logits if found is logits.part else found
    return _wrap(found)


def _consume(func: Any, logits: DeferredLogits, args: Any, kwargs: Any) -> Any:
    if logits.part.product.is_pinned or not _has_own_graph(logits):
        return NotImplemented
    if any(isinstance(value, DeferredLogits) for value in tree_leaves((args, kwargs))):
        return NotImplemented
    return func(logits.part, *args, **kwargs)
