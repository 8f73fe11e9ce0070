"""Which rows of a linear layer's output a view of it shows, and where its classes are."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Place of a tensor in a matrix (N, V), or in a copy of such a tensor.

    Args:
        size: Shape of the tensor.
        stride: In numbers of the matrix, as torch has it.
        offset: Where the tensor begins.
        num_rows: N, of the matrix that it is a view of.
        num_classes: V.
        copied: What that matrix is a copy of, row by row; ``None`` for the layer's own output.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_rows: int
    num_classes: int
    copied: "Layout | None" = None

    @classmethod
    def of_whole(cls, lead: tuple[int, ...], num_classes: int) -> "Layout":
        """Describe the output of a layer.

        Args:
            lead: Shape of its input without the last axis.
            num_classes: V.

        Returns:
            The layout.
        """
        twin = torch.empty((*lead, num_classes), device="meta")
        return cls(tuple(twin.shape), tuple(twin.stride()), 0, math.prod(lead), num_classes)

    @property
    def class_dim(self) -> int | None:
        """The axis of the classes, or ``None`` if the tensor does not hold whole rows."""
        places = list(enumerate(zip(self.size, self.stride, strict=True)))
        dims = [i for i, place in places if place == (self.num_classes, 1)]
        others = [stride for i, (size, stride) in places if i not in dims and size > 1]
        is_whole = all(stride % self.num_classes == 0 for stride in (*others, self.offset))
        return dims[0] if len(dims) == 1 and is_whole else None

    def twin(self, dtype: torch.dtype) -> Tensor:
        """Make a tensor without memory of the same shape and place.

        Args:
            dtype: Its type.

        Returns:
            A tensor on the device "meta".
        """
        matrix = torch.empty(self.num_rows * self.num_classes, dtype=dtype, device="meta")
        return matrix.as_strided(self.size, self.stride, self.offset)

    def of_view(self, view: Tensor) -> "Layout":
        """Describe a view.

        Args:
            view: Of the twin.

        Returns:
            Its layout.
        """
        size, stride, offset = tuple(view.shape), tuple(view.stride()), view.storage_offset()
        return Layout(size, stride, int(offset), self.num_rows, self.num_classes, self.copied)

    def of_copy(self, copy: Tensor) -> "Layout | None":
        """Describe a copy, in the same order and perhaps another shape.

        Args:
            copy: Of the twin.

        Returns:
            Its layout, or ``None`` if rows are not whole or not in order any more.
        """
        same_place = (tuple(copy.shape), copy.stride()) == (self.size, self.stride)
        if same_place and copy.numel() == self.num_rows * self.num_classes:
            return self
        is_last = self.class_dim == len(self.size) - 1 and copy.shape[-1:] == self.size[-1:]
        if not is_last or not copy.is_contiguous():
            return None
        num_rows = copy.numel() // self.num_classes
        size, stride = tuple(copy.shape), copy.stride()
        return Layout(size, stride, 0, num_rows, self.num_classes, copied=self)

    def rows(self, device: torch.device) -> Tensor | None:
        """List the rows of the layer's output that the tensor shows, in order.

        Args:
            device: Where to put the list.

        Returns:
            (M,), or ``None`` if these are all rows in order.
        """
        before = None if self.copied is None else self.copied.rows(device)
        kept = [i for i in range(len(self.size)) if i != self.class_dim]
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
