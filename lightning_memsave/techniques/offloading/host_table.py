"""An embedding table that stays on the host, of which a step gets the rows that it uses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_memsave.core.memory import host_copies, is_fake, mark_as, mark_as_host, on_cuda
from lightning_memsave.core.patching import is_patched_with, patch_method, previous_method
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.chunked_cross_entropy import technique, tied_embedding
from lightning_memsave.techniques.host_weight import HostWeight, host_weight_of, set_host_weight
from lightning_memsave.techniques.offloading.copies import Copies, copies_for
from lightning_memsave.techniques.offloading.host_memory import HostMemory
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.row_gradient import RowGradient
from lightning_memsave.techniques.residences import residence_of

aten: Any = torch.ops.aten
_LEFT_OUT = 'leave out `"embeddings"`'
_Hook = Callable[[], None]


class Updates(Protocol):
    """What updates a table, perhaps later than its optimizer steps."""

    def bring_up_to_date(self, ids: Tensor | None) -> None:
        """Do the missed steps of some rows, or of all, after the update that runs."""


class HostTable(HostWeight):
    """Keeps the weight of an embedding on the host, as a single object for all modules with it.

    The rows of a batch are copied to the device, and the gradients of these rows back, in
    ``weight.grad``: a `RowGradient`, or an ordinary tensor on the host if a linear layer with the
    same weight has computed a loss. Such a layer works tile by tile, in chunked cross-entropy.
    """

    def __init__(
        self, model: nn.Module, weight: nn.Parameter, worker: HostWorker | None = None
    ) -> None:
        problems = table_problems(model, weight)
        if problems:
            raise IncompatibleError("offloading", problems)
        super().__init__(weight)
        self.worker = HostWorker(in_background=False) if worker is None else worker
        self.device = weight.device
        """The device that computed last."""
        self.updates: Updates | None = None
        """What updates it."""
        self.is_watched = False
        """Whether code between two steps may read any row: all are up to date after each step."""
        self.home = weight.device
        """The device of the weight before and after."""
        self.memory = HostMemory()
        """What holds the weight and its gradient."""
        self._copies: Copies | None = None
        self._modules = _modules_with(weight, model)
        self._pieces: list[tuple[Tensor, Tensor]] = []  # rows and their gradients, of a backward
        self._dense: Tensor | None = None
        self._has_gradient: Tensor | None = None  # of which rows, since the backward began
        self._task = -1

    def start(self) -> list[_Hook]:
        """Move the weight to the host, and replace the methods that use it."""
        weight, grad = self.weight, self.weight.grad
        weight.grad = None
        host = self.memory.tensors_like([weight])[0]
        with torch.no_grad(), host_copies():
            host.copy_(weight)
        weight.data = host
        if grad is not None:
            weight.grad = self.memory.tensors_like([grad])[0]
            with host_copies():
                weight.grad.copy_(grad)
        undo = [set_host_weight(self), self.release]
        for module in self._modules:
            undo += [
                module.register_state_dict_pre_hook(_look).remove,
                module.register_load_state_dict_pre_hook(_look).remove,
                patch_method(module, _apply),
            ]
            is_plain = isinstance(module, nn.Embedding)
            if is_plain and not is_patched_with(module, tied_embedding.forward):
                undo.append(patch_method(module, forward))
        return undo

    def bring_up_to_date(self) -> None:
        """Let all rows be as if they had been updated in each step.

        Needed before ``weight`` is read directly; ``state_dict`` and evaluation do it.
        """
        if self.updates is not None:
            self.updates.bring_up_to_date(None)

    def release(self) -> None:
        """Give the weight and its gradient ordinary memory, where the weight was before."""
        self.bring_up_to_date()
        weight, grad = self.weight, self.weight.grad
        weight.grad = None
        weight.data = _moved(weight.data, self.home)
        if grad is not None:
            grad = grad.whole() if isinstance(grad, RowGradient) else grad
            weight.grad = _moved(grad, self.home)

    def look_up(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        """Look up rows, up to date."""
        if self._task != -1 and torch._C._current_graph_task_id() == -1:
            # The backward pass before has failed; its gradients are nobody's.
            self._pieces, self._has_gradient, self._task = [], None, -1
        self._follow(ids)
        found, places = self._distinct(ids)
        apply: Any = _LookUp.apply  # untyped in torch
        padding = -1
        if embedding.padding_idx is not None and not is_fake(ids):
            with host_copies():
                is_padding = (found == embedding.padding_idx).nonzero()
                padding = int(is_padding) if len(is_padding) else -1
        settings = padding, embedding.scale_grad_by_freq
        rows: Tensor = apply((self, found, settings), self.weight, self._rows(found), places)
        return rows

    def tiles(self, places: Sequence[slice], device: torch.device) -> Iterator[Tensor]:
        """Bring tiles of rows to the device, the next one while one is used."""
        self._follow(torch.empty(0, device=device))
        self.bring_up_to_date()
        assert self._copies is not None, "it has followed"
        host, num = self.weight.data, max(place.stop - place.start for place in places)
        buffers = [host.new_empty(num, host.shape[1], device=device) for _ in range(2)]
        for buffer in buffers:
            mark_as("parameter", buffer)
        waiting: list[Any] = []
        try:
            for index in range(len(places) + 1):
                if index < len(places):
                    place = places[index]
                    tile = buffers[index % 2][: place.stop - place.start]
                    waiting.append((tile, self._copies.to_device([tile], [host[place]])))
                if index:
                    tile, wait = waiting.pop(0)
                    wait()
                    yield tile
        finally:  # whoever uses the tiles may fail, and what comes is written to memory of others
            for _, wait in waiting:
                wait()

    def add_gradient(self, place: slice, gradient: Tensor) -> None:
        """Add the gradient of a tile to that of the weight; call it in backward."""
        self._begin_backward()
        assert self._copies is not None, "there was a forward pass"
        whole, has_gradient = self._whole_gradient()
        with torch.no_grad(), host_copies():
            known = has_gradient[place]
            num_known = int(known.count_nonzero()) if not is_fake(known) else 0
            if 0 < num_known < len(known):
                self._copies.finish()
                whole[place][~known] = 0.0
            known.fill_(True)
        self._copies.to_host(whole[place], gradient, adds=num_known > 0)

    def add_rows(self, ids: Tensor, gradient: Tensor) -> None:
        """Add the gradients of some rows to that of the weight; call it in backward."""
        self._begin_backward()
        assert self._copies is not None, "there was a forward pass"
        landing = self._transfer_memory(gradient)
        self._copies.to_host(landing, gradient, adds=False)
        self._pieces.append((ids, landing))

    def _follow(self, tensor: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # otherwise, recomputation
            self._pieces.clear()  # of a backward pass that has failed
            self._has_gradient = None
        residence = residence_of(self._modules[0])
        if residence is not None and residence.device == tensor.device:
            self._copies = residence.copies  # so that the host waits for all gradients at once
            if on_cuda(tensor) and not is_fake(tensor):
                self.memory.lock(tensor.device)
        elif self._copies is None or tensor.device != self.device:
            self._copies = copies_for(tensor, self.worker, self.memory)
        self.device = tensor.device

    # Page-locked, where copies are beside the computation: torch keeps such memory for later ones,
    # in sizes that are powers of two.
    def _transfer_memory(self, like: Tensor) -> Tensor:
        with torch.inference_mode(mode=False), host_copies():
            num_bytes = like.nbytes
            if on_cuda(like) and num_bytes:
                num_bytes = 1 << (num_bytes - 1).bit_length()
            is_locked = like.is_cuda
            made = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_locked)
        mark_as_host(made)
        return made[: like.nbytes].view(like.dtype).view(like.shape)

    def _distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids, on the host, and the place of each id among them."""
        assert self._copies is not None, "it has followed"
        on_host, places = self._transfer_memory(ids), torch.empty_like(ids, dtype=torch.int32)
        self._copies.to_host(on_host, ids, adds=False)
        self._copies.landing()()  # which rows these are says the host
        with torch.no_grad(), host_copies():
            source = self._transfer_memory(places)
            if is_fake(ids):  # where ids are not known, as many as there can be
                found = torch.unique(ids)[: len(self.weight)]
            else:
                found, inverse = torch.unique(on_host.long(), return_inverse=True)
                if len(found) and not 0 <= int(found[0]) <= int(found[-1]) < len(self.weight):
                    raise IndexError("index out of range in self")
                source.copy_(inverse)
        places.copy_(source, non_blocking=places.is_cuda)
        return found, places

    def _rows(self, ids: Tensor) -> Tensor:
        """Return rows on the device, up to date."""
        assert self._copies is not None, "it has followed"
        if self.updates is not None and not is_fake(ids):
            self.updates.bring_up_to_date(ids)
        host = self.weight.data
        rows = host.new_empty(len(ids), host.shape[1], device=self.device)
        with torch.no_grad(), host_copies():
            source = self._transfer_memory(rows)
            torch.index_select(host, 0, ids, out=source)
        self._copies.to_device([rows], [source])()
        return rows

    def _begin_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue(self._finish_backward)

    # At the end of backward: on the thread that called it, or on CUDA that of the device.
    @torch.no_grad()
    def _finish_backward(self) -> None:
        assert self._copies is not None, "there was a forward pass"
        self._copies.finish()
        pieces, self._pieces = self._pieces, []
        with host_copies():
            if self._has_gradient is not None:
                whole, has_gradient = self._whole_gradient()
                if not is_fake(whole):
                    whole[~has_gradient] = 0.0
                    if pieces:
                        whole.index_add_(0, *_sum(pieces))
                self.weight.grad = whole
            elif pieces:
                self._add_pieces(pieces)
        self._has_gradient, self._task = None, -1

    def _add_pieces(self, pieces: list[tuple[Tensor, Tensor]]) -> None:
        grad, (ids, rows) = self.weight.grad, _sum(pieces)
        if grad is not None and not isinstance(grad, RowGradient):
            grad.index_add_(0, ids, rows)
            return
        if grad is not None:
            ids, rows = _sum([(grad.ids, grad.rows), (ids, rows)])
        mark_as_host(ids)
        mark_as_host(rows)
        self.weight.grad = RowGradient(ids, rows, len(self.weight))

    def _whole_gradient(self) -> tuple[Tensor, Tensor]:
        """Return the memory of the whole gradient, and which of its rows have values."""
        weight = self.weight
        if self._dense is None:
            self._dense = self.memory.tensors_like([weight.data])[0]
        if self._has_gradient is None:
            grad, whole = weight.grad, self._dense
            with torch.no_grad(), host_copies():
                self._has_gradient = torch.full((len(weight),), grad is not None, device="cpu")
                if isinstance(grad, RowGradient):
                    whole.zero_().index_copy_(0, grad.ids, grad.rows)
                elif grad is not None and grad.data_ptr() != whole.data_ptr():
                    whole.copy_(grad)
        return self._dense, self._has_gradient


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        of: tuple[HostTable, Tensor, tuple[int, bool]],
        weight: Tensor,
        rows: Tensor,
        places: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.table, ctx.ids, ctx.settings = of
        found: Tensor = aten.embedding(rows, places)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise IncompatibleError("offloading", [_twice()])
        (places,), ids = ctx.saved_tensors, ctx.ids
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        sums = aten.embedding_dense_backward(gradients[0].to(wide), places, len(ids), *ctx.settings)
        ctx.table.add_rows(ids, sums)
        return None, None, None, None


