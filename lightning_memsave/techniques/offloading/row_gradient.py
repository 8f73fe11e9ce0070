"""The gradient of a table of which a step has used a few rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memsave.errors import IncompatibleError, Problem

aten: Any = torch.ops.aten

# Functions that leave zeros as they are, so that they need the rows only. Of lists of gradients,
# too: clipping and loss scaling use these.
_OF_ROWS = frozenset(
    (
        *(aten.mul, aten.mul_, aten.div, aten.div_, aten.neg, aten.neg_, aten.abs, aten.zero_),
        *(aten.detach, aten.clone, aten._to_copy, aten.linalg_vector_norm),
        *(aten._foreach_mul_, aten._foreach_div_, aten._foreach_zero_, aten._foreach_norm),
        aten._amp_foreach_non_finite_check_and_unscale_,
    )
)
_CLAMPS = frozenset((aten.clamp, aten.clamp_, aten.clamp_min_, aten.clamp_max_))


class RowGradient(Tensor):
    """A matrix on the host of which only some rows are stored; the others are zero.

    Norms, scaling and clipping use the stored rows alone. Everything else computes with the whole
    matrix, or is refused if it would change it. torch's sparse tensors have no
    `clip_grad_norm_` and no `clip_grad_value_`.
    """

    ids: Tensor
    """Indices of the stored rows, ascending (n,)."""
    rows: Tensor
    """The stored rows (n, D)."""

    @staticmethod
    def __new__(cls, ids: Tensor, rows: Tensor, num_rows: int) -> "RowGradient":
        """Make a matrix with ``num_rows`` rows of zeros but for those given."""
        make: Any = Tensor._make_wrapper_subclass
        made: RowGradient = make(
            cls, (num_rows, rows.shape[1]), dtype=rows.dtype, device=rows.device
        )
        made.ids, made.rows = ids, rows
        return made

    def __init__(self, ids: Tensor, rows: Tensor, num_rows: int) -> None:
        super().__init__()

    # Lets memory counters see the memory that it holds.
    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["ids", "rows"], len(self)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], num_rows: int, size: object, stride: object
    ) -> "RowGradient":
        return RowGradient(parts["ids"], parts["rows"], num_rows)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowGradient(ids={self.ids}, rows={self.rows}, num_rows={len(self)})"

    def whole(self) -> Tensor:
        """Return the whole matrix as an ordinary tensor."""
        made = self.rows.new_zeros(self.shape)
        return made.index_copy_(0, self.ids, self.rows)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _needs_rows_only(func, args):
            found = func(*tree_map_only(RowGradient, _rows, args), **kwargs)
            return _with_ids(func, args, found)
        if func._schema.is_mutable and _changes_one(func, args):
            what = f"`{func.overloadpacket.__name__}` on the gradient of a table on the host"
            why = "it would change zeros, of which none are stored"
            fix = "Use `grad.whole()`, an ordinary tensor, or keep the table on the device."
            raise IncompatibleError("offloading", [Problem(what, why, fix)])
        args, kwargs = tree_map_only(RowGradient, RowGradient.whole, (args, kwargs))
        return func(*args, **kwargs)


def _rows(gradient: RowGradient) -> Tensor:
    return gradient.rows


def _needs_rows_only(func: Any, args: tuple[Any, ...]) -> bool:
    packet = func.overloadpacket
    numbers = [a for a in tree_leaves(args[1:]) if isinstance(a, int | float)]
    if packet in _CLAMPS:
        upper = numbers[1:] if packet in (aten.clamp, aten.clamp_) else []
        bounds = numbers if packet is not aten.clamp_max_ else []
        upper = numbers if packet is aten.clamp_max_ else upper
        return all(n <= 0 for n in bounds[:1]) and all(n >= 0 for n in upper)
    if packet not in _OF_ROWS:
        return False
    if packet in (aten.linalg_vector_norm, aten._foreach_norm):  # no minimum, and no count
        return all(n > 0 for n in numbers[:1]) and len(args) < 3
    others = [a for a in tree_leaves(args) if isinstance(a, Tensor) and a.ndim > 0]
    is_list = isinstance(args[0], list | tuple)
    return is_list or all(a is args[0] for a in others)


def _with_ids(func: Callable[..., Any], args: tuple[Any, ...], found: Any) -> Any:
    if found is None or isinstance(found, list | tuple):
        return found
    gradient = args[0]
    if func._schema.is_mutable:  # type: ignore[attr-defined]
        return gradient
    is_alike = isinstance(gradient, RowGradient) and found.shape == gradient.rows.shape
    return RowGradient(gradient.ids, found, len(gradient)) if is_alike else found


def _changes_one(func: Any, args: tuple[Any, ...]) -> bool:
    changed = [
        value
        for value, argument in zip(args, func._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return any(isinstance(leaf, RowGradient) for leaf in tree_leaves(changed))
