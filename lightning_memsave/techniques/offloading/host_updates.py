"""Update offloaded parameters on the host, beside the computation of the next step."""

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.memory import counted_as, host_copies, mark_as_host, on_cuda
from lightning_memsave.core.optimizers import foreign_hooks, parameters_of
from lightning_memsave.core.technique import Handle
from lightning_memsave.techniques.group_settings import share_written
from lightning_memsave.techniques.offloading.device_tiles import (
    DeviceTiles,
    Update,
    is_updated_in_tiles,
    lock_state,
)
from lightning_memsave.techniques.offloading.early_updates import EarlyUpdates
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.residence import Residence
from lightning_memsave.techniques.offloading.whole_on_device import (
    is_updated_whole,
    lock_loaded,
    step_on_device,
)
from lightning_memsave.techniques.optimizer_kinds import is_low_bit, is_made_here
from lightning_memsave.techniques.optimizer_step import (
    StepOwner,
    allocate_state,
    double_of,
    group_of,
    initialize,
    on_host,
    own_step,
    owners_of,
    owns,
    plain_step,
    scaling,
    step_without_hooks,
    updates_each_alone,
)
from lightning_memsave.techniques.residences import residence_among
from lightning_memsave.techniques.tiled_steps import is_tiled, step_in_tiles, step_whole

Clip = Callable[[list[nn.Parameter]], None]
_Gradients = defaultdict[Part, dict[nn.Parameter, Tensor]]


