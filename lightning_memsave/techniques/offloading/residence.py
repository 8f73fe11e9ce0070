"""Bring parameters to the device for a step's passes, and their gradients to the host."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.blocks import Block, owners_of
from lightning_memsave.core.memory import host_copies, is_fake, mark_as_host
from lightning_memsave.core.nested import map_tensors
from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.core.patching import own
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.deferred import computed, live_products
from lightning_memsave.techniques.flat_memory import is_in_piece
from lightning_memsave.techniques.host_memory import HostMemory, trim_heap
from lightning_memsave.techniques.offloading.copies import Copies, copies_for
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.quantized import move_scales
from lightning_memsave.techniques.optimizer_step import around_all_steps
from lightning_memsave.techniques.optimizer_step import owners_of as owners_of_step

_NO_TASK = -1
PART = "_memsave_part"
"""Of blocks that wait on the host: references to modules would keep the model alive."""


class Residence:
    """Decides when the parameters of a model are on the device."""

    keeps_halves = False
    """Whether `wait` joins no weights, as a state dict is made that joins them later."""
    before_blocks = contextlib.ExitStack()  # of a step: left where it calls a block, which waits

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        params: Sequence[nn.Parameter],
        worker: HostWorker,
        memory: HostMemory,
        *,
        tables: Sequence[nn.Parameter] = (),
        num_on_device: int | None = None,
        processes: Any = None,
    ) -> None:
        self.worker = worker
        self.processes = processes
        """The `Processes` that share the weights; ``None`` where there is one."""
        self.is_watched = False
        """Whether code between two steps may use weights in ways that nobody sees: updates end in
        ``optimizer.step()``, and weights are always copied again."""
        self.takers: list[Any] = []
        """What updates parameters as soon as their gradients are complete; each ``take`` says
        whether it has taken a gradient."""
        self.when_complete: list[weakref.WeakMethod[Any]] = []
        """What is called in backward with a part whose gradients have all come."""
        self.memory = memory
        some = [*params, *tables][0]
        self.device = some.device
        self.copies = self._copies_for(some)
        owners = owners_of(params, model, blocks)
        make = functools.partial(Part, memory=self.memory, processes=processes)
        self.rest = make([p for p in params if owners[p] is None])
        self._make_part = functools.partial(make, is_streamed=num_on_device is not None)
        self._num_ahead = 1 if num_on_device is None else num_on_device - 1
        in_blocks = ([p for p in params if owners[p] is block] for block in blocks)
        self.parts = [self.rest, *map(self._make_part, in_blocks)]
        """In the order in which a step needs them."""
        self.tables = [self._with_gradients(make, [table]) for table in tables]
        """Of embeddings, which stay on the host."""
        self.gradient_bytes = 0
        """The most that autograd has made for the gradients of tables, beside ``memory``."""
        self._part_of = {id(param): part for part in self.all_parts for param in part.params}
        self._device_dtypes: dict[int, tuple[torch.dtype, bool]] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._came: list[Part] = []
        self._entered: list[Part] = []  # that are on the device, and some that were
        # Those that were sent ahead, and in backward, while the graph may still have held weights.
        self._following, self._left = list[Part](), list[Part]()
        self._depth, self._has_graph = 0, False
        self._uses: list[weakref.ref[Any]] = []  # of weights, after the model has returned
        self._is_released = False
        self._task = _NO_TASK
        self._model = weakref.ref(model)
        if processes is not None:
            worker.num_processes = processes.size
            processes.start(self.parts)

    def _copies_for(self, tensor: Tensor) -> Copies:
        if self.processes is not None and tensor.is_cuda:
            self.processes.memory.lock(tensor.device)
        return copies_for(tensor, self.worker, self.memory)

    # Autograd adds to the gradient from before, where it is.
    @staticmethod
    def _with_gradients(make: Callable[..., Part], params: Sequence[nn.Parameter]) -> Part:
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        part = make(params)
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                with host_copies():
                    param.grad = grad.to("cpu", copy=True)
        return part

    @property
    def all_parts(self) -> list[Part]:
        """The parts, also those that stay on the host."""
        return [*self.tables, *self.parts]

    def start(self) -> list[Callable[[], None]]:
        trim_heap()  # weights have moved
        self._watch_trained()
        return [self._stop_watching, *self._watch_steps()]

    def let_go(self, part: Part) -> None:
        """Let the parameters of a block stay on the device from now on, all or none."""
        grads = [param.grad for param in part.params]
        try:
            part.release(self.device)
        except BaseException:
            part.stay()
            for param, grad in zip(part.params, grads, strict=True):
                param.grad = None
                param.grad = grad
            raise
        self.parts.remove(part)
        for param in part.params:
            del self._part_of[id(param)]
            self._watched.pop(id(param), lambda: None)()

    def take_in(self, params: Sequence[nn.Parameter]) -> Part:
        """Let the parameters of one more block, the last one, wait on the host from now on."""
        part = self._with_gradients(self._make_part, params)
        for param in params:
            if (known := self._device_dtypes.get(id(param))) is not None:
                part.set_device_dtype(param, known[0], is_split=known[1])
        self.parts.append(part)
        self._part_of |= {id(param): part for param in params}
        self._watch_trained()
        return part

    def part_of(self, param: Tensor) -> Part | None:
        """Return the part of a parameter; ``None`` if it is not offloaded."""
        return self._part_of.get(id(param))

    def names_of(self, params: Iterable[Tensor]) -> str:
        model, chosen = self._model(), {id(param) for param in params}
        named = [] if model is None else model.named_parameters()
        return ", ".join(f"`{name}`" for name, param in named if id(param) in chosen)

    def set_device_dtype(
        self, param: nn.Parameter, dtype: torch.dtype, *, is_split: bool = False
    ) -> None:
        """Choose the type of a parameter's copy on the device, as `Part.set_device_dtype`.

        One that stays on the device now is copied in this type when it waits on the host.
        """
        self.finish()
        self._device_dtypes[id(param)] = dtype, is_split
        if (part := self.part_of(param)) is not None:
            part.set_device_dtype(param, dtype, is_split=is_split)

    def leave(self) -> None:
        """Let all parameters and gradients be on the host, complete but for updates that run."""
        if any(part.gradients.have_come for part in self.parts):
            self.copies.finish()
        else:
            self.copies.let_go()
        for part in self.parts:
            part.leave()
            part.drop()
            part.gradients.show()
            if self._has_graph and part in self._came:
                part.know_writes()
        if self._came:
            if self._has_graph:  # without one, modules called one by one are a pass each
                others = [part for part in self.parts if part not in self._came]
                self.parts = [*self._came, *others]
            if self.is_watched:
                self.copies.synchronize()
                for part in self.all_parts:
                    part.note_change()
        self._came, self._entered, self._depth, self._has_graph = [], [], 0, False

    def end_pass(self) -> None:
        """Let all parameters be on the host, as no graph needs them any more."""
        self.leave()
        for part in self.parts:
            part.num_uses = 0

    def finish(self, besides: Container[Part] = ()) -> None:
        """Let all parameters be on the host, and finish updates but those of some parts."""
        self.leave()
        self.copies.synchronize()  # the device may still read weights for what it computes late
        failed = []
        for part in self.all_parts:
            if part in besides:
                continue
            try:
                part.wait()
            except Exception as error:
                failed.append(error)
            part.note_change()
        if failed:
            raise failed[0]

    def wait(self) -> None:
        """Finish all updates, and let all parameters be on the host, where they may be changed."""
        self.finish()
        for part in () if self.keeps_halves else self.all_parts:
            part.join()

    def complete(self) -> None:
        """Finish updates of parameters on the host; those that a pass has on the device stay."""
        if is_fake(torch.empty(0, device="cpu")):  # a prediction copies no values
            return
        for part in self.all_parts:
            if not part.is_on_device:
                part.wait()
                part.join()

    def average_gradients(self) -> None:
        """Average gradients over all processes, which must all call this."""
        self.finish()
        params = [param for part in self.parts for param in part.params]
        if late := [p for p in params if p.grad is not None and not self.processes.is_known(p)]:
            what = f"{self.names_of(late)} has a gradient"
            why = "it was frozen when the processes shared out their work"
            fix = "Let it be trained from the start, or train in one process."
            raise IncompatibleError("offloading", [Problem(what, why, fix)])
        if changed := self.processes.find_changed():
            what = f"{self.names_of(changed)} was changed between two steps"
            why = "each process would change it, and they share it"
            fix = 'Change weights in the optimizer only, or set `offload="activations"` or `None`.'
            raise IncompatibleError("offloading", [Problem(what, why, fix)])
        self.processes.average()

    def stay_on_host(self) -> None:
        """Let `release` leave the parameters on the host."""
        self.device = torch.device("cpu")

    def release(self) -> None:
        """Give all parameters memory of their own on the device, one part after the other."""
        self._is_released = True
        try:
            self.finish()
        finally:
            for part in self.all_parts:
                part.release(self.device)
                trim_heap()

    # Optimizers need whole weights, and the kernels of bitsandbytes change them unseen.
    def _watch_steps(self) -> list[Callable[[], None]]:
        reference = weakref.ref(self)

        def before(optimizer: Optimizer, *_: object) -> None:
            residence = reference()
            for part in set() if residence is None else residence._changed_by(optimizer):
                part.wait()
                part.join()

        def after(optimizer: Optimizer, *_: object) -> None:
            residence = reference()
            for part in set() if residence is None else residence._changed_by(optimizer):
                part.note_change()

        return around_all_steps(before, after)

    def updates_of(self, optimizer: Optimizer) -> Any:
        """Return what updates parts in the background; ``None`` if nothing does."""
        owners = owners_of_step(optimizer)
        return next((own for own in owners if getattr(own, "residence", None) is self), None)

    def _changed_by(self, optimizer: Optimizer) -> set[Part]:
        if self.updates_of(optimizer) is not None:  # which note themselves what they change
            return set()
        params = parameters_of(optimizer)
        return {part for p in params if (part := self._part_of.get(id(p))) is not None}

    # Frozen parameters have no gradient to wait for, until somebody trains them.
    def _watch_trained(self) -> None:
        for param in (param for part in self.all_parts for param in part.params):
            if param.requires_grad and id(param) not in self._watched:
                self._watched[id(param)] = self._watch(param)

    def _stop_watching(self) -> None:
        for remove in self._watched.values():
            remove()
        self._watched.clear()

    # Torch does not find cycles through such hooks: they must not hold what holds the parameter.
    def _watch(self, param: nn.Parameter) -> Callable[[], None]:
        residence = weakref.ref(self)

        def after(found: nn.Parameter) -> None:
            own = residence()
            if own is not None:
                own._queue_end()
                own.receive(found)

        register: Any = param.register_post_accumulate_grad_hook  # untyped in torch
        return register(after).remove  # type: ignore[no-any-return]

    @torch.no_grad()
    def receive(self, param: nn.Parameter) -> None:
        part = self._part_of[id(param)]
        if part in self.tables:
            if param.grad is not None:  # otherwise of a head, whose tiles still come
                self._note_gradients()
                any(taker.take(param, part) for taker in self.takers)
            return
        if part.gradients.pop_missing(param):
            return
        if self.device.type == "cuda" and (param.grad is None or not param.grad.is_cuda):
            raise IncompatibleError("offloading", [self._used_on_host(param)])
        if not any(taker.take(param, part) for taker in self.takers):
            part.gradients.receive(param, self.copies)
            for reference in self.when_complete:
                if part is not self.rest and (call := reference()) is not None:
                    call(part)

    def _note_gradients(self) -> None:
        grads = [part.params[0].grad for part in self.tables]
        made = [each for grad in grads if grad is not None for each in _values_of(grad)]
        for tensor in made:
            mark_as_host(tensor)
        num_bytes = sum(tensor.nbytes for tensor in made if not is_in_piece(tensor))
        self.gradient_bytes = max(self.gradient_bytes, num_bytes)

    # Autograd computes such a gradient on another thread, beside those of the device: either may
    # take the place of the other.
    def _used_on_host(self, param: nn.Parameter) -> Problem:
        return Problem(
            f"{self.names_of([param])} in the graph",
            "it is used outside of its module's forward pass, where it waits on the host",
            'Use `offload="optimizer"`, under DDP computing with it after the model was called; or '
            'set `offload="activations"` or `None`.',
        )

    # At the end of backward: on the thread that called it, or on CUDA that of the device.
    def _queue_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue(self.end_pass)

    def _enter(self, part: Part, step: int) -> None:
        if torch.is_grad_enabled():
            self._has_graph = True
        if not part.is_on_device:
            part.enter(self.copies, self.device)
            self._entered.append(part)
        if torch.is_grad_enabled() or _is_in_backward():
            part.watch_gradients()
        start = self.parts.index(part)
        indices = range(start + step, start + step * (1 + self._num_ahead), step)
        following = [self.parts[i] for i in indices if 0 <= i < len(self.parts)]
        for other in [*self._following, *self._left]:  # not all parts: blocks can be many
            if other not in following:
                other.drop()
        self._following, self._left = following, [each for each in self._left if each.has_copies]
        for other in following:
            if not other.is_on_device and not other.is_updating:
                other.send(self.copies, self.device)

    def enter_block(self, block: nn.Module) -> None:
        """Bring the parameters of a block to the device, and begin to bring the next ones."""
        self.before_blocks.close()
        part = own(block, PART)
        if _is_in_backward():  # recomputed by somebody else's checkpoint, which calls the block
            self._enter(part, -1)
        else:
            part.num_uses += 1
            self._enter(part, 1)
        if part not in self._came:
            self._came.append(part)

    def leave_block(self, block: nn.Module, output: Any) -> Any:
        part = own(block, PART)
        if torch.is_grad_enabled() and part.is_streamed:
            map_tensors(output, functools.partial(self._come_back, part), in_objects=True)
            if part is self.parts[-1] or _is_in_backward():  # where backward begins, or is
                return output
        elif self._has_graph and not part.is_streamed:
            return output
        else:
            output = computed(output)
        part.leave()
        return output

    def _come_back(self, part: Part, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda _: self._enter_in_backward(part))
        return output

    def _enter_in_backward(self, part: Part) -> None:
        if self._is_released:  # the graph is older
            return
        stay = (part, self.rest)
        for other in self._entered:
            if other not in stay and other.is_on_device:
                other.leave()
                self._left.append(other)
        self._entered = [each for each in stay if each.is_on_device]
        self._enter(part, -1)
        self._queue_end()

    def begin(self) -> None:
        """Note that a module outside of blocks begins its forward pass."""
        if len(self.parts) == 1:  # no block will be called
            self.before_blocks.close()
        if not self._depth and not _is_in_backward():
            self._forget_failed_pass()
            if not self._has_graph and self.rest.is_on_device:
                self.leave()  # weights that deferred logits have kept on the device
        self._depth += 1
        if not self.rest.is_on_device:
            self._watch_trained()
            self._enter(self.rest, 1)
            self._came.append(self.rest)

    # A backward pass that has failed did not come to its end, where gradients are shown. Whoever
    # goes on has reset all gradients, and expects none of those.
    def _forget_failed_pass(self) -> None:
        if any(part.gradients.have_come for part in self.parts):
            self.copies.finish()
            for part in self.parts:
                part.gradients.forget()

    def end(self) -> None:
        self._depth = max(0, self._depth - 1)
        self._leave_unless_used()

    # Deferred logits are computed when a loss uses them, which may be after the model has returned.
    def _leave_unless_used(self, *_: object) -> None:
        if self._depth or self._has_graph:
            return
        self._uses = [
            weakref.ref(product, self._leave_unless_used)
            for product in live_products()
            if any(self.part_of(weight) is not None for weight in product.operands.weights)
        ]
        if not self._uses:
            self.end_pass()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        model = self._model()
        assert model is not None, "one of its methods runs"
        hidden = [
            (module, name, param)
            for module in model.modules()
            for name, param in module._parameters.items()
            if param is not None and self.part_of(param) is not None
        ]
        for module, name, _ in hidden:
            setattr(module, name, None)
        try:
            yield
        finally:
            for module, name, param in hidden:
                setattr(module, name, param)  # as recurrent layers have a list of them besides

    def follow(self, convert: Callable[[Tensor], Tensor]) -> None:
        some = next(param for part in self.all_parts for param in part.params)
        # Where it is, as `float` leaves it there; but nothing can be moved from `meta`.
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        before = torch.empty(0, dtype=some.dtype, device=device)
        after = convert(before)
        if after.dtype is not before.dtype:
            what = f"a conversion of the model to {after.dtype}"
            fix = 'Convert the model before it is offloaded, or use `precision="bf16-mixed"` '
            why, fix = (
                f"its weights wait on the host in {before.dtype}",
                f'{fix}instead of `"bf16-true"`.',
            )
            raise IncompatibleError("offloading", [Problem(what, why, fix)])
        if after.device != self.device:
            self.device = after.device
            self.copies = self._copies_for(after)
            for part in self.parts:
                move_scales(part.params, self.device)


def _values_of(gradient: Tensor) -> list[Tensor]:
    return [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != _NO_TASK)
