"""Predict peak memory by running training steps on fake tensors."""

import contextlib
import copy
import dataclasses
import functools
import gc
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.nested import count_samples, find_shared_leaves, split_samples
from lightning_memsave.core.technique import Row
from lightning_memsave.errors import ConfigurationError, MemsaveError
from lightning_memsave.measure.storages import storages_of, tensors_in
from lightning_memsave.prediction.cuda.allocator import (
    AllocatorSettings,
    CachingAllocator,
    least_capacity,
)
from lightning_memsave.prediction.cuda.constants import (
    constant_assumptions,
    context_bytes,
    distributed_bytes,
    lt_workspaces,
    margin_bytes,
    workspaces,
)
from lightning_memsave.prediction.cuda.kernels import (
    ASSUMPTIONS,
    cuda_kernels,
    module_assumptions,
)
from lightning_memsave.prediction.fake.tensors import (
    FakeTensors,
    cached_functions,
    fake_tensors,
    remedy_for,
)
from lightning_memsave.prediction.peaks import Peaks
from lightning_memsave.prediction.recording import Recording
from lightning_memsave.prediction.resident_blocks import fill, is_open
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.simulate import (
    SimulationSettings,
    simulate_steps,
)
from lightning_memsave.prediction.training_step import RunningFit, TrainingStep
from lightning_memsave.prediction.wrapped_module import inner_of, unwrap
from lightning_memsave.techniques.micro_batching.technique import size_of_batches
from lightning_memsave.techniques.offloading.host_budget import SMALLER_FORM
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_kinds import MIN_PAGED_NUMEL, PAGED_STATES
from lightning_memsave.techniques.registry import with_preset
from lightning_memsave.trainer.distributed import gradient_bytes
from lightning_memsave.trainer.nested_fit import quiet
from lightning_memsave.trainer.precision import half_precision_on_cpu
from lightning_memsave.trainer.trainer import package_of


def summarise(
    recording: Recording,
    *,
    device: str,
    model: str,
    extra: Sequence[tuple[str, int, str]] = (),
    workspaces: Sequence[int] = (),
    has_run: bool = False,
    **said: Any,
) -> MemoryPrediction:
    peaks = Peaks(recording, extra, workspaces, has_run=has_run)
    blocks: dict[str, Any] = {}
    if device == "cuda":
        changes = list(peaks.changes())
        allocator_settings = AllocatorSettings.of_environment()
        allocator = CachingAllocator(settings=allocator_settings)
        allocator.replay(changes)
        allocated, reserved = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        blocks = {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "least_reserved_bytes": least_capacity(
                changes, allocated, reserved, allocator_settings
            ),
        }
    by_module = peaks.by_module()
    return MemoryPrediction(
        device=device,
        model=model,
        peak=replace(peaks.peak, host_bytes=recording.host_bytes),
        kept_gradient_bytes=recording.kept_gradient_bytes,
        by_phase=peaks.by_phase,
        modules=tuple(
            replace(module, memory=by_module.get(module.name, MemoryBreakdown()))
            for module in recording.modules
        ),
        largest_tensors=peaks.largest(),
        peak_phase=peaks.event.phase,
        peak_module=peaks.event.module,
        peak_op=peaks.event.op,
        timeline=peaks.timeline(),
        work=recording.work,
        trace=peaks.trace(),
        **blocks,
        workspace_bytes=sum(workspaces),
        **said,
    )


_SCRATCH = (
    "Not counted: temporary buffers inside kernels, such as those of convolutions, recurrent "
    "layers and bfloat16."
)
_NO_LOSS = (
    "`training_step` returned no loss: no backward pass ran and no parameter was updated. A step "
    "with a loss needs more memory."
)
_OF_FIRST = {
    "ddp": "Of one process: the others need as much, with batches of this size.",
    "fsdp2": "Of the first process: the shards of others are as large or smaller. Streams of "
    "collectives share one pool of memory here.",
}
_PAGED = "paged_"
_CHECK_BATCH = "check that the module accepts this batch."
_NOTHING_TO_TRAIN = "optimizer got an empty parameter list"


