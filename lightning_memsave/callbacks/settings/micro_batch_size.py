"""Training batches in micro-batches, in a Trainer."""

import functools
import sys
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, Literal, Protocol

import torch

from lightning_memsave.callbacks.settings.micro_batches import (
    PROBED_STEPS,
    BatchProbe,
    PlannedRoom,
    batch_norm_problems,
    failed_rank,
    failed_step,
    failed_window,
    part_passer,
    read_micro_batching,
    reasons_against,
    refusal_of,
    try_step,
    unnoticed,
    warn_of_batch_norm,
    warn_of_retry,
)
from lightning_memsave.callbacks.settings.setting import (
    Arguments,
    ModuleSetting,
    Setting,
    exactness_limit,
    warn,
)
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.nested import find_shared_leaves, leaves_of
from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.core.out_of_memory import find_out_of_memory
from lightning_memsave.errors import (
    IncompatibleError,
    MemoryExhaustedError,
    MemsaveWarning,
    Problem,
)
from lightning_memsave.measure.peak import PeakMemory
from lightning_memsave.techniques.micro_batching.in_blocks import BlockMicroBatching
from lightning_memsave.techniques.micro_batching.loss_observed import (
    LossCheck,
    Proof,
    runs_for_each,
)
from lightning_memsave.techniques.micro_batching.loss_proof import prove
from lightning_memsave.techniques.micro_batching.loss_weights import Weighting
from lightning_memsave.techniques.micro_batching.runner import (
    MicroBatchRunner,
    Splitting,
    samples_of,
)
from lightning_memsave.techniques.micro_batching.technique import (
    MicroBatching,
    batch_norms_of,
    check_repeatable,
)
from lightning_memsave.techniques.micro_batching.training_state import KnownChanges
from lightning_memsave.techniques.optimizer_step import allocate_state, around_step
from lightning_memsave.trainer.batch_parts import BatchParts
from lightning_memsave.trainer.distributed import (
    all_reduce_min,
    average_gradients,
    broadcast_buffers,
    communicates_in_forward,
    copies_gradients,
    gradient_bytes,
    has_static_graph,
)
from lightning_memsave.trainer.hooks import (
    GradientVersions,
    find_zero_grad_override,
    hooks_of_parts,
    log_info,
)
from lightning_memsave.trainer.training_loop import pass_batches, phase_of, will_step


class Splits(Enum):
    """When batches are split, where the size is not given."""

    ON_OOM = auto()  # when memory runs out, and from then on
    AS_PLANNED = auto()  # as the plan says, for which memory is enough so far
    NEVER = auto()  # they are repeated when memory runs out, with another plan


class Relief(Protocol):
    """What else than smaller micro-batches helps: other plans, or fewer blocks on the device."""

    # As of `MicroBatchRunner`.
    def relieve(self, trainer: Any, num_failures: int) -> bool: ...
    # For the state of an optimizer, when gradients are complete and nothing is updated.
    def make_room(self, trainer: Any) -> bool: ...
    # As a loss cannot be split; raises if no plan fits then.
    def stay_whole(self, trainer: Any, why: str) -> None: ...
    def advise(self) -> str: ...


