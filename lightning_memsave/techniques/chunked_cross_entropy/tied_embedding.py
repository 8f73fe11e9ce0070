"""Use a single gradient for a weight that is tied between embedding and head.

Backward reaches the head first. It passes its gradient of the weight to the embedding, which adds
its own to the rows of the tokens that occurred. Otherwise the embedding would allocate a gradient
of the whole vocabulary, to be added to that of the head.
"""

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_memsave.core.patching import own, previous_method, set_own
from lightning_memsave.techniques.chunked_cross_entropy.heads import is_traced
from lightning_memsave.techniques.chunked_cross_entropy.products import is_plain
from lightning_memsave.techniques.host_weight import asks_for_host_weights, host_weight_of

aten = torch.ops.aten
# Of a weight: its embeddings' nodes in graphs, which end with these.
_NODES = "_memsave_nodes"


def can_share(module: nn.Module, weight: Tensor) -> bool:
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.weight is weight
        and module.max_norm is None
        and not module.sparse
        and not module.scale_grad_by_freq
    )


# Named like the method that it replaces.
@asks_for_host_weights
def forward(embedding: nn.Embedding, input: Tensor) -> Tensor:
    """Look up token ids in an embedding that is tied to a head."""
    weight = embedding.weight
    host = host_weight_of(weight)
    if host is not None:
        found: Tensor = host.look_up(embedding, input)
        return found
    has_graph = torch.is_grad_enabled() and weight.requires_grad
    if not has_graph or is_traced() or not is_plain(weight):
        plain: Tensor = previous_method(embedding, "forward")(input)
        return plain
    padding = -1 if embedding.padding_idx is None else embedding.padding_idx
    apply: Any = _Embedding.apply  # untyped in torch
    vectors: Tensor = apply(weight, input, padding)
    return vectors


def share_gradient(weight: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Pass the gradient of a head's weight to embeddings that run later in this backward pass."""
    if gradient is None or torch.is_grad_enabled():
        return gradient
    task = torch._C._current_graph_task_id()
    will_run = torch._C._will_engine_execute_node
    nodes = [n for n in own(weight, _NODES) or () if n.last_task != task and will_run(n)]
    if not nodes:
        return gradient
    held = nodes[0].held
    if held is not None and held.task == task:  # from another loss
        held.gradient += gradient
        return None
    held = _SharedGradient(task, gradient, len(nodes))
    for node in nodes:
        node.held = held
    return None


@dataclass
class _SharedGradient:
    """A gradient between head and embedding; held by the graph, so that it is freed with it."""

    task: int
    gradient: Tensor
    num_waiting: int


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, input: Tensor, padding: int) -> Any:
        ctx.save_for_backward(input)
        ctx.set_materialize_grads(False)
        ctx.padding, ctx.num_words = padding, len(weight)
        ctx.held, ctx.last_task = None, None
        if own(weight, _NODES) is None:
            set_own(weight, _NODES, WeakSet())
        own(weight, _NODES).add(ctx)
        return aten.embedding(weight, input, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (gradient,) = gradients
        (input,) = ctx.saved_tensors
        held, ctx.held = ctx.held, None
        ctx.last_task = torch._C._current_graph_task_id()
        if held is None or held.task != ctx.last_task:
            if gradient is None:
                return None, None, None
            whole = aten.embedding_dense_backward
            return whole(gradient, input, ctx.num_words, ctx.padding, False), None, None
        if gradient is not None:
            _add_rows(held.gradient, gradient.flatten(0, -2), input.flatten(), ctx.padding)
        held.num_waiting -= 1
        return None if held.num_waiting else held.gradient, None, None


_NUM_PARTS = 4
"""Parts of the columns, one after the other, as sums have as many rows as there are tokens."""


# Sums per token id first: deterministic, and rounded once. The sum of an id is in the row of its
# first place in order. Rows of distinct ids alone would need their number, for which `torch.unique`
# waits for the device.
def _add_rows(total: Tensor, gradient: Tensor, words: Tensor, padding: int) -> None:
    wide = torch.promote_types(total.dtype, torch.float32)
    words = words.long()
    ordered = words.sort().values
    places = torch.searchsorted(ordered, words)
    size = max(1, math.ceil(total.shape[1] / _NUM_PARTS))
    for part, columns in zip(gradient.split(size, 1), total.split(size, 1), strict=True):
        sums = aten.embedding_dense_backward(
            part.to(wide).contiguous(), places, len(words), -1, False
        )
        if padding >= 0:
            sums.masked_fill_((ordered == padding).unsqueeze(1), 0.0)
        if total.dtype == wide:
            columns.index_add_(0, ordered, sums)  # zeros, but for one row of each id
        else:
            sums = sums.index_select(0, places)
            sums += columns.index_select(0, words)
            columns.index_copy_(0, words, sums.to(total.dtype))
        del sums  # before the next ones