def predict(step: TrainingStep) -> MemoryPrediction:
    """Predict the peak memory of a training step.

    Note:
        Exceptions of the module's own code propagate, with a note.
    """
    if is_open(step):
        return _filled(step)
    start_s = time.monotonic()
    limit_s = math.inf if step.time_limit_s is None else step.time_limit_s
    deadline_s = processor_time_s() + limit_s
    with (
        quiet(),
        _older_objects_left_alone(),
        fake_tensors(deadline_s) as fakes,
        _explain_errors(step, fakes, deadline_s),
    ):
        pl_module, batch = step.build(fakes)
        prediction = _predict(step, fakes, pl_module, batch, deadline_s)
        prediction = unwrap(prediction, pl_module, step.loss is not None)
    return dataclasses.replace(prediction, seconds=time.monotonic() - start_s)


def _filled(step: TrainingStep) -> MemoryPrediction:
    if step.gpu is None:
        raise ConfigurationError(
            '`resident="auto"` fills a GPU, and none is named. Use `gpu="RTX 3060"`, or a number '
            "such as `resident=4`."
        )
    found = fill(step, step.gpu.total_bytes - margin_bytes(step.gpu.total_bytes), predict)
    assumptions = (*found.prediction.assumptions, f"{found.note}.")
    return dataclasses.replace(found.prediction, assumptions=assumptions)


_others_freeze = threading.Event()


# Each full collection of garbage would visit all objects of the process: a seventh of the time.
@contextlib.contextmanager
def _older_objects_left_alone() -> Iterator[None]:
    # What somebody else froze would be unfrozen too. They are counted one by one, which takes as
    # long as the prediction of a small step: once.
    if _others_freeze.is_set() or gc.get_freeze_count():
        _others_freeze.set()
        yield
        return
    cached_functions()  # they are found among objects that are not frozen
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _explain_errors(step: TrainingStep, fakes: FakeTensors, deadline_s: float) -> Iterator[None]:
    try:
        yield
    except MemsaveError:
        raise
    except SystemExit as error:
        # A Trainer converts KeyboardInterrupt to SystemExit.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    except TimeoutError as error:
        if step.time_limit_s is None or processor_time_s() < deadline_s:
            raise
        asked = fakes.values.most_asked
        why = f"; its most frequent guess is {asked}" if asked else ""
        raise TimeoutError(
            f"simulating the step takes more than {step.time_limit_s:g} seconds{why}"
        ) from error
    except Exception as error:
        if _NOTHING_TO_TRAIN in str(error):
            raise ConfigurationError(
                "The optimizer has no parameter to train: the module has none, or all have "
                "`requires_grad=False`. Set `requires_grad=True` for some of them, or pass a "
                "module whose optimizer has parameters."
            ) from error
        error.add_note(
            "Raised by the training step of the module, which ran on fake tensors: "
            f"{remedy_for(error) or _CHECK_BATCH}"
        )
        raise


@dataclass
class _PagedState:
    is_paged: bool
    num_bytes: int = 0

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        hook = register_optimizer_step_post_hook(self._note) if self.is_paged else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        states = [s for p, s in optimizer.state.items() if p.numel() >= MIN_PAGED_NUMEL]
        found = [s[key] for s in states for key in PAGED_STATES if key in s]
        self.num_bytes = max(self.num_bytes, sum(tensor.nbytes for tensor in found))


