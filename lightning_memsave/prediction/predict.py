"""Predict the memory of training with `MemSaveCallback`, by training on tensors without data."""

import contextlib
import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.nested import count_samples, find_shared_leaves, split_samples
from lightning_memsave.core.technique import Row
from lightning_memsave.measure.storages import storages_of, tensors_in
from lightning_memsave.prediction.cuda.allocator import CachingAllocator, least_capacity
from lightning_memsave.prediction.cuda.constants import (
    constant_assumptions,
    context_bytes,
    workspaces,
)
from lightning_memsave.prediction.cuda.kernels import (
    ASSUMPTIONS,
    cuda_kernels,
    module_assumptions,
)
from lightning_memsave.prediction.fake.tensors import FakeTensors, fake_tensors
from lightning_memsave.prediction.peaks import Peaks
from lightning_memsave.prediction.recording import Recording
from lightning_memsave.prediction.repeated_blocks import Stack, extrapolate, find_stack
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory
from lightning_memsave.prediction.simulate import TrialSettings, run_trial
from lightning_memsave.trainer.nested_fit import quiet
from lightning_memsave.trainer.precision import half_precision_on_cpu
from lightning_memsave.trainer.trainer import package_of


def summarise(
    recording: Recording,
    *,
    device: str,
    model: str,
    extra: Sequence[tuple[str, int]] = (),
    workspaces: Sequence[int] = (),
    phase: str | None = None,
    settings: Mapping[str, str] | None = None,
    ineffective: Mapping[str, str] | None = None,
    assumptions: Sequence[str] = (),
    guesses: Sequence[str] = (),
    context_bytes: int = 0,
) -> MemoryPrediction:
    """Find the peak of a recording and what makes it.

    Args:
        recording: What was alive when.
        device: ``"cuda"`` or ``"cpu"``; on CUDA the allocator's blocks are followed too.
        model: Class name of the module.
        extra: Blocks that are there all the time and that the recording does not have: category
            and bytes of each.
        workspaces: Bytes of each block that cuBLAS holds.
        phase: As for `Peaks`.
        settings: Name and value of each setting.
        ineffective: The same of those without effect, with the reason.
        assumptions: What is taken for granted.
        guesses: What had to be guessed.
        context_bytes: What CUDA needs for itself.

    Returns:
        The prediction.
    """
    extra = [*extra, *(("other", num_bytes) for num_bytes in workspaces)]
    peaks = Peaks(recording, extra, phase)
    blocks: dict[str, Any] = {}
    if device == "cuda":
        changes = list(peaks.changes())
        allocator = CachingAllocator()
        allocator.replay(changes)
        allocated, reserved = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        blocks = {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "least_reserved_bytes": least_capacity(changes, allocated, reserved),
        }
    by_module = peaks.by_module()
    return MemoryPrediction(
        device=device,
        model=model,
        peak=replace(peaks.peak, host_bytes=recording.host_bytes),
        by_phase=peaks.by_phase,
        modules=tuple(
            ModuleMemory(
                info.name,
                info.class_name,
                info.num_parameters,
                by_module.get(info.name, MemoryBreakdown()),
            )
            for info in recording.modules
        ),
        largest_tensors=peaks.largest(),
        peak_phase=peaks.event.phase,
        peak_module=peaks.event.module,
        peak_op=peaks.event.op,
        timeline=peaks.timeline(),
        **blocks,
        workspace_bytes=sum(workspaces),
        context_bytes=context_bytes,
        settings=dict(settings or {}),
        ineffective=dict(ineffective or {}),
        assumptions=tuple(assumptions),
        guesses=tuple(guesses),
    )


MAX_MICRO_BATCHES = 2
"""The second one finds the gradients of the first, as all later ones do."""
_SCRATCH = (
    "Not counted: what kernels need for themselves for a moment, such as those of convolutions, "
    "recurrent layers and bfloat16."
)
_NO_LOSS = (
    "`training_step` returned no loss, so that nothing was differentiated and no parameter "
    "updated: a step with a loss takes more."
)
_PAGED = "paged_"


