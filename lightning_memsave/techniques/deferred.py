"""Values that a technique has not computed yet, for those that need them."""

import weakref
from abc import abstractmethod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Deferred(Tensor):
    """A tensor whose values are computed when they are needed."""

    @abstractmethod
    def computed(self) -> Tensor:
        """Return the same tensor with its values."""


def computed(values: Any) -> Any:
    """Compute deferred tensors in any nesting of values; others are unchanged."""
    if not any(isinstance(value, Deferred) for value in tree_leaves(values)):
        return values
    return tree_map_only(Deferred, lambda value: value.computed(), values)


_LIVE: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def note_product(product: Any) -> None:
    """Note a product that was not computed, for as long as a tensor or a graph holds it."""
    _LIVE[id(product)] = product


def live_products() -> list[Any]:
    """List all products that are still held, safe against other threads."""
    return [product for ref in _LIVE.valuerefs() if (product := ref()) is not None]
