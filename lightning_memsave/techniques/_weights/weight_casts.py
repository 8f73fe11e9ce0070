"""How often a block uses the copies that autocast makes of its weights."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.nesting import map_tensors

_NOT_IN_BACKWARD = -1


class WeightCasts:
    """Finds out whether each weight of a block is cast for one use only.

    Autocast casts a weight once and keeps the copy until its context ends. Where there is one use
    of it, keeping it is of no use. Where there are two, the gradients of both are summed in the low
    precision of the copy, and would be summed in another one if there were two copies. So a first
    call is looked at, and nothing is changed before the next one shows that its context is over.
    """

    def __init__(self) -> None:
        self.is_known = False
        """Whether there is nothing more to be found out."""
        self._is_single = False
        # Of the first call: nodes of casts, and a weight that is cast.
        self._casts: set[Any] = set()
        self._weight: Tensor | None = None

    def need_no_cache(self) -> bool:
        """Say whether copies need not be kept, before a call with autocast on.

        Returns:
            True if each weight was used once in the first call, and no call followed in its
            context.
        """
        if self._weight is not None and not _in_backward():
            # An operation on nothing: with the copy that autocast has, if there is one.
            probe = torch.matmul(self._weight, self._weight.new_empty(self._weight.shape[-1], 0))
            nodes = _nodes_between((), probe)
            self._is_single = all(cast not in self._casts for cast, _ in _cast_weights(nodes))
            self._forget()
        return self._is_single

    def learn(self, inputs: object, outputs: object) -> None:
        """Look at a first call with autocast on and the graph made.

        Args:
            inputs: What the block was given.
            outputs: What it returned.
        """
        if self.is_known or _in_backward():
            return  # in backward it is computed again: the first time was looked at
        uses = list(_cast_weights(_nodes_between(inputs, outputs)))
        num_uses = Counter(id(weight) for _, weight in uses)
        if set(num_uses.values()) != {1}:
            self._forget()
            return
        self._casts = {cast for cast, _ in uses}
        self._weight = min((weight for _, weight in uses), key=torch.numel)

    def _forget(self) -> None:
        self.is_known = True
        self._casts, self._weight = set(), None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != _NOT_IN_BACKWARD


def caches_casts(block: nn.Module) -> bool:
    """Say whether autocast would keep copies of a block's weights.

    Args:
        block: A module.

    Returns:
        True in training under autocast.
    """
    parameter = next(block.parameters(), None)
    return (
        parameter is not None
        and torch.is_grad_enabled()
        and torch.is_autocast_cache_enabled()
        and torch.is_autocast_enabled(parameter.device.type)
    )


# For each use of the cast of a parameter, the node of the cast and the parameter.
def _cast_weights(nodes: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    for node in nodes:
        for cast, _ in node.next_functions:
            if cast is None or not cast.name().startswith("ToCopyBackward"):
                continue
            source = cast.next_functions[0][0]
            if source is not None and hasattr(source, "variable"):
                yield cast, source.variable


def _nodes_between(inputs: object, outputs: object) -> Iterator[Any]:
    seen = {None, *_nodes_of(inputs)}
    pending = [node for node in _nodes_of(outputs) if node not in seen]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(source for source, _ in node.next_functions)


def _nodes_of(value: object) -> list[Any]:
    nodes: list[Any] = []
    map_tensors(value, lambda tensor: nodes.append(tensor.grad_fn))
    return [node for node in nodes if node is not None]
