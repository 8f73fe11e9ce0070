"""A lazily computed matrix product, and the layout of its views."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_memsave.core.memory import is_fake
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.chunked_cross_entropy.call import Operands
from lightning_memsave.techniques.deferred import note_product
from lightning_memsave.techniques.host_weight import host_linear


@dataclass(frozen=True)
class Layout:
    """Layout of a view of a matrix (N, V), or of a copy of such a view."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_rows: int
    num_classes: int
    copied: "Layout | None" = None

    @classmethod
    def of_whole(cls, lead: tuple[int, ...], num_classes: int) -> "Layout":
        meta = torch.empty((*lead, num_classes), device="meta")
        return cls(tuple(meta.shape), tuple(meta.stride()), 0, math.prod(lead), num_classes)

    @property
    def class_dim(self) -> int | None:
        """The axis of the classes; ``None`` if the tensor does not consist of whole rows."""
        dim = self.dim_of_range
        return dim if dim is not None and self.size[dim] == self.num_classes else None

    @property
    def dim_of_range(self) -> int | None:
        """The axis of the classes, also if the rows lack some at their beginning and end."""
        places = list(enumerate(zip(self.size, self.stride, strict=True)))
        dims = [i for i, place in places if place == (self.num_classes, 1)]
        dims = dims or [i for i, (size, stride) in places if stride == 1 and size > 1]
        others = [stride for i, (size, stride) in places if i not in dims and size > 1]
        if len(dims) != 1 or any(stride % self.num_classes for stride in others):
            return None
        (dim,) = dims
        start = self.offset % self.num_classes
        return dim if start + self.size[dim] <= self.num_classes else None

    @property
    def classes(self) -> slice | None:
        """The classes of each row; ``None`` for all."""
        before = None if self.copied is None else self.copied.classes
        dim, start = self.dim_of_range, self.offset % self.num_classes
        if dim is None or (before is None and self.size[dim] == self.num_classes):
            return None
        start += 0 if before is None else before.start
        return slice(start, start + self.size[dim])

    def to_meta(self, dtype: torch.dtype) -> Tensor:
        matrix = torch.empty(self.num_rows * self.num_classes, dtype=dtype, device="meta")
        return matrix.as_strided(self.size, self.stride, self.offset)

    def of_view(self, view: Tensor) -> "Layout":
        size, stride, offset = tuple(view.shape), tuple(view.stride()), view.storage_offset()
        return Layout(size, stride, int(offset), self.num_rows, self.num_classes, self.copied)

    def of_copy(self, copy: Tensor) -> "Layout | None":
        """Return the layout of a copy, perhaps reshaped, of the tensor from `to_meta`."""
        same_place = (tuple(copy.shape), copy.stride()) == (self.size, self.stride)
        if same_place and copy.numel() == self.num_rows * self.num_classes:
            return self
        is_last = self.dim_of_range == len(self.size) - 1 and copy.shape[-1:] == self.size[-1:]
        if not is_last or not copy.is_contiguous():
            return None
        size, stride = tuple(copy.shape), copy.stride()
        return Layout(size, stride, 0, copy.numel() // size[-1], size[-1], copied=self)

    def rows(self, device: torch.device) -> Tensor | None:
        """Return the indices of the rows of the layer's output that the tensor consists of."""
        before = None if self.copied is None else self.copied.rows(device)
        kept = [i for i in range(len(self.size)) if i != self.dim_of_range]
        size = [self.size[i] for i in kept]
        stride = [self.stride[i] // self.num_classes for i in kept]
        start = self.offset // self.num_classes
        in_order = [math.prod(size[i + 1 :]) for i in range(len(size))]
        # An axis of length one may have any stride.
        is_in_order = all(a == b or n == 1 for a, b, n in zip(stride, in_order, size, strict=True))
        if math.prod(size) == self.num_rows and is_in_order:
            return before
        if before is None:
            before = torch.arange(self.num_rows, device=device)
        return before.as_strided(size, stride, start).flatten()


# Does not detect writes through `.data`, and in inference mode, where there is no version counter.
def _state_of(tensor: Tensor) -> tuple[int, int]:
    version = 0 if tensor.is_inference() else tensor._version
    return version, 0 if is_fake(tensor) else tensor.data_ptr()


class Product:
    """The output of a linear layer that has not been computed."""

    def __init__(self, operands: Operands, dtype: torch.dtype, settings: "HeadSettings") -> None:
        self.operands = operands
        self.dtype = dtype
        self.settings = settings
        self.device = operands.inputs[0].device
        self.parts: weakref.WeakSet[Part] = weakref.WeakSet()
        """The output and its views, as long as a tensor or a graph holds them."""
        self.is_pinned = False
        """Whether losses must use materialized logits: they were changed, or have a hook."""
        self.has_loss = False
        """Whether a loss was computed without materializing logits."""
        self.has_graph = torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors())
        """Whether it is part of an autograd graph."""
        self._states = [_state_of(tensor) for tensor in self.tensors()]
        self._trained = [tensor.requires_grad for tensor in self.tensors()]
        note_product(self)

    def whole(self) -> "Part":
        lead, num_classes = self.operands.inputs[0].shape[:-1], self.operands.num_classes
        layout = Layout.of_whole(lead, num_classes)
        return Part(self, layout, self.dtype, requires_grad=self.has_graph)

    def flat_operands(self, part: "Part") -> Operands:
        (scale, shift), classes = part.affine, part.layout.classes
        inputs = tuple(x.reshape(-1, x.shape[-1]) for x in self.operands.inputs)
        bias = self.operands.bias
        if bias is not None and classes is not None:
            bias = bias[classes]
        new = replace(self.operands, inputs=inputs, bias=bias)
        return replace(new, scale=scale, shift=shift, classes=classes)

    def tensors(self) -> list[Tensor]:
        operands = self.operands
        found = (*operands.inputs, *operands.weights, operands.bias)
        return [tensor for tensor in found if tensor is not None]

    @contextmanager
    def trained_as_deferred(self) -> Iterator[None]:
        """Train what was trained when it was deferred: a GAN freezes its parts in turn."""
        pairs = zip(self.tensors(), self._trained, strict=True)
        changed = [t for t, trained in pairs if t.is_leaf and t.requires_grad != trained]
        for tensor in changed:
            tensor.requires_grad_(not tensor.requires_grad)
        try:
            yield
        finally:
            for tensor in changed:
                tensor.requires_grad_(not tensor.requires_grad)

    def compute(self, tensors: list[Tensor] | None = None) -> Tensor:
        self.check_unchanged()
        dtype, num = self.operands.autocast_dtype, len(self.operands.inputs)
        tensors = self.tensors() if tensors is None else tensors
        bias = None if self.operands.bias is None else tensors[-1]
        # The autocast cache would keep a copy of the weight.
        with torch.autocast(
            self.device.type, dtype, enabled=dtype is not None, cache_enabled=False
        ):
            (x, weight), *others = zip(tensors[:num], tensors[num:], strict=False)
            host = self.operands.host
            if host is not None:
                return host_linear(x, host, bias).to(self.dtype)
            logits = nn.functional.linear(x, weight, bias)
            for x, weight in others:
                logits = logits + nn.functional.linear(x, weight)
            return logits.to(self.dtype)

    def check_unchanged(self) -> None:
        """Raise if inputs or weights have changed since the product was deferred."""
        for i, (tensor, state) in enumerate(zip(self.tensors(), self._states, strict=True)):
            if _state_of(tensor) != state:
                is_input = i < len(self.operands.inputs)
                problem = _changed_input(self.settings.name) if is_input else _CHANGED_WEIGHTS
                raise IncompatibleError("chunked_cross_entropy", [problem])


@dataclass
class HeadSettings:
    name: str
    chunk_size: int | None = None
    has_warned: bool = False
    """Whether the warning on materialized logits was shown."""


class Part:
    """A deferred tensor: a product, or a view or conversion of it."""

    def __init__(
        self,
        product: Product,
        layout: Layout,
        dtype: torch.dtype,
        *,
        requires_grad: bool,
        parent: "Part | None" = None,
        make: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self.product = product
        self.layout = layout
        self.dtype = dtype
        self.requires_grad = requires_grad
        self._had_grad = torch.is_grad_enabled()
        self._parent = parent
        self._make = make
        self.affine: tuple[float, Tensor | None] = (1.0, None)
        """Factor of the rows, and the vector that is added afterwards."""
        self.computed: Tensor | None = None
        """The materialized tensor, if any."""
        self.shown: Callable[[], Tensor | None] = lambda: None
        """Weak reference to its `DeferredLogits`."""
        product.parts.add(self)

    def compute(self) -> Tensor:
        if self.computed is None:
            # With the grad mode of its creation, not the current one.
            is_inference = self.product.operands.inputs[0].is_inference()
            with (
                torch.inference_mode(is_inference),
                # Sets the mode when it is made, which must be inside of the inference mode.
                torch.set_grad_enabled(self._had_grad),
                self.product.trained_as_deferred(),
            ):
                self.computed = self.compute_from(None)
        return self.computed

    @property
    def is_computed(self) -> bool:
        """Whether it or a parent is materialized."""
        parent = self._parent
        return self.computed is not None or (parent is not None and parent.is_computed)

    def compute_from(self, output: Tensor | None) -> Tensor:
        """Compute its values from the whole output; ``None`` computes that, too."""
        if self._parent is not None:
            parent = self._parent
            return self._make(parent.compute() if output is None else parent.compute_from(output))
        return self.product.compute() if output is None else output


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is an ordinary or fake one, not a subclass such as DTensor."""
    return type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor)


_CHANGED_WEIGHTS = Problem(
    "logits that are first used after an optimizer step",
    "they are computed on first use, and the weights have changed since, in a step or by "
    "swapping in others such as averages",
    "Use them, or call `.clone()` on them, before that.",
)


def _changed_input(name: str) -> Problem:
    return Problem(
        f"an in-place change of the input of `{name}`",
        "logits are computed on first use, and would be those of other inputs",
        f"Change a copy, call `.clone()` on the logits first, or exclude `{name}` with `heads`.",
    )