def _sum(pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Add gradients of rows, in their order."""
    if len(pieces) == 1:
        return pieces[0]
    ids = torch.cat([ids for ids, _ in pieces])
    rows = torch.cat([rows for _, rows in pieces])
    if is_fake(ids):
        return ids, rows
    ids, places = torch.unique(ids, return_inverse=True)
    return ids, rows.new_zeros(len(ids), rows.shape[1]).index_add_(0, places, rows)


# Named like the method that it replaces.
def forward(self: Any, input: Tensor) -> Tensor:
    """Look up rows of a table on the host; replaces ``nn.Embedding.forward``."""
    host = host_weight_of(self.weight)
    if host is None:
        plain: Tensor = previous_method(self, "forward")(input)
        return plain
    return host.look_up(self, input)


def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Convert what is not on the host; replaces ``Module._apply``."""
    hidden = {
        name: param
        for name, param in self._parameters.items()
        if param is not None and host_weight_of(param) is not None
    }
    for param in hidden.values():
        converted = fn(torch.empty(0, dtype=param.dtype, device="cpu"))
        if converted.dtype is not param.dtype:
            raise IncompatibleError("offloading", [_conversion(converted.dtype)])
    self._parameters.update(dict.fromkeys(hidden))
    try:
        return previous_method(self, "_apply")(fn, recurse)
    finally:
        self._parameters.update(hidden)


def _look(module: nn.Module, *_: object) -> None:
    for param in module.parameters(recurse=False):
        host = host_weight_of(param)
        if isinstance(host, HostTable):
            host.bring_up_to_date()


def table_problems(model: nn.Module, weight: nn.Parameter) -> list[Problem]:
    """Find every reason why a weight cannot stay on the host."""
    problems = []
    if weight.dtype not in (torch.float32, torch.float64):
        problems.append(_conversion(weight.dtype))
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        why = "hooks get no gradient of it, which is made row by row on the host"
        fix = f'Remove them from the weight, or {_LEFT_OUT}, as in `offload="parameters"`.'
        problems.append(Problem("a hook of a table", why, fix))
    for name, module in model.named_modules():
        if not any(param is weight for param in module._parameters.values()):
            continue
        why, fix = _why_not(module)
        if why:
            problems.append(Problem(f"`{name}`", why, fix))
    return problems


def _why_not(module: nn.Module) -> tuple[str, str]:
    if type(module) is nn.Embedding:
        return _why_not_embedding(module)
    if type(module) is not nn.Linear:
        kind = type(module).__name__
        return f"a `{kind}` with the table is not supported", "Give it a weight of its own."
    if is_patched_with(module, technique.forward):
        return "", ""
    fix = (
        "Set `chunked_cross_entropy=True`; in a plain loop apply `ChunkedCrossEntropy` first, with "
        f"its name in `heads`. Or {_LEFT_OUT}."
    )
    return "its output is computed with the whole table", fix


def _why_not_embedding(embedding: nn.Embedding) -> tuple[str, str]:
    method = vars(embedding).get("forward")
    own = (None, forward, tied_embedding.forward, nn.Embedding.forward)
    reasons = (
        (host_weight_of(embedding.weight), "its weight is on the host already", "Undo that first."),
        (
            embedding.max_norm,
            "`max_norm` changes rows in the forward pass",
            f"Set `max_norm=None`, or {_LEFT_OUT}.",
        ),
        (embedding.sparse, "`sparse=True` makes gradients of its own kind", "Set it to `False`."),
        (
            getattr(method, "__func__", method) not in own,
            "its `forward` has been replaced",
            "Undo what has replaced it.",
        ),
    )
    return next(((why, fix) for is_true, why, fix in reasons if is_true), ("", ""))


def _modules_with(weight: nn.Parameter, model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if any(p is weight for p in m._parameters.values())]


# On the CPU it stays where it is, but counts as the device's.
def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.to(device)
    mark_as("parameter", moved)
    return moved


def _conversion(dtype: torch.dtype) -> Problem:
    return Problem(
        f"a table in {dtype}",
        "sums of gradients and updates on the host need float32",
        'Keep it in float32, and use `precision="bf16-mixed"`.',
    )


def _twice() -> Problem:
    return Problem(
        "gradients of gradients (`create_graph=True`)",
        "looking up rows on the host only has a first derivative",
        "Keep the table on the device.",
    )