@dataclass(frozen=True)
class Question:
    """What is to be predicted.

    Args:
        build: Makes the LightningModule and the batch, both without data.
        make_callback: Makes the `MemSaveCallback`, from its arguments.
        arguments: Of `MemSaveCallback`, by name.
        device: ``"cuda"`` or ``"cpu"``: whose kernels are assumed.
        attention: CUDA's attention kernel; ``None`` for the one that torch would choose.
        capability: Compute capability of the GPU.
        trainer_arguments: Arguments of the Trainer that matter for memory.
        num_batches: In an epoch, for schedules.
        is_running: Whether the module is one of a fit that has begun.
        time_limit_s: Give up after this time.
        may_extrapolate: Whether deep models may be predicted from copies with fewer blocks.
        other_bytes: What there is all the time and no trial has, such as what a strategy holds.
        workspace_config: As ``CUBLAS_WORKSPACE_CONFIG``; ``None`` reads that variable.
    """

    build: Callable[[FakeTensors], tuple[Any, Any]]
    make_callback: Callable[..., Any]
    arguments: Mapping[str, Any]
    device: str
    attention: str | None = None
    capability: tuple[int, int] = (8, 0)
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    num_batches: int = 1000
    is_running: bool = False
    time_limit_s: float | None = None
    may_extrapolate: bool = True
    other_bytes: int = 0
    workspace_config: str | None = None


def predict(question: Question) -> MemoryPrediction:
    """Predict the peak of training.

    Args:
        question: What is asked.

    Returns:
        The prediction; deep models are predicted from copies with fewer blocks.

    Raises:
        KeyboardInterrupt: If somebody interrupts it.
        SystemExit: If the module's code ends the process.
        TimeoutError: If it takes longer than ``time_limit_s``.
    """
    start_s = time.monotonic()
    deadline_s = math.inf if question.time_limit_s is None else start_s + question.time_limit_s
    with quiet(), fake_tensors(deadline_s) as fakes:
        try:
            predictor = _Predictor(question, fakes, *question.build(fakes), deadline_s)
            prediction, how = None, ""
            stack = predictor.find_stack() if question.may_extrapolate else None
            if stack is not None:
                prediction, how = extrapolate(stack, functools.partial(predictor.predict, stack))
            prediction = prediction or predictor.predict()
        except SystemExit as error:
            # A Trainer makes the one of the other.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
        except TimeoutError as error:
            limit_s = question.time_limit_s
            if limit_s is None or time.monotonic() < deadline_s:
                raise
            raise TimeoutError(_out_of_time(limit_s, fakes.values.most_asked)) from error
    assumptions = (*prediction.assumptions, how) if how else prediction.assumptions
    seconds = time.monotonic() - start_s
    return dataclasses.replace(prediction, assumptions=assumptions, seconds=seconds)


def _out_of_time(limit_s: float, most_asked: str) -> str:
    why = f"; asked for most often is {most_asked}" if most_asked else ""
    return f"following the step takes more than {limit_s:g} seconds{why}"