def _predict(
    step: TrainingStep, fakes: FakeTensors, pl_module: Any, batch: Any, deadline_s: float
) -> MemoryPrediction:
    package = package_of(pl_module)
    on_cuda = step.device == "cuda"
    arguments, trainer_arguments, assumptions = simulated_arguments(step, package)
    accumulated = trainer_arguments.pop("accumulate_grad_batches", 1)
    callback = step.make_callback(**copy.deepcopy(arguments))
    num_samples, num_tokens = _counts(batch)
    most = _most_simulated(arguments)
    batch, rest_bytes, share = _first_micro_batches(batch, arguments, most)
    num_accumulated = min(arguments["accumulate_grad_batches"] or accumulated, most)
    given = step.arguments["accumulate_grad_batches"]
    num_passed = given or accumulated
    emulation = functools.partial(
        cuda_kernels,
        step.attention,
        capability=step.capability,
        num_multiprocessors=None if step.gpu is None else step.gpu.num_multiprocessors,
    )
    fit = step.fit or RunningFit(has_buckets=step.strategy == "ddp", num_processes=step.world_size)
    settings = SimulationSettings(
        package,
        accumulate_grad_batches=num_accumulated,
        num_batches=fit.num_batches,
        trainer_arguments=trainer_arguments,
        is_running=step.fit is not None,
        has_started=step.fit is not None and step.fit.has_started,
        emulation=emulation if on_cuda else contextlib.nullcontext,
        strategy=step.strategy,
        world_size=step.world_size,
        strategy_arguments=fit.strategy_arguments,
        deadline_s=deadline_s,
    )
    paged = _PagedState(is_paged=arguments["optimizer"] != step.arguments["optimizer"])
    with paged.looking():
        recording = simulate_steps(pl_module, batch, [callback], settings)
    factor = num_passed / num_accumulated / share
    recording.work = replace(
        recording.work.for_batches(factor),
        num_samples=num_samples * num_passed,
        num_tokens=num_tokens * num_passed,
        throughput=None if step.gpu is None else step.gpu.throughput,
    )
    rows = [row for row in callback.rows if row.name != "evaluation"]  # it is not simulated
    has_buckets = fit.has_buckets and not _has_weights_on_host(rows, arguments)
    copied = gradient_bytes(inner_of(pl_module)) if has_buckets else {}
    recording.work = recording.work.with_all_reduce(copied, fit.num_processes)
    return summarise(
        recording,
        device=step.device,
        model=type(inner_of(pl_module)).__name__,
        extra=[
            ("input", rest_bytes, ""),
            *(("other", size, name) for name, size in copied.items()),
        ],
        workspaces=_workspaces(step, recording) if on_cuda else (),
        # It proves how the losses of micro-batches add up.
        has_run=size_of_batches(arguments["micro_batch_size"]) is not None
        and any(r.name == "micro_batch_size" and r.status == "on" for r in rows),
        settings={"precision": step.precision}
        | ({step.strategy: f"1 of {step.world_size} processes"} if step.strategy else {})
        | ({"accumulate_grad_batches": str(accumulated)} if accumulated != 1 else {})
        | {row.name: row.value for row in rows if row.status == "on"}
        | ({"accumulate_grad_batches": str(given)} if given is not None else {}),
        ineffective=step.emulated
        | {r.name: f"{r.value}: {'; '.join(r.details)}" for r in rows if r.status == "off"},
        assumptions=(
            *assumptions,
            *((_OF_FIRST[step.strategy],) if step.strategy else ()),
            *_forms(rows),
            *(_cuda_assumptions(step, pl_module, recording, fit) if on_cuda else (_SCRATCH,)),
            *(() if recording.has_loss else (_NO_LOSS,)),
        ),
        guesses=fakes.guesses,
        pageable_bytes=paged.num_bytes if on_cuda else 0,
        context_bytes=context_bytes(step.capability) + distributed_bytes(fit.num_processes)
        if on_cuda
        else 0,
    )


def _cuda_assumptions(
    step: TrainingStep, pl_module: Any, recording: Recording, fit: RunningFit
) -> tuple[str, ...]:
    num_threads = len(recording.first_products)
    given = step.capability, step.workspace_config, fit.num_processes, num_threads
    constants = constant_assumptions(*given)
    operators = {event.op for event in recording.events}
    return (*constants, *ASSUMPTIONS, *module_assumptions(pl_module.modules(), operators))


