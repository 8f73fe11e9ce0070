"""Keep embeddings and heads on the host: the device gets rows of a batch, and tiles."""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_memsave.core.memory import host_copies, is_fake, mark_as, mark_as_host, on_cuda
from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.flat_memory import shares_memory
from lightning_memsave.techniques.host_weight import (
    host_weight_of,
    is_asking,
    set_host_weight,
)
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.residence import Residence
from lightning_memsave.techniques.offloading.weights import is_plain, shared_parameters

aten: Any = torch.ops.aten
_LEFT_OUT = 'leave out `"embeddings"`'
_NOT_IN_BACKWARD = -1


class HostTable:
    """The weight of an embedding, of a head, or of both, of which the device gets rows or tiles.

    Autograd makes the gradient of look-ups on the host, as it does without. That of a head comes
    tile by tile, and is added before the weight gets it.
    """

    def __init__(self, residence: Residence, part: Part) -> None:
        (self.weight,) = part.params
        self._residence = weakref.ref(residence)
        self._part = part
        self._of_tiles: Tensor | None = None  # used again
        self._has_gradient: Tensor | None = None  # of which rows, since the backward began
        self._of_look_ups: Tensor | None = None
        self._node: Any = None  # it holds the weight, but the weight does not hold it

    def look_up(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        self._begin()
        apply: Any = _LookUp.apply  # untyped in torch
        rows: Tensor = apply(self, embedding, self.weight, ids)
        return rows

    def tiles(self, places: Sequence[slice], device: torch.device) -> Iterator[Tensor]:
        """Bring tiles of rows to the device, the next one while one is used."""
        self._begin()
        copies, host = self.residence.copies, self.weight.data
        num = max(place.stop - place.start for place in places)
        buffers = [host.new_empty(num, host.shape[1], device=device) for _ in range(2)]
        for buffer in buffers:
            mark_as("parameter", buffer)
        waiting: list[Any] = []
        try:
            for index in range(len(places) + 1):
                if index < len(places):
                    place = places[index]
                    tile = buffers[index % 2][: place.stop - place.start]
                    waiting.append((tile, copies.to_device([tile], [host[place]])))
                if index:
                    tile, wait = waiting.pop(0)
                    wait()
                    yield tile
        finally:  # whoever uses the tiles may fail, and what comes is written to memory of others
            for _, wait in waiting:
                wait()

    def add_gradient(self, place: slice, gradient: Tensor) -> None:
        """Add the gradient of a tile to that of the weight; call it in backward."""
        if not self._is_wanted():
            return
        copies, (whole, has_gradient) = self.residence.copies, self._opened()
        with torch.no_grad(), host_copies():
            known = has_gradient[place]
            num_known = int(known.count_nonzero()) if not is_fake(known) else 0
            if 0 < num_known < len(known):
                copies.finish()
                whole[place][~known] = 0.0
            known.fill_(True)
        copies.to_host(whole[place], gradient, adds=num_known > 0)

    @property
    def residence(self) -> Residence:
        residence = self._residence()
        assert residence is not None, "the model holds it"
        return residence

    def _begin(self) -> None:
        if torch._C._current_graph_task_id() == _NOT_IN_BACKWARD:  # otherwise, recomputation
            self._has_gradient = self._of_look_ups = None  # of a backward pass that has failed
        self._part.stay()

    # Of the gradients from before it takes the place: they would be added while tiles come.
    def _opened(self) -> tuple[Tensor, Tensor]:
        weight = self.weight
        if self._of_tiles is None:
            self._of_tiles = self.residence.memory.tensors_like([weight.data])[0]
        if self._has_gradient is None:
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue(self._close)  # at the end of backward
            grad, whole = weight.grad, self._of_tiles
            with torch.no_grad(), host_copies():
                self._has_gradient = torch.full((len(weight),), grad is not None, device="cpu")
                if grad is not None and (grad.is_sparse or not shares_memory(grad, whole)):
                    whole.copy_(grad.to_dense())
            weight.grad = None
        return self._of_tiles, self._has_gradient

    def _is_wanted(self) -> bool:
        if self._node is None:
            self._node = get_gradient_edge(self.weight).node
            self._node.register_prehook(functools.partial(_keep, weakref.ref(self)))
        try:
            will_run = torch._C._will_engine_execute_node(self._node)
            return bool(will_run) and self.weight.requires_grad  # it may be frozen since forward
        except RuntimeError as error:
            raise IncompatibleError("offloading", [_CAPTURED]) from error

    # Not before: on CUDA autograd has another thread for this weight than for the device, where the
    # backward of blocks goes on.
    @torch.no_grad()
    def _close(self) -> None:
        if _is_hooked(self.weight):
            raise IncompatibleError("offloading", [_HOOKED])
        whole, has_gradient = self._opened()
        self.residence.copies.finish()
        with host_copies():
            if not is_fake(whole):
                whole[~has_gradient] = 0.0
            if self._of_look_ups is not None:
                whole.add_(self._of_look_ups)
        self._has_gradient = self._of_look_ups = None
        self.weight.grad = whole.detach()
        self.residence.receive(self.weight)

    def keep(self, of_look_ups: Tensor) -> bool:
        """Keep a gradient that is to be added to that of tiles; say whether there is one."""
        if self._has_gradient is None:
            return False
        before = self._of_look_ups
        self._of_look_ups = of_look_ups if before is None else before + of_look_ups
        return True


# Torch does not find cycles through such hooks.
def _keep(table: "weakref.ref[HostTable]", gradients: tuple[Tensor | None]) -> Any:
    own, (gradient,) = table(), gradients
    is_kept = own is not None and gradient is not None and own.keep(gradient)
    return (None,) if is_kept else None


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: HostTable, embedding: nn.Embedding, weight: Tensor, ids: Tensor
    ) -> Tensor:
        copies = table.residence.copies
        on_host = _like_on_host(ids)
        copies.to_host(on_host, ids, adds=False)
        copies.land()
        ctx.save_for_backward(on_host)
        ctx.table, ctx.form = table, (len(weight), embedding.padding_idx, embedding)
        with host_copies():
            found = nn.functional.embedding(
                on_host,
                weight,
                embedding.padding_idx,
                embedding.max_norm,
                embedding.norm_type,
                embedding.scale_grad_by_freq,
                embedding.sparse,
            )
        rows = torch.empty_like(found, device=ids.device)
        source = _like_on_host(rows) if rows.is_cuda else found
        with host_copies():
            source = source if source is found else source.copy_(found)
        copies.to_device([rows], [source])()
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (ids,), (gradient,) = ctx.saved_tensors, gradients
        num_rows, padding, embedding = ctx.form
        if torch.is_grad_enabled():  # for gradients of gradients
            landed = gradient.to("cpu")
        else:
            copies, landed = ctx.table.residence.copies, _like_on_host(gradient)
            copies.to_host(landed, gradient, adds=False)
            copies.land()
        # Those that are updated in backward: as many as there are would wait with whole gradients.
        for part in ctx.table.residence.tables:
            part.wait()
        with host_copies():
            found = aten.embedding_backward(
                landed,
                ids,
                num_rows,
                -1 if padding is None else padding,
                embedding.scale_grad_by_freq,
                embedding.sparse,
            )
        return None, None, found, None