@dataclass(frozen=True)
class _Predictor:
    question: Question
    fakes: FakeTensors
    pl_module: Any
    batch: Any
    deadline_s: float

    def find_stack(self) -> Stack | None:
        which = self.question.arguments["activation_checkpointing"]
        if which not in (None, "auto", "all", "selective", "nested"):
            return None
        return find_stack(self.pl_module, self.question.arguments["blocks"])

    def predict(
        self, stack: Stack | None = None, depth: int = 0, phase: str | None = None
    ) -> MemoryPrediction:
        with contextlib.nullcontext() if stack is None else stack.cut(self.pl_module, depth):
            twin = self.fakes.copy_module(self.pl_module)
        question, package = self.question, package_of(self.pl_module)
        on_cuda = question.device == "cuda"
        arguments, assumptions = _trial_arguments(question)
        trainer_arguments = dict(question.trainer_arguments)
        accumulated = trainer_arguments.pop("accumulate_grad_batches", 1)
        precision = arguments["precision"] or trainer_arguments.get("precision")
        if on_cuda and precision in ("16-mixed", 16, "16"):
            # On a CPU Lightning would take bfloat16 instead, for which some GPUs have no kernels.
            arguments["precision"] = None
            trainer_arguments.pop("precision", None)
            trainer_arguments["plugins"] = [half_precision_on_cpu(package)]
        callback = question.make_callback(**copy.deepcopy(arguments))
        batch, rest_bytes = _first_micro_batches(self.batch, arguments)
        emulation = functools.partial(
            cuda_kernels, question.attention, capability=question.capability
        )
        settings = TrialSettings(
            package,
            accumulate_grad_batches=arguments["accumulate_grad_batches"] or accumulated,
            num_batches=question.num_batches,
            trainer_arguments=trainer_arguments,
            is_running=question.is_running,
            emulation=emulation if on_cuda else contextlib.nullcontext,
            deadline_s=self.deadline_s,
        )
        recording = run_trial(twin, batch, [callback], settings)
        return summarise(
            recording,
            device=question.device,
            model=_shown_name(self.pl_module),
            extra=[("input", rest_bytes), ("other", question.other_bytes)],
            workspaces=workspaces(question.capability, question.workspace_config)
            if on_cuda
            else (),
            phase=phase,
            settings={"precision": str(precision or "32-true")}
            | ({"accumulate_grad_batches": str(accumulated)} if accumulated != 1 else {})
            | {row.name: row.value for row in callback.rows if row.status == "on"}
            | _whole_window(question.arguments),
            ineffective=_ineffective(callback.rows),
            assumptions=[
                *assumptions,
                *(self._cuda_assumptions(recording) if on_cuda else (_SCRATCH,)),
                *(() if recording.has_loss else (_NO_LOSS,)),
            ],
            guesses=self.fakes.guesses,
            context_bytes=context_bytes(question.capability) if on_cuda else 0,
        )

    def _cuda_assumptions(self, recording: Recording) -> tuple[str, ...]:
        question = self.question
        constants = constant_assumptions(question.capability, question.workspace_config)
        operators = {event.op for event in recording.events}
        return (*constants, *ASSUMPTIONS, *module_assumptions(self.pl_module.modules(), operators))


# The trial needs no more batches than two.
def _whole_window(arguments: Mapping[str, Any]) -> dict[str, str]:
    num_batches = arguments["accumulate_grad_batches"]
    return {} if num_batches is None else {"accumulate_grad_batches": str(num_batches)}


def _ineffective(rows: Sequence[Row]) -> dict[str, str]:
    return {
        row.name: f"{row.value}: {'; '.join(row.details)}" for row in rows if row.status == "off"
    }


def _trial_arguments(question: Question) -> tuple[dict[str, Any], list[str]]:
    arguments = {**question.arguments, "monitor": False, "report": False, "predict": False}
    arguments["eval_micro_batch_size"] = None  # two training steps are what is predicted
    assumptions = []
    optimizer = arguments["optimizer"]
    if isinstance(optimizer, str) and optimizer.startswith(_PAGED):
        arguments["optimizer"] = optimizer.removeprefix(_PAGED)
        assumptions.append(
            "The paged state of the optimizer stays on the device: CUDA moves it only when memory "
            "is short."
        )
    if arguments["accumulate_grad_batches"] is not None:
        arguments["accumulate_grad_batches"] = min(arguments["accumulate_grad_batches"], 2)
    return arguments, assumptions


def _first_micro_batches(batch: Any, arguments: Mapping[str, Any]) -> tuple[Any, int]:
    size = arguments["micro_batch_size"]
    # A function of the user's splits what is not made of samples.
    if not isinstance(size, int) or arguments["split_batch"] is not None:
        return batch, 0
    shared = find_shared_leaves(batch)[0]
    if count_samples(batch, shared) <= MAX_MICRO_BATCHES * size:
        return batch, 0
    first = split_samples(batch, MAX_MICRO_BATCHES * size, shared)[0]
    return first, _num_bytes(batch) - _num_bytes(first)


def _num_bytes(batch: Any) -> int:
    storages = {s._cdata: s for tensor in tensors_in(batch) for s in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def _shown_name(pl_module: Any) -> str:
    inner = getattr(pl_module, "wrapped", None)
    return type(pl_module if inner is None else inner).__name__
