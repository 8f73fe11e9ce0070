"""Find the linear layers that compute logits, and share gradients with tied embeddings."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_memsave.core.blocks import (
    Block,
    BlockSelector,
    as_predicate,
    find_blocks,
    is_hugging_face,
)
from lightning_memsave.core.patching import own, previous_method, set_own
from lightning_memsave.techniques.chunked_cross_entropy.call import Operands
from lightning_memsave.techniques.chunked_cross_entropy.products import is_plain
from lightning_memsave.techniques.host_weight import asks_for_host_weights, host_weight_of

MIN_CLASSES = 1024
"""Layers with fewer outputs are not treated as heads by default: their logits are small."""


def find_heads(
    model: nn.Module, selectors: Sequence[BlockSelector] | None
) -> tuple[list[Block], list[str]]:
    named = dict(model.named_modules())
    if selectors is not None:
        predicates = [_predicate(selector) for selector in selectors]
        chosen = [m for n, m in named.items() if any(is_head(n, m) for is_head in predicates)]
    else:
        chosen = list(_output_embeddings(model)) or list(_large_layers(model))
    names = {id(module): name for name, module in named.items()}
    heads, skipped = {}, []
    for head in chosen:
        # The layer may be wrapped, for example with copies of it that PEFT trains.
        inner = [m for m in head.modules() if is_lora(m)]
        inner = inner or [m for m in head.modules() if isinstance(m, nn.Linear)] or [head]
        for module in inner:
            name = names.get(id(module), "")
            why = _why_not(module) or _why_not_in(model, module)
            if why is None:
                heads[id(module)] = Block(name, module)
            elif (line := f"`{name}` stays unchanged: {why}") not in skipped:
                skipped.append(line)
    return list(heads.values()), skipped


def read_head(head: nn.Module, input: Tensor) -> tuple[Operands, torch.dtype] | None:
    if is_traced():
        return None
    base: Any = head.base_layer if is_lora(head) else head
    inputs, weights = [input], [base.weight]
    if is_lora(head) and not _add_adapters(head, input, inputs, weights):
        return None
    tensors = [*inputs, *weights, *([] if base.bias is None else [base.bias])]
    host = host_weight_of(base.weight)
    on_device = [tensor for tensor in tensors if host is None or tensor is not host.weight]
    if not all(is_plain(tensor) and tensor.device == input.device for tensor in on_device):
        return None
    if input.ndim == 0 or input.shape[-1] != weights[0].shape[1]:
        return None
    kind, bias = input.device.type, base.bias
    autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    operands = Operands(tuple(inputs), tuple(weights), bias, autocast_dtype, host=host)
    if autocast_dtype is not None:
        is_cast = all(tensor.dtype in _CAST for tensor in tensors)
        return (operands, autocast_dtype) if is_cast else None
    is_same = all(x.dtype == w.dtype for x, w in zip(inputs, weights, strict=True))
    is_same &= bias is None or bias.dtype == base.weight.dtype
    is_same &= input.dtype in (*_CAST, torch.float64)
    return (operands, input.dtype) if is_same else None


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with PEFT's low-rank adapters."""
    # Without an import of PEFT there is no instance of its classes.
    layer = sys.modules.get("peft.tuners.lora.layer")
    return layer is not None and isinstance(module, layer.Linear)


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def _predicate(selector: BlockSelector) -> Any:
    has_class_or_name = as_predicate(selector)
    if isinstance(selector, str) and not selector.startswith("re:"):
        return lambda name, module: name == selector or has_class_or_name(name, module)
    return has_class_or_name


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        # Adapters forward this call to the wrapped model.
        head = get() if callable(get) and is_hugging_face(module) else None
        if isinstance(head, nn.Module):
            yield head


def _large_layers(model: nn.Module) -> Iterator[nn.Module]:
    inside = {id(m) for block in find_blocks(model) for m in block.module.modules()}
    for module in model.modules():
        base: Any = module.base_layer if is_lora(module) else module
        if id(module) in inside or not isinstance(base, nn.Linear):
            continue
        if base.out_features >= MIN_CLASSES and base.out_features > base.in_features:
            yield module


def _why_not(module: Any) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript"
    base: Any = module.base_layer if is_lora(module) else module
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        return f"`{type(base).__name__}` is not a plain `nn.Linear`"
    if not is_plain(base.weight):
        return f"its weight is a {type(base.weight).__name__}"
    if is_lora(module) and not all(_is_plain_adapter(module, name) for name in module.lora_A):
        return "its LoRA adapter is a variant such as DoRA, or has a bias"
    return None


def _why_not_in(model: nn.Module, head: nn.Module) -> str | None:
    for name, module in model.named_modules():
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        is_compiled |= type(module).__name__ == "OptimizedModule"
        cap = getattr(getattr(module, "config", None), "final_logit_softcapping", None)
        if not (is_compiled or cap) or not any(inner is head for inner in module.modules()):
            continue
        of = f"`{name or type(module).__name__}`"
        if is_compiled:
            return f"{of} is compiled, and the compiler needs ordinary logits"
        if is_hugging_face(module):
            return f"`final_logit_softcapping={cap}` of {of} applies `tanh` to its logits"
    return None


def _is_plain_adapter(head: Any, name: str) -> bool:
    return name not in head.lora_variant and head.lora_B[name].bias is None


def _add_adapters(head: Any, input: Tensor, inputs: list[Tensor], weights: list[Tensor]) -> bool:
    if head.disable_adapters or head.merged:
        return not head.merged
    for adapter in head.active_adapters:
        if adapter not in head.lora_A:
            continue
        down, up = head.lora_A[adapter], head.lora_B[adapter]
        if not _is_plain_adapter(head, adapter):
            return False
        input = head._cast_input_dtype(input, down.weight.dtype)
        low_rank = down(head.lora_dropout[adapter](input)) * head.scaling[adapter]
        inputs.append(low_rank)
        weights.append(up.weight)
    return True


def is_traced() -> bool:
    """Return whether a compiler, a tracer, ``torch.func`` or forward-mode AD is active."""
    torch_c: Any = torch._C
    is_transformed = torch_c._functorch.peek_interpreter_stack() is not None
    is_tracing = torch_c._get_tracing_state() is not None
    is_forward_mode = torch.autograd.forward_ad._current_level >= 0
    return is_transformed or is_tracing or is_forward_mode or torch.compiler.is_compiling()


aten = torch.ops.aten
# Of a weight: its embeddings' nodes in graphs, which end with these.
NODES = "_memsave_nodes"


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


# Backward reaches the head first. The embedding adds its gradient to the rows of the tokens that
# occurred, where it would allocate one of the whole vocabulary, to be added to that of the head.
def share_gradient(weight: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Pass the gradient of a head's weight to embeddings that run later in this backward pass."""
    if gradient is None or torch.is_grad_enabled():
        return gradient
    task = torch._C._current_graph_task_id()
    will_run = torch._C._will_engine_execute_node
    nodes = [n for n in own(weight, NODES) or () if n.last_task != task and will_run(n)]
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
        if own(weight, NODES) is None:
            set_own(weight, NODES, WeakSet())
        own(weight, NODES).add(ctx)
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