class HostUpdates(StepOwner):
    """Updates part by part, in the order in which the next step needs them."""

    order = 1

    def __init__(self, optimizer: Optimizer, residence: Residence, num_early: int = 0) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.residence = residence
        self.early = EarlyUpdates(residence, num_early)
        self._tiles: DeviceTiles | None = None

    def start(self) -> list[Callable[[], None]]:
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        # Not in backward: it moves state to where parameters are, beside updates of them.
        initialize(optimizer)
        self._see_state()
        hooks = [
            optimizer.register_state_dict_pre_hook(self._wait),
            optimizer.register_load_state_dict_pre_hook(self._wait),
            optimizer.register_load_state_dict_post_hook(self._see_state),
        ]
        undo = [self._wait, *(hook.remove for hook in hooks), own_step(optimizer, self)]
        if self.early.number and self.residence.processes is None:
            begin = weakref.WeakMethod(self._begin_early)
            self.residence.when_complete.append(begin)
            undo.append(lambda: self.residence.when_complete.remove(begin))
        return undo

    @property
    def passes_whole(self) -> bool:
        """Whether the device updates whole parameters, in the step and not beside the next one."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        own = [p for p in parameters_of(optimizer) if self.residence.part_of(p) is not None]
        return self._are_whole(optimizer) and not all(
            self._is_for_device(optimizer, param) for param in own if param.requires_grad
        )

    def update(self, optimizer: Optimizer, done: set[int]) -> set[int]:
        self.residence.leave()
        updated: set[int] = set()
        params = parameters_of(optimizer)
        if any(p.grad is not None for p in params):  # otherwise all are updated in backward
            gradients = self._gradients_of(params)
            settled = self.early.settle(optimizer, gradients)
            self.residence.finish(besides=settled)
            with scaling(optimizer, is_on_host=True):
                updated = self._update(optimizer, gradients, settled)
        if self.residence.is_watched or foreign_hooks(optimizer):
            self.residence.wait()
            if self.residence.processes is not None:
                self.residence.processes.remember_weights()
        return updated

    def before_zeros(self, optimizer: Optimizer) -> None:
        """Wait for updates, which may still read gradients."""
        self._wait()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        self.residence.leave()
        return self.early.clip(parameters_of(optimizer), max_norm)

    def _begin_early(self, part: Part) -> None:
        optimizer, gradients = self._optimizer(), part.gradients.complete()
        # What has more than one gradient in a step, or none yet, is updated by the step.
        if optimizer is None or not gradients or part.num_uses > 1 or part.is_early:
            return
        if all(owns(optimizer, param) for param in gradients):
            self.early.find_norms(gradients, self.residence.copies.landing())
            if self.early.may_begin(optimizer, part):
                self.early.note(self.submit(part, gradients, is_early=True))

    def submit(
        self,
        part: Part,
        gradients: Mapping[nn.Parameter, Tensor],
        clip: Clip | None = None,
        *,
        is_early: bool = False,
    ) -> "Future[None]":
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        share_written(optimizer)
        part.take_back()
        part.keep_halves()
        self._allocate(optimizer, part, gradients)
        self._make_tiles(optimizer, gradients)
        landing = self.residence.copies.landing()
        early = self.early.begin(optimizer, part, gradients) if is_early else None
        before = part.confirm() if early is None else early.save
        update = self._update_of(optimizer, part, gradients, clip)

        def update_when_landed() -> None:
            if early is None or self.early.finds_norms:  # which has landed them
                landing()
            else:
                self.early.land(landing)
            if before is not None:
                before()
            update()
            if self.residence.processes is not None:
                self.residence.processes.end_update(part)

        future = self.residence.worker.submit(update_when_landed)
        part.begin_update(future, None if early is None else early.take_back)
        # What the device needs for a whole parameter is known only where nothing else runs.
        is_whole = any(self._is_whole(optimizer, *pair) for pair in gradients.items())
        if is_whole or not updates_each_alone(optimizer):
            part.wait()
        return future

    def _gradients_of(self, params: Sequence[nn.Parameter]) -> _Gradients:
        found: _Gradients = defaultdict(dict)
        for param in params:
            part = self.residence.part_of(param)
            if param.grad is not None and part is not None:
                found[part][param] = param.grad
        return found

    def _update(
        self, optimizer: Optimizer, gradients: _Gradients, settled: Mapping[Part, bool]
    ) -> set[int]:
        params = parameters_of(optimizer)
        if self.calls_closure(optimizer):
            self.residence.wait()
            are_here = all(self.residence.part_of(param) is not None for param in params)
            with on_host() if are_here else self._in_two_places(optimizer):
                step_without_hooks(optimizer)
            self._mark_state()
            return {id(param) for param in params}
        self._mark_state()  # of what micro-batches have allocated
        if self.residence.processes is not None:
            return self._update_share(optimizer, gradients)
        for part in self.residence.all_parts:
            if part in gradients and not settled.get(part):
                self.submit(part, gradients[part])
        return {id(param) for found in gradients.values() for param in found}

    def _update_share(
        self, optimizer: Optimizer, gradients: Mapping[Part, Mapping[nn.Parameter, Tensor]]
    ) -> set[int]:
        processes = self.residence.processes
        for part, found in gradients.items():
            self._allocate(optimizer, part, found)
        params = [param for found in gradients.values() for param in found]
        processes.share_state(optimizer, params)
        for part in self.residence.parts:
            if part not in gradients:
                continue
            found = gradients[part]
            processes.begin_update(part)
            own = {param: grad for param, grad in found.items() if processes.owns(param)}
            self.submit(part, own)
            for param in found.keys() - own.keys():
                step = optimizer.state[param].get("step")
                if isinstance(step, int):  # not a tensor, which would be shared
                    optimizer.state[param]["step"] = step + 1
        return {id(param) for param in params}

    def calls_closure(self, optimizer: Optimizer) -> bool:
        return not (updates_each_alone(optimizer) or self._are_whole(optimizer))

    def run_with(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            with counted_as(""), torch.enable_grad():
                loss = closure()
            self.residence.wait()
            return loss

        self.residence.wait()
        with host_copies(), self._in_two_places(optimizer):
            found = step_without_hooks(optimizer, evaluate)
        self._mark_state()
        return found

    @contextlib.contextmanager
    def _in_two_places(self, optimizer: Optimizer) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if any(self.residence.part_of(param) is None for param in parameters_of(optimizer)):
                error.add_note(
                    f"`{type(optimizer).__name__}` updates all parameters together, of which some "
                    "wait on the host and others stay on the device. Use "
                    '`Offloading("parameters", resident=0)`, so that all wait, or an optimizer '
                    "that updates each parameter alone."
                )
            raise

    def _wait(self, *_: object) -> None:
        self.residence.finish()
        optimizer = self._optimizer()
        states = {} if optimizer is None else optimizer.state
        # Each update asks for the state of its parameters, and some optimizers have none.
        for param in [p for p, state in states.items() if isinstance(state, dict) and not state]:
            del states[param]

    def _mark_state(self, *_: object) -> None:
        optimizer = self._optimizer()
        for param, state in [] if optimizer is None else optimizer.state.items():
            if self.residence.part_of(param) is not None:
                _mark(state)

    def _see_state(self, *_: object) -> None:
        self._mark_state()
        optimizer = self._optimizer()
        if optimizer is None or updates_each_alone(optimizer) or not self._are_whole(optimizer):
            return
        for param in filter(optimizer.state.get, parameters_of(optimizer)):
            if self.residence.part_of(param) is not None:
                lock_loaded(optimizer, param, self.residence.memory)

    # Before the update runs, as it may be in the middle of a step that memory ends.
    def _allocate(self, optimizer: Optimizer, part: Part, params: Iterable[nn.Parameter]) -> None:
        stateless = {param: param for param in params if not optimizer.state.get(param)}
        if stateless:
            needs_type = not is_low_bit(optimizer)
            with part.on_host(stateless, needs_type=needs_type):
                allocate_state(_double(optimizer, stateless, optimizer.state))
            for param in stateless:
                _mark(optimizer.state[param])

    def _make_tiles(self, optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        own = [pair for pair in gradients.items() if self._is_for_device(optimizer, pair[0])]
        tiles = self._tiles
        has_room = tiles is not None and all(tiles.has_room_for(optimizer, *pair) for pair in own)
        if not own or has_room:
            return
        parts = {
            param: part
            for param in parameters_of(optimizer)
            if (part := self.residence.part_of(param)) is not None
            and self._is_for_device(optimizer, param)
        }
        are_narrow = any(grad.dtype is not torch.float32 for _, grad in own)
        device = self.residence.device
        self._tiles = DeviceTiles(optimizer, parts, device, are_narrow=are_narrow)

    def _is_for_device(self, optimizer: Optimizer, param: nn.Parameter) -> bool:
        part = self.residence.part_of(param)
        if part is None or not (is_updated_in_tiles(optimizer, param) and self._is_on_cuda(param)):
            return False
        has_all_bits = part.is_split(param) or part.weight_of(param).dtype is torch.float32
        return has_all_bits and part.form_of(param).is_contiguous()

    def _are_whole(self, optimizer: Optimizer) -> bool:
        is_on_cuda = any(map(self._is_on_cuda, parameters_of(optimizer)))
        return is_on_cuda and is_updated_whole(optimizer)

    def _is_whole(self, optimizer: Optimizer, param: nn.Parameter, grad: Tensor) -> bool:
        may_be = self._is_on_cuda(param) and is_updated_whole(optimizer)
        is_dense = grad.layout == torch.strided
        return may_be and is_dense and not self._is_for_device(optimizer, param)

    def _is_on_cuda(self, param: Tensor) -> bool:
        return self.residence.device.type == "cuda" or on_cuda(param)  # or a fake one

    # The user's parameters, groups and optimizer may change while it runs.
    def _update_of(
        self,
        optimizer: Optimizer,
        part: Part,
        gradients: Mapping[nn.Parameter, Tensor],
        clip: Clip | None,
    ) -> Callable[[], None]:
        stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for param, grad in gradients.items():
            stand_in = stand_ins[param] = nn.Parameter(part.updated_memory_of(param))
            stand_in.grad_dtype = grad.dtype
            stand_in.grad = grad
            state[stand_in] = optimizer.state[param]
        double = _double(optimizer, stand_ins, state)
        if any(map(self._is_on_cuda, gradients)):
            for group in double.param_groups:
                _choose_fused(double, group)
        steps = self._steps_of(optimizer, double, part, [*stand_ins.items()])

        def update() -> None:
            is_converted = part.is_converted
            try:
                if clip is not None:
                    clip([*stand_ins.values()])
                for step in steps:
                    step()
            except Exception as error:
                names = self.residence.names_of(part.params)
                error.add_note(f"In the update of {names} on the host.")
                raise
            for held in state.values():
                _mark(held)
            part.note_change()
            part.convert(gradients if is_converted else None)

        return update

    def _steps_of(
        self,
        optimizer: Optimizer,
        double: Optimizer,
        part: Part,
        pairs: Sequence[tuple[nn.Parameter, nn.Parameter]],
    ) -> list[Callable[[], None]]:
        plain: list[nn.Parameter] = []
        on_device: list[Update] = []
        whole: list[Update] = []
        steps: list[Callable[[], None]] = []
        # Whole temporaries of a table would need as much memory again, and pass the cache.
        is_large = part in self.residence.tables and part.params[0].dtype is torch.float32
        for param, stand_in in pairs:
            grad = stand_in.grad
            assert grad is not None, "only parameters with a gradient are updated"
            is_dense = grad.layout == torch.strided
            if self._tiles is not None and is_dense and self._is_for_device(optimizer, param):
                lock_state(optimizer.state[param], self.residence.memory)
                on_device.append(Update(stand_in, part, param))
            elif self._is_whole(optimizer, param, grad):
                whole.append(Update(stand_in, part, param))
            elif (
                part.is_split(param)
                or grad.dtype is not part.weight_of(param).dtype
                or (is_large and is_tiled(double, stand_in) and not _is_fused(double, stand_in))
            ):
                steps.append(functools.partial(_step_in_float32, double, stand_in, part, param))
            else:
                plain.append(stand_in)
        if plain:
            steps.append(functools.partial(plain_step, double, plain))
        # With settings of the device, for which no fused kernels are chosen.
        those = {update.param: update.stand_in for update in (*on_device, *whole)}
        of_device = _double(optimizer, those, double.state)
        if whole:
            residence = self.residence
            how = of_device, whole, residence.device, residence.memory
            steps.append(functools.partial(step_on_device, *how))
        if self._tiles is None:
            return steps
        in_tiles = functools.partial(self._tiles.step, of_device, on_device)
        return [in_tiles, *steps, self._tiles.synchronize]


class UpdatesHandle(Handle[Optimizer]):
    """The handle of ``Offloading.update_in_background``."""

    updates: HostUpdates
    """What updates the parameters."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip all gradients of the optimizer as torch's function does, and return their norm.

        Gradients that need no clipping are not touched, so that updates which have begun in
        backward stay.
        """
        return self.updates.clip_grad_norm_(max_norm)


def _is_fused(optimizer: Optimizer, param: nn.Parameter) -> bool:
    return bool(group_of(optimizer, param).get("fused"))


def host_updates_of(optimizer: Optimizer) -> HostUpdates | None:
    owners = owners_of(optimizer)
    return next((each for each in owners if isinstance(each, HostUpdates)), None)


def trains_offloaded(optimizer: Optimizer) -> bool:
    return residence_among(parameters_of(optimizer)) is not None


# LBFGS joins all gradients in one tensor, which can be on one device only.
def couples_devices(optimizer: Optimizer, residence: Residence) -> bool:
    params = [p for p in parameters_of(optimizer) if p.requires_grad]
    is_mixed = any(residence.part_of(param) is None for param in params)
    is_on_gpu = any(map(on_cuda, params)) or residence.device.type == "cuda"
    return isinstance(optimizer, torch.optim.LBFGS) and is_mixed and is_on_gpu


def _double(
    optimizer: Optimizer,
    params: Mapping[nn.Parameter, nn.Parameter],
    state: MutableMapping[Tensor, Any],
) -> Optimizer:
    """Make an optimizer of the same settings for other parameters, by its own."""
    groups: dict[int, dict[str, Any]] = {
        id(group): {
            **{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()},
            "params": [],
        }
        for group in optimizer.param_groups
    }
    for param, other in params.items():
        groups[id(group_of(optimizer, param))]["params"].append(other)
    double: Any = double_of(optimizer, [*groups.values()], state)
    if is_low_bit(double):
        double.is_paged = False  # CUDA moves state of what is on the device only
    made: Optimizer = double
    return made


# Their fused kernels run on a CPU, too, where they are several times as fast.
_FUSED_ON_CPU = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def _choose_fused(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Choose the fused kernels of the host, unless the user has chosen."""
    is_open = all(not group.get(k) for k in ("foreach", "differentiable", "capturable"))
    has_fused = type(optimizer) in _FUSED_ON_CPU or is_made_here(optimizer)
    if has_fused and group.get("fused") is None and is_open:
        group["fused"] = True


def _step_in_float32(
    double: Optimizer, stand_in: nn.Parameter, part: Part, param: nn.Parameter
) -> None:
    is_cut = is_tiled(double, stand_in)
    step_it = step_in_tiles if is_cut else step_whole
    weights = part.access_to(param, is_flat=is_cut)
    step_it(double, group_of(double, stand_in), stand_in, weights)


def _mark(state: Any) -> None:
    for value in state.values() if isinstance(state, dict) else ():
        if isinstance(value, Tensor):
            mark_as_host(value)