# One of each thread that computes matrix products: a model of convolutions alone has none.
def _workspaces(step: TrainingStep, recording: Recording) -> tuple[int, ...]:
    of_lt = lt_workspaces(len(recording.phases_with_bias))
    threads = workspaces(step.capability, step.workspace_config, len(recording.first_products))
    return (*of_lt, *threads)


# Gradients are averaged there, without DDP's buckets.
def _has_weights_on_host(rows: Sequence[Row], arguments: Mapping[str, Any]) -> bool:
    is_on = any(row.name == "offload" and row.status == "on" for row in rows)
    offloading = Offloading.from_value(with_preset(arguments)["offload"]) if is_on else None
    return offloading is not None and offloading.has_weights


def _forms(rows: Sequence[Row]) -> list[str]:
    details = [detail for row in rows if row.name == "offload" for detail in row.details]
    return [f"Offloaded {line}." for line in details if line.startswith(SMALLER_FORM)]


def simulated_arguments(
    step: TrainingStep, package: ModuleType
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    arguments = {**step.arguments, "report": False, "predict": False}
    assumptions = []
    optimizer = arguments["optimizer"]
    name = getattr(optimizer, "optimizer", optimizer)
    if isinstance(name, str) and name.startswith(_PAGED):
        whole = name.removeprefix(_PAGED)
        is_name = name is optimizer
        arguments["optimizer"] = whole if is_name else replace(optimizer, optimizer=whole)
        assumptions.append(
            "CUDA moves paged optimizer state to the host only when memory is short, and that of "
            "small parameters never."
        )
    if arguments["accumulate_grad_batches"] is not None:
        most = min(arguments["accumulate_grad_batches"], _most_simulated(arguments))
        arguments["accumulate_grad_batches"] = most
    trainer_arguments = dict(step.trainer_settings)
    precision = step.effective_settings["precision"] or trainer_arguments.get("precision")
    if step.device == "cuda" and precision in ("16-mixed", 16, "16"):
        # On a CPU Lightning replaces float16 by bfloat16, for which some GPUs have no kernels.
        arguments["precision"] = None
        trainer_arguments.pop("precision", None)
        trainer_arguments["plugins"] = [half_precision_on_cpu(package)]
    return arguments, trainer_arguments, assumptions


# Batches, or micro-batches, of a step. From the second one on, gradients exist. In the last one
# updates in backward free them one by one; in those before it all are there.
def _most_simulated(arguments: Mapping[str, Any]) -> int:
    return 3 if with_preset(arguments)["optimizer_in_backward"] else 2


# Also the bytes of the others, and the share of the samples.
def _first_micro_batches(
    batch: Any, arguments: Mapping[str, Any], most: int
) -> tuple[Any, int, float]:
    given = arguments["micro_batch_size"]
    size = size_of_batches(given)
    # With the user's own split function, the batch may not be made of samples.
    if not isinstance(size, int) or getattr(given, "split_batch", None) is not None:
        return batch, 0, 1.0
    shared = find_shared_leaves(batch)[0]
    num_first, num_samples = most * size, count_samples(batch, shared)
    if num_samples <= num_first:
        return batch, 0, 1.0
    first = split_samples(batch, num_first, shared)[0]
    return first, _num_bytes(batch) - _num_bytes(first), num_first / num_samples


def _counts(batch: Any) -> tuple[int, int]:
    """Count samples and tokens; 0 for what the batch does not show."""
    try:
        num_samples = count_samples(batch, find_shared_leaves(batch)[0])
    except MemsaveError:  # it is not made of samples
        return 0, 0
    ids = [t for t in tensors_in(batch) if t.ndim == 2 and t.dtype in (torch.int32, torch.int64)]
    found = (t.numel() for t in ids if t.shape[0] == num_samples and t.shape[1] > 1)
    return num_samples, max(found, default=0)


def _num_bytes(batch: Any) -> int:
    storages = {s._cdata: s for tensor in tensors_in(batch) for s in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values())