# Page-locked, where copies are beside the computation: torch keeps such memory for later ones, in
# sizes that are powers of two.
def _like_on_host(like: Tensor) -> Tensor:
    with torch.inference_mode(mode=False), host_copies():
        num_bytes = like.nbytes
        if on_cuda(like) and num_bytes:
            num_bytes = 1 << (num_bytes - 1).bit_length()
        made = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=like.is_cuda)
    mark_as_host(made)
    return made[: like.nbytes].view(like.dtype).view(like.shape)


def look_up_on_host(model: nn.Module, residence: Residence) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for part in residence.tables:
        table = HostTable(residence, part)
        undo.append(set_host_weight(table))
        for module in model.modules():
            is_own = isinstance(module, nn.Embedding) and module.weight is table.weight
            if is_own and not is_asking(module):
                undo.append(patch_method(module, forward))
    return undo


# Named like the method that it replaces.
def forward(self: Any, input: Tensor) -> Tensor:
    """Look up rows of a table on the host; replaces ``nn.Embedding.forward``."""
    host = host_weight_of(self.weight)
    if host is None:
        plain: Tensor = previous_method(self, "forward")(input)
        return plain
    found: Tensor = host.look_up(self, input)
    return found


def choose_tables(model: nn.Module, min_bytes: int) -> tuple[list[nn.Parameter], list[str]]:
    """Return the large weights of tables, and texts about heads that are weights as all others."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if is_asking(m)} - looked_up
    sharing = shared_parameters(model)
    large = [
        param
        for param in model.parameters()
        if id(param) in looked_up | heads
        and param.requires_grad
        and is_plain(param)
        and param not in sharing
        and param.nbytes >= min_bytes
    ]
    problems = {param: table_problems(model, param) for param in large if id(param) in heads}
    left = [
        f"a head as all other weights: {why[0].what}: {why[0].why}"
        for why in problems.values()
        if why
    ]
    return [param for param in large if not problems.get(param)], left


def table_problems(model: nn.Module, weight: nn.Parameter) -> list[Problem]:
    """Find every reason why a weight cannot stay on the host."""
    problems, modules = (
        [],
        {
            name: module
            for name, module in model.named_modules()
            if any(param is weight for param in module._parameters.values())
        },
    )
    for name, module in modules.items():
        why, fix = _why_read_elsewhere(model, module) or _why_not(module)
        if why:
            problems.append(Problem(f"`{name}`", why, fix))
    has_head = any(isinstance(module, nn.Linear) for module in modules.values())
    if has_head and _is_hooked(weight):
        problems.append(_HOOKED)
    return problems


# Hooks of this package see to it themselves that there is a gradient.
def _is_hooked(weight: nn.Parameter) -> bool:
    later = (weight._post_accumulate_grad_hooks or {}).values()
    own = __name__.partition(".")[0]
    are_own = all(getattr(hook, "__module__", "").startswith(own) for hook in later)
    return bool(weight._backward_hooks) or not are_own


# Liger's fused loss does not call the head: its kernel multiplies with the whole weight.
def _why_read_elsewhere(model: nn.Module, head: nn.Module) -> tuple[str, str] | None:
    for module in model.modules() if isinstance(head, nn.Linear) else ():
        method = vars(module).get("forward", type(module).forward)
        has_head = module is not head and any(inner is head for inner in module.modules())
        is_fused = has_head or "FusedLinear" in type(module).__name__
        if is_fused and str(getattr(method, "__module__", "")).startswith("liger_kernel."):
            why = f"the fused loss of Liger in `{type(module).__name__}` reads its weight"
            return why, f"Load the model without that loss, or {_LEFT_OUT}."
    return None


def _why_not(module: nn.Module) -> tuple[str, str]:
    if type(module) is nn.Embedding:
        return _why_not_embedding(module)
    if type(module) is not nn.Linear:
        kind = type(module).__name__
        return (
            f"a `{kind}` with the table is not supported",
            f"Give it a weight of its own, or {_LEFT_OUT}.",
        )
    if is_asking(module):
        return "", ""
    fix = (
        "Set `chunked_cross_entropy=True`; in a plain loop apply `ChunkedCrossEntropy` first, with "
        f"its name in `heads`. Or {_LEFT_OUT}."
    )
    return "its output is computed with the whole table", fix


def _why_not_embedding(embedding: nn.Embedding) -> tuple[str, str]:
    method = vars(embedding).get("forward")
    own = (None, forward, nn.Embedding.forward)
    if host_weight_of(embedding.weight) is not None:
        return "its weight is on the host already", "Undo that first."
    if not is_asking(embedding) and getattr(method, "__func__", method) not in own:
        return "its `forward` has been replaced", f"Undo what has replaced it, or {_LEFT_OUT}."
    return "", ""


_HOOKED = Problem(
    "a hook of the weight of a head",
    "it gets no gradient of the head, which is made tile by tile on the host",
    f'Remove it from the weight, or {_LEFT_OUT}, as in `offload="parameters"`.',
)
_CAPTURED = Problem(
    "`torch.autograd.grad` for the weight of a head",
    "the gradient of the head is made tile by tile, and goes into that of the weight",
    f"Use `backward` and the weight's `grad`, or {_LEFT_OUT}.",
)
