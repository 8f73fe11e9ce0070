"""Logits that are computed only when something other than cross-entropy asks for them."""

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
from lightning_memsave.techniques.chunked_cross_entropy.products import (
    Part,
    Product,
    is_plain,
    live_products,
)
from lightning_memsave.units import format_bytes


def warn_of_materialized_logits(part: Part, who: str) -> None:
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


def materialize_referenced_logits(model: nn.Module) -> None:
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
                warn_of_materialized_logits(part, "what was kept of a training step")
                part.compute()


def _num_bytes(product: Product) -> int:
    num_rows = product.operands.inputs[0].shape[:-1].numel()
    return num_rows * len(product.operands.weights[0]) * product.dtype.itemsize


# What is known without the numbers; all properties but these are known too.
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
# What is given away may be written to by code that torch does not see.
_EXPOSING = frozenset(
    ("numpy", "__array__", "data_ptr", "storage", "untyped_storage", "__dlpack__", "to_dlpack")
)


class DeferredLogits(Tensor):
    """Stands for the output of a linear layer, or for a part of it.

    It has shape, type, device and graph. Views and changes of type give another of its kind,
    ``F.cross_entropy`` needs no more, and for anything else it becomes an ordinary tensor.
    """

    part: Part

    @staticmethod
    def __new__(cls, part: Part) -> "DeferredLogits":
        """Make it: it has the shape of the logits, and no data."""
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

    # So that counters of memory see what is there, and not what stands for nothing.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["deferred_input"], None

    @property
    def deferred_input(self) -> Tensor:
        """What the layer was given."""
        return self.part.product.operands.inputs[0]

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
            # The names are those of torch; the first may be given by name.
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

    # Reached only by code that passes torch's functions by.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(DeferredLogits, _numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def defer(product: Product) -> Tensor:
    """Make a tensor that stands for a product.

    Args:
        product: Its inputs and weights are held until the tensor is gone.

    Returns:
        The tensor.
    """
    return _made(product.whole())


def computed(values: Any) -> Any:
    """Put ordinary tensors in place of deferred logits.

    Args:
        values: Tensors and others in any nesting.

    Returns:
        The same; itself where there are none.
    """
    if not any(isinstance(value, DeferredLogits) for value in tree_leaves(values)):
        return values
    return tree_map_only(DeferredLogits, _ordinary, values)


class _Deferred(torch.autograd.Function):
    """Gives deferred logits a place in the graph, for code that takes them from there."""

    @staticmethod
    def forward(ctx: Any, part: Part, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.part = part
        return DeferredLogits(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        tensors = ctx.part.product.tensors()
        if gradients[0] is None:  # it is an output that nobody has used
            return None, *(None for _ in tensors)
        is_more_wanted = torch.is_grad_enabled()
        with torch.enable_grad():
            # Of their own: what goes in may depend on the weight too.
            tensors = [tensor.view_as(tensor) for tensor in tensors]
            numbers = ctx.part.compute_from(ctx.part.product.compute(tensors))
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            found = torch.autograd.grad(numbers, wanted, gradients, create_graph=is_more_wanted)
        each = iter(found)
        return None, *(next(each) if tensor.requires_grad else None for tensor in tensors)


class _Linked(torch.autograd.Function):
    """The numbers of deferred logits that have a graph of somebody else's making."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Tensor:
        ctx.set_materialize_grads(False)
        return _numbers(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def _made(part: Part) -> Tensor:
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
        # What was changed may have another graph now.
        is_hash = getattr(func, "__name__", "") == "__hash__"
        args = args if is_hash else (part.computed, *args[1:])
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# Below autograd, where no graph can be made.
def _numbers(logits: DeferredLogits) -> Tensor:
    part = logits.part
    if part.computed is None:
        with torch.no_grad():
            return part.compute_from(part.product.compute()).detach()
    return part.computed.detach()


# Not if it is the output of a function that somebody wrote, which has a backward of its own.
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


# What shares memory with logits may be changed in place.
def _shares_memory(found: Any, numbers: Tensor | None) -> bool:
    if numbers is None or not is_plain(numbers):
        return False
    storage = numbers.untyped_storage()._cdata
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


# All that share memory must do so, and copies must be of what was there before.
def _pin(product: Product) -> None:
    for part in list(product.parts):
        part.compute()
    product.is_pinned = True


def _pin_for_hook(product: Product) -> None:
    if product.has_loss:
        problem = Problem(
            "a hook on logits after the loss",
            "the loss was computed without them, so that they get no gradient",
            "Call `register_hook` or `retain_grad` before the loss.",
        )
        raise IncompatibleError("chunked_cross_entropy", [problem])
    product.is_pinned = True


def _view(name: str, func: Any, logits: DeferredLogits, args: Any, kwargs: Any) -> Any:
    if logits.part.product.is_pinned or not _has_own_graph(logits):
        return NotImplemented
    found = view_of(logits.part, name, func, args, kwargs)
    if isinstance(found, list):
        return tuple(_made(part) for part in found)
    if found is NotImplemented or found is logits.part:
        return logits if found is logits.part else found
    return _made(found)


def _consume(func: Any, logits: DeferredLogits, args: Any, kwargs: Any) -> Any:
    if logits.part.product.is_pinned or not _has_own_graph(logits):
        return NotImplemented
    if any(isinstance(value, DeferredLogits) for value in tree_leaves((args, kwargs))):
        return NotImplemented
    return func(logits.part, *args, **kwargs)