class MicroBatchSetting(Setting):
    kind = MicroBatching
    shown = "micro_batch_size"
    technique: MicroBatching

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        # Of blocks another setting has the row.
        self.is_asked &= self.is_on or arguments[self.name] is None
        self.splits = Splits.ON_OOM
        if self.off_reason and arguments["budget"] is not None:
            self.splits = Splits.NEVER  # another plan needs no smaller ones
            self.off_reason, self.is_on, self.value = "", True, repr("halve")
        self.weights: ModuleSetting | None = None
        """If it is on, gradients of half-precision parameters are summed in float32."""
        self.size: int | None = None
        """The size that memory was enough for, if it had to shrink; kept in checkpoints."""
        self.relief: Relief | None = None
        self.peak_bytes: int | None = None
        """What was planned or predicted for a step; a proof needs no more."""
        self.runner: MicroBatchRunner | None = None
        self._probe = BatchProbe()
        self._known: KnownChanges | None = None
        self._meets: str | None = None
        self.proof = Proof()
        """What is known of the loss since the first batch."""
        self._proofs: dict[Any, Proof] = {}  # by the parts that batches have
        self._tie = ""

    def read(self) -> Any:
        return read_micro_batching(self.arguments)

    @property
    def is_passing(self) -> bool:
        """Whether batches pass here, in parts or not."""
        return self.is_on and bool(self._undo)

    @property
    def is_auto(self) -> bool:
        """Whether the size shrinks when memory runs out."""
        return self.is_on and self.technique.micro_batch_size == "halve"

    @property
    def _advice(self) -> str:
        return "" if self.relief is None else self.relief.advise()

    def conflicts(self, trainer: Any, pl_module: Any) -> Iterator[Problem]:
        yield from self._problems_of(pl_module)
        for reason in reasons_against(trainer, pl_module, is_auto=self.is_auto):
            yield Problem(self.written, *reason)

    def _problems_of(self, pl_module: Any) -> list[Problem]:
        weights, problems = self.weights, list[Problem]()
        if weights is None or not weights.is_on or weights.has_yielded:
            problems = self.technique.check_module(pl_module)
        limit = exactness_limit(self.arguments)
        return problems + batch_norm_problems(pl_module, self.written, limit)

    def expect_more(self) -> None:
        """Hold the next batches for unproven, as the first ones, as steps need more memory."""
        self._probe = BatchProbe()

    def forget_relief(self) -> None:
        self.relief = self.peak_bytes = None

    def plan(self, size: Any, needed: int | None = None) -> None:
        """Pass as many samples at once as a plan says, or fewer if fewer were needed with it."""
        self.size = min((n for n in (size, needed) if isinstance(n, int)), default=None)
        if self.splits is not Splits.NEVER:
            is_planned = self.size in (size, None)
            self.splits = Splits.AS_PLANNED if is_planned else Splits.ON_OOM

    def change(self, trainer: Any, pl_module: Any, size: Any) -> None:
        self.plan(size)
        if self.runner is not None:
            self.runner.size = self.size
        self._show_size(trainer, pl_module)

    def savings(self, pl_module: Any) -> str:
        return "a batch that runs out of memory is not repeated in micro-batches"

    def apply(self, trainer: Any, pl_module: Any) -> None:
        self._undo.append(
            pass_batches(
                trainer,
                functools.partial(self._pass_batch, trainer),
                frees_gradients=not find_zero_grad_override(trainer, pl_module),
                on_out_of_memory=lambda *failure: failed_step(self._advice, *failure),
            )
        )
        self._undo.append(self._forget_runner)
        self.proof, self._tie, self._proofs = Proof(), "", {}
        self._show_size(trainer, pl_module)
        if not self.is_auto:
            warn_of_batch_norm(trainer, pl_module, self.written, "micro-batch alone")

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Find half-precision parameters of modules that are built after ``setup``."""
        self._probe = BatchProbe()
        # After hooks, which would find the state; without memory for it nothing is updated yet.
        before = functools.partial(self._allocate_state, trainer)
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._undo += around_step(optimizer, before, is_first=True)
        self.runner = self._make_runner(trainer)
        problems = self._problems_of(pl_module)
        if problems and self.is_asked:
            raise IncompatibleError(self.name, problems)
        if problems:
            self.yield_to(problems, trainer, pl_module)

    def _make_runner(self, trainer: Any) -> MicroBatchRunner:
        runner = self.technique.make_runner(functools.partial(self._agree, trainer))
        if self.splits is Splits.NEVER:
            runner.keep_whole()
        else:
            runner.size = self.size if self.is_auto else runner.size
            runner.require_proof()
        # The note below the error says what the other settings can still do.
        budget = '`budget="free"`, ' if self.arguments["budget"] is not None else ""
        runner.advice = f"Use {budget}shorter samples or a smaller model."
        runner.asks_together = trainer.world_size > 1
        return runner

    def _forget_runner(self) -> None:
        # A callback that is not used can be pickled.
        self.runner, self.proof, self._known, self._meets = None, Proof(), None, None
        self._proofs = {}

    def prove_once(self, trainer: Any, parts: BatchParts) -> MicroBatchRunner:
        """Prove how losses are weighted, unless that is known or will not matter."""
        runner = self.runner = self.runner or self._make_runner(trainer)
        # Other processes may have all parts: a batch without one passes whole there.
        if trainer.world_size == 1 and runner.meet(parts.batch):
            self.proof = self._proofs.get(runner.parts, Proof())
        is_open = runner.splitting is Splitting.UNPROVEN and not self.proof.reason
        if is_open and self._may_be_split(trainer, runner, parts.batch):
            self._start_proof(trainer, parts, runner)
        return self.runner

    def _pass_batch(self, trainer: Any, batch: Any, parts: BatchParts, is_fresh: bool) -> None:
        runner = self.prove_once(trainer, parts)
        if self.proof.reason and self.splits is not Splits.NEVER:
            parts(batch, 1.0, None)
        else:
            self._run(trainer, batch, parts, is_fresh, runner)

    def _run(
        self, trainer: Any, batch: Any, parts: BatchParts, is_fresh: bool, runner: MicroBatchRunner
    ) -> None:
        pl_module = trainer.lightning_module
        is_apart = self._is_apart(trainer)
        if is_apart:
            broadcast_buffers(trainer)
        if not self.is_auto:
            self._check_counts(trainer, batch, runner)
        is_open = self._probe.is_open(batch, is_fresh)
        is_watched = self._probe.is_first_of(phase_of(trainer)) or is_open
        # DDP itself cannot repeat a batch.
        is_repeatable = self.is_auto and (is_apart or trainer.world_size == 1)
        gradients: Literal["drop", "keep", "leave"] = "drop"
        if not is_fresh:
            gradients = "keep" if is_open else "leave"
        has_marks = is_repeatable and gradients == "leave"
        marks = GradientVersions(parameters_of(trainer.optimizers[0]) if has_marks else ())
        known = self._known = self._known or KnownChanges(pl_module)

        def forget() -> None:
            check_repeatable(pl_module, *filter(None, [self._advice]))
            if trainer.world_size > 1 and not is_apart:
                before = samples_of(batch, runner.whole) and runner.size_of(batch)
                steps = f"after {self._probe.num_steps} optimizer steps"
                raise failed_rank(before, f"on rank {trainer.global_rank}, {steps}", self._advice)
            if marks.have_changed():
                raise failed_window(self._advice)
            parts.forget()

        def relieve(num_failures: int) -> bool:
            found = self.relief is not None and self.relief.relieve(trainer, num_failures)
            marks.renew()  # gradients may have moved
            return found

        runner.relieve = relieve
        if runner.splitting is not Splitting.WHOLE and not self.proof.is_settled:
            runner.tell_apart = functools.partial(self._tell_apart, trainer, parts)
        try:
            runner.run(
                batch,
                part_passer(trainer, parts, is_apart=is_apart),
                save_state=lambda: known.save(gradients, is_watched) if is_repeatable else None,
                forget=forget,
            )
        finally:
            runner.tell_apart = runner.relieve = None
        if is_apart and will_step(trainer):
            average_gradients(trainer, pl_module)
        runner.record(known.learn)
        self._probe.passed(batch, is_fresh, will_step(trainer))
        self._show_change(trainer, pl_module, runner)

    def _show_change(self, trainer: Any, pl_module: Any, runner: MicroBatchRunner) -> None:
        if runner.failure and self.rows[0].status == "on":
            self._show(trainer, pl_module)
            self._log_row(trainer)
        if self.is_auto and runner.size != self.size:
            self.size, self.splits = runner.size, Splits.ON_OOM
            warn_of_retry(trainer, runner, self._weighted())
            self._show_size(trainer, pl_module)

    def _allocate_state(self, trainer: Any, optimizer: torch.optim.Optimizer) -> None:
        if not self._probe.allocates(phase_of(trainer)):
            return
        outside, relief = sys.exception(), self.relief
        while relief is not None:
            try:
                allocate_state(optimizer)
                try_step(optimizer)
                return
            except Exception as error:
                if find_out_of_memory(error, outside) is None:
                    raise
            # Outside of the except block, whose traceback would keep tensors alive.
            if not relief.make_room(trainer):
                break
        allocate_state(optimizer)

    # Other processes repeat a batch together with this one, which DDP cannot do: they go without
    # it until two optimizer steps have shown that memory is enough.
    def _is_apart(self, trainer: Any) -> bool:
        if not self.is_auto or trainer.world_size == 1:
            return False
        # A static graph is that of DDP's first pass, and cannot skip sharing in some parts.
        return self._probe.num_steps < PROBED_STEPS or has_static_graph(trainer)

    def idle_bytes(self, trainer: Any) -> int:
        """Return the size of DDP's buckets where this batch passes without it."""
        if not (self.is_passing and self._is_apart(trainer) and copies_gradients(trainer)):
            return 0
        return sum(gradient_bytes(trainer.lightning_module).values())

    def _agree(self, trainer: Any, size: int) -> int:
        return all_reduce_min(trainer, size) if self._is_apart(trainer) else size

    def _may_be_split(self, trainer: Any, runner: MicroBatchRunner, batch: Any) -> bool:
        """Say whether any process has a batch for which the weights will matter."""
        num_samples = samples_of(batch, find_shared_leaves(batch)[0])
        is_large = self.is_auto or num_samples is None or (runner.size or 0) < num_samples
        return all_reduce_min(trainer, int(not is_large)) == 0

    def _start_proof(self, trainer: Any, parts: BatchParts, runner: MicroBatchRunner) -> None:
        pl_module = trainer.lightning_module
        tensors = [*pl_module.parameters(), *(leaf for _, leaf in leaves_of(parts.batch))]
        if any(map(is_fake, tensors)):  # for a prediction
            equal = Weighting("weighted equally", lambda part: 1.0)
            runner.use([equal], find_shared_leaves(parts.batch)[0])
            return
        proof = self.prove(trainer, parts, None)
        if proof.reason and not (self.is_auto or self._proofs):
            raise IncompatibleError(self.name, [refusal_of(self.written, proof)])
        if not (proof.reason or proof.weightings):
            return
        if self._proofs and proof.reason:
            some = f"A batch of which some parts are missing, or new, passes whole: {proof.reason}."
            warn(trainer, some, MemsaveWarning)
            self._proofs[runner.parts] = self.proof = proof
            return
        self._proofs[runner.parts] = self.proof = proof
        if not proof.reason:
            runner.use(proof.weightings, proof.whole)
        elif self.relief is None:
            self.show("off", proof.reason, proof.fix.partition(", or set ")[0])
        else:
            self.relief.stay_whole(trainer, proof.reason)
            self.size, self.splits = None, Splits.NEVER
            self.runner = self._make_runner(trainer)
        if not proof.reason or self.relief is not None:
            self._show(trainer, pl_module)
        self._log_row(trainer)

    def _log_row(self, trainer: Any) -> None:
        row = self.rows[0]
        log_info(trainer, f"{row.name}={row.value}: {row.status}. {'; '.join(row.details)}.")

    def _tell_apart(self, trainer: Any, parts: BatchParts, batch: Any, differ: bool) -> bool:
        """Prove again, with a batch whose micro-batches get other weights."""
        if all_reduce_min(trainer, int(not differ)):
            return True
        proof = self.settle_weightings(trainer, parts)
        if proof.reason:
            problem = refusal_of(self.written, proof)
            if self.is_auto:
                raise MemoryExhaustedError(f"A whole batch was too large, and {problem}")
            raise IncompatibleError(self.name, [problem])
        return bool(proof.weightings)

    def settle_weightings(self, trainer: Any, parts: BatchParts) -> Proof:
        """Keep the weightings that a further batch allows, to which they give other weights."""
        proof = self.prove(trainer, parts, self.proof)
        if proof.weightings:
            assert self.runner is not None, "the first proof has made it"
            self._proofs[self.runner.parts] = self.proof = proof
            self.runner.use(proof.weightings, self.runner.whole)
            others = [w.text for w in proof.weightings[1:]]
            tie = "its samples cannot tell this from losses that are"
            self._tie = f"{tie} {others[0]}" if others else ""
            self._show(trainer, trainer.lightning_module)
        return proof

    def prove(self, trainer: Any, parts: BatchParts, known: Proof | None) -> Proof:
        """Find the weightings of the loss of a batch, among those that are known."""
        pl_module = trainer.lightning_module
        if hooks := hooks_of_parts(trainer, pl_module):
            return runs_for_each(hooks)
        # The workspace of cuBLAS stays, and the proof's blocks go again: among blocks of the proof,
        # no prediction could know where what comes next would lie.
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.current_blas_handle()
        is_planned = self.splits is Splits.AS_PLANNED and self.size is not None
        room = None
        if self.peak_bytes is not None:
            peak = PeakMemory(pl_module, trainer.optimizers, trainer.strategy.root_device)
            room = PlannedRoom(peak, self.peak_bytes)
        check = LossCheck(
            *(parts.compute_loss, parts.batch, pl_module),
            loss_weight=self.technique.loss_weight,
            split_batch=self.technique.split_batch,
            known=known,
            needs_split=not self.is_auto or is_planned,
            room=room,
            compute_next=parts.compute_next,
            optimizers=trainer.optimizers,
        )
        with unnoticed(trainer):
            proof = prove(check, functools.partial(all_reduce_min, trainer))
        torch.cuda.empty_cache()
        return proof

    def _weighted(self) -> str:
        return self.proof.weightings[0].text if self.proof.weightings else ""

    def _check_counts(self, trainer: Any, batch: Any, runner: MicroBatchRunner) -> None:
        if self._meets is None:  # once: it visits every module
            self._meets = communicates_in_forward(trainer, trainer.lightning_module)
        if not self._meets:
            return
        num_parts = len(runner.split(batch)[0])
        if -all_reduce_min(trainer, -num_parts) != all_reduce_min(trainer, num_parts):
            why = (
                f"{self._meets}, and batches of different lengths came, of which some have more "
                "parts than others"
            )
            problem = Problem(self.written, why, "Use `drop_last=True` in the DataLoader.")
            raise IncompatibleError(self.name, [problem])

    def _show_size(self, trainer: Any, pl_module: Any) -> None:
        self._show(trainer, pl_module)
        if self.size is not None:
            written = f"`{self.name}={self.size}`"
            warn_of_batch_norm(trainer, pl_module, written, "micro-batch alone")

    def _show(self, trainer: Any, pl_module: Any) -> None:
        failure = self.runner.failure if self.is_auto and self.runner is not None else ""
        if failure:
            self.show("off", f"a batch that runs out of memory is not repeated: {failure}")
            return
        if self.splits is Splits.NEVER:
            how = "whole batches; repeated with less on the device when memory runs out"
            self.show("on", how, self.proof.reason, exactness="bitwise")
            return
        how = "batches pass in micro-batches of this size"
        if self.is_auto and self.size is None:
            how = "whole batches; halved when memory runs out"
        elif self.is_auto:
            is_planned = self.splits is Splits.AS_PLANNED
            why = "planned" if is_planned else "memory ran out with more"
            how = f"in micro-batches of {self.size} samples, as {why}"
        weighted = "how their losses are weighted is proven before the first batch is split"
        if self.proof.weightings:
            num_samples, milliseconds = self.proof.num_samples, self.proof.seconds * 1000
            proven = f"proven with {num_samples} samples of a batch in {milliseconds:.0f} ms"
            weighted = f"losses of micro-batches are {self._weighted()}, {proven}"
        details = [how, weighted, self._tie]
        if self.is_auto and trainer.world_size > 1:
            details.append("gradients are shared after backward in the first two steps")
        # More than two processes can sum in an order that is not DDP's.
        is_bitwise = self.is_auto and self.size is None and trainer.world_size <= 2
        in_parts = "approximate" if batch_norms_of(pl_module) else "rounding"
        self.show("on", *details, exactness="bitwise" if is_bitwise else in_parts)


class BlockMicroBatchSetting(ModuleSetting):
    kind = BlockMicroBatching
    is_for_evaluation = True

    def stay_off(self, trainer: Any, pl_module: Any) -> None:
        """Leave the row to the setting of batches."""
