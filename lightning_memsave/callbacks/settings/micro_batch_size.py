"""Training batches in micro-batches, in a Trainer."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

from lightning_memsave.callbacks.settings.micro_batches import (
    PROBED_STEPS,
    BatchProbe,
    PlannedRoom,
    batch_norm_problems,
    describe_failed_rank,
    describe_failed_step,
    describe_failed_window,
    find_conflicts,
    has_batch_norm,
    part_passer,
    read_micro_batching,
    refusal_of,
    warn_of_batch_norm,
    warn_of_retry,
)
from lightning_memsave.callbacks.settings.setting import (
    Arguments,
    ModuleSetting,
    Setting,
    exactness_limit,
)
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.nested import find_shared_leaves, leaves_of
from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.errors import (
    IncompatibleError,
    MemoryExhaustedError,
    Problem,
)
from lightning_memsave.measure.peak import PeakMemory
from lightning_memsave.techniques.micro_batching.in_blocks import BlockMicroBatching
from lightning_memsave.techniques.micro_batching.loss_proof import LossCheck, Proof, prove
from lightning_memsave.techniques.micro_batching.loss_weights import Weighting
from lightning_memsave.techniques.micro_batching.runner import (
    MicroBatchRunner,
    Splitting,
    samples_of,
)
from lightning_memsave.techniques.micro_batching.technique import (
    MicroBatching,
    check_repeatable,
)
from lightning_memsave.techniques.micro_batching.training_state import KnownChanges
from lightning_memsave.techniques.optimizer_step import allocate_state
from lightning_memsave.trainer.batch_parts import BatchParts
from lightning_memsave.trainer.distributed import (
    all_reduce_min,
    alone,
    average_gradients,
    broadcast_buffers,
    communicates_in_forward,
    has_static_graph,
)
from lightning_memsave.trainer.hooks import (
    GradientVersions,
    find_zero_grad_override,
    log_info,
)
from lightning_memsave.trainer.nested_fit import quiet
from lightning_memsave.trainer.trainer import is_strategy
from lightning_memsave.trainer.training_loop import pass_batches, phase_of, will_step


class MicroBatchSetting(Setting):
    """Training batches pass in micro-batches."""

    name = MicroBatching.argument
    kind = MicroBatching
    shown = "micro_batch_size"
    technique: MicroBatching | None

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.limit = exactness_limit(arguments)
        if self.technique is not None and arguments[self.name] == "auto":
            self.value = repr("auto")
        # Of blocks another setting has the row.
        self.is_asked &= not (self.technique is None and arguments[self.name] is not None)
        self.is_in_budget = arguments["budget"] is not None
        self.is_kept_whole = bool(self.off_reason) and self.is_in_budget
        """Batches are repeated when memory runs out, but not split."""
        if self.is_kept_whole:  # with another plan, which needs no smaller ones
            self.off_reason, self.technique = "", self.read()
            self.value = repr("auto")
        self.weights: ModuleSetting | None = None
        """If it is on, gradients of half-precision parameters are summed in float32."""
        self.size: int | None = None
        """The size that memory was enough for, if it had to shrink; kept in checkpoints."""
        self.is_planned = False
        """The size was planned, and memory did not run out."""
        self.relieve: Callable[[int], bool] | None = None
        """As of `MicroBatchRunner`."""
        self.stay_whole: Callable[[str], None] | None = None
        """Called with the reason where a loss cannot be split: changes the plan, or raises."""
        self.peak_bytes: int | None = None
        """What was planned or predicted for a step; a proof needs no more."""
        self.advise: Callable[[], str] | None = None
        """Gives a remedy where memory runs out; ``None`` for that of a run without a budget."""
        self.runner: MicroBatchRunner | None = None
        self._probe = BatchProbe()
        self._known: KnownChanges | None = None
        self._meets: str | None = None
        self.proof = Proof()
        """What is known of the loss since the first batch."""
        self._tie = ""

    def read(self) -> Any:
        """Read the size of micro-batches of batches, not of blocks."""
        return read_micro_batching(self.arguments)

    @property
    def is_passing(self) -> bool:
        """Whether batches pass here, in parts or not."""
        return self.technique is not None and bool(self._undo)

    @property
    def is_auto(self) -> bool:
        """Whether it yields to conflicts."""
        return self.technique is not None and self.technique.micro_batch_size == "halve"

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find what conflicts with it."""
        if self.technique is None:
            return []
        conflicts = find_conflicts(
            trainer, pl_module, self.technique, allows_half_precision=self._allows_half_precision
        )
        return conflicts + batch_norm_problems(pl_module, self.written, self.limit)

    def forget_relief(self) -> None:
        """Split batches that run out of memory, as without a plan."""
        self.relieve = self.stay_whole = self.peak_bytes = self.advise = None

    def plan(self, size: Any, needed: int | None = None) -> None:
        """Pass as many samples at once as a plan says, or fewer if fewer were needed with it."""
        self.size = min((n for n in (size, needed) if isinstance(n, int)), default=None)
        self.is_planned = self.size in (size, None)

    def change(self, trainer: Any, pl_module: Any, size: Any) -> None:
        """Do the same from now on, in a fit that is running."""
        self.plan(size)
        if self.runner is not None:
            self.runner.size = self.size
        self._show(trainer, pl_module)
        if self.size is not None:
            warn_of_batch_norm(trainer, pl_module, str(self.size))

    def savings(self, pl_module: Any) -> str:
        """Say what happens without it."""
        return "a batch that runs out of memory is not repeated in micro-batches"

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Run batches in micro-batches, or show why not."""
        if self.technique is None:
            self.show_off()
            return
        self._undo.append(
            pass_batches(
                trainer,
                functools.partial(self._pass_batch, trainer, pl_module),
                frees_gradients=not find_zero_grad_override(trainer, pl_module),
                before_step=functools.partial(self._before_step, trainer),
                on_out_of_memory=self._exhausted_in_step,
            )
        )
        self._undo.append(self._forget_runner)
        self.proof, self._tie = Proof(), ""
        self._show(trainer, pl_module)
        if not self.is_auto:
            warn_of_batch_norm(trainer, pl_module, self.value)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Find half-precision parameters of modules that are built after ``setup``."""
        if self.technique is None or not self._undo:
            return
        self._probe = BatchProbe()
        self.runner = self._make_runner(trainer, pl_module)
        problems = [] if self._allows_half_precision else self.technique.check_module(pl_module)
        problems += batch_norm_problems(pl_module, self.written, self.limit)
        if problems and self.is_asked:
            raise IncompatibleError(self.name, problems)
        if problems:
            self.yield_to(problems, trainer, pl_module)

    @property
    def _allows_half_precision(self) -> bool:
        weights = self.weights
        return weights is not None and weights.technique is not None and not weights.has_yielded

    def _make_runner(self, trainer: Any, pl_module: Any) -> MicroBatchRunner:
        assert self.technique is not None, "there is something to run"
        runner = self.technique.make_runner(functools.partial(self._agree, trainer))
        if self.is_auto:
            runner.size = None if self.is_kept_whole else self.size
        if self.is_kept_whole:
            runner.keep_whole()
        else:
            runner.require_proof()
        # The note below the error says what the other settings can still do.
        budget = '`budget="auto"`, ' if self.is_in_budget else ""
        runner.advice = f"Use {budget}shorter samples or a smaller model."
        runner.asks_together = trainer.world_size > 1
        runner.relieve = lambda number: self.relieve is not None and self.relieve(number)
        return runner

    def _forget_runner(self) -> None:
        # A callback that is not used can be pickled.
        self.runner, self.proof, self._known, self._meets = None, Proof(), None, None

    def prove_once(self, trainer: Any, pl_module: Any, parts: BatchParts) -> MicroBatchRunner:
        """Prove how losses are weighted, unless that is known or will not matter."""
        if self.runner is None:
            self.runner = self._make_runner(trainer, pl_module)
        is_open = self.runner.splitting is Splitting.UNPROVEN and not self.proof.reason
        if is_open and self._may_be_split(trainer, parts.batch):
            self._start_proof(trainer, pl_module, parts)
        return self.runner

    def _pass_batch(
        self, trainer: Any, pl_module: Any, batch: Any, parts: BatchParts, is_fresh: bool
    ) -> None:
        self.prove_once(trainer, pl_module, parts)
        if self.proof.reason and not self.is_kept_whole:
            parts(batch, 1.0, None)
        else:
            self._run(trainer, pl_module, batch, parts, is_fresh)

    def _run(
        self, trainer: Any, pl_module: Any, batch: Any, parts: BatchParts, is_fresh: bool
    ) -> None:
        runner = self.runner
        assert runner is not None, "batches pass with a runner"
        is_apart = self._is_apart(trainer)
        if is_apart:
            broadcast_buffers(trainer)
        if not self.is_auto:
            self._check_counts(trainer, pl_module, batch)
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
            fixes = () if self.advise is None else (self.advise(),)
            check_repeatable(pl_module, *fixes)
            if trainer.world_size > 1 and not is_apart:
                raise self._exhausted_after_probe(trainer, batch)
            if marks.have_changed():
                raise MemoryExhaustedError(describe_failed_window(self.advise))
            parts.forget()

        if runner.splitting is not Splitting.WHOLE and not self.proof.is_settled:
            runner.tell_apart = functools.partial(self._tell_apart, trainer, pl_module, parts)
        try:
            runner.run(
                batch,
                part_passer(trainer, parts, is_apart=is_apart),
                save_state=lambda: known.save(gradients, is_watched) if is_repeatable else None,
                forget=forget,
            )
        finally:
            runner.tell_apart = None
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
            self.size, self.is_planned = runner.size, False
            warn_of_retry(trainer, runner, self.name, self._weighted())
            warn_of_batch_norm(trainer, pl_module, str(self.size))
            self._show(trainer, pl_module)

    def _before_step(self, trainer: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._probe.allocates(phase_of(trainer)):
            allocate_state(optimizer)

    # Other processes repeat a batch together with this one, which DDP cannot do: they go without
    # it until two optimizer steps have shown that memory is enough.
    def _is_apart(self, trainer: Any) -> bool:
        if not self.is_auto or trainer.world_size == 1:
            return False
        # A static graph is that of DDP's first pass, and cannot skip sharing in some parts.
        return self._probe.num_steps < PROBED_STEPS or has_static_graph(trainer)

    def _agree(self, trainer: Any, size: int) -> int:
        return all_reduce_min(trainer, size) if self._is_apart(trainer) else size

    def _exhausted_after_probe(self, trainer: Any, batch: Any) -> MemoryExhaustedError:
        assert self.runner is not None, "batches pass with a runner"
        before = samples_of(batch, self.runner.whole) and self.runner.size_of(batch)
        where = f"on rank {trainer.global_rank}, after {self._probe.num_steps} optimizer steps"
        return MemoryExhaustedError(describe_failed_rank(before, where, self.advise))

    def _exhausted_in_step(
        self, optimizer: torch.optim.Optimizer, error: BaseException
    ) -> BaseException:
        message = describe_failed_step(optimizer, error, self.advise)
        return MemoryExhaustedError(message, "optimizer")

    def _may_be_split(self, trainer: Any, batch: Any) -> bool:
        """Say whether any process has a batch for which the weights will matter."""
        assert self.runner is not None, "batches pass with a runner"
        num_samples = samples_of(batch, find_shared_leaves(batch)[0])
        size = self.runner.size
        is_large = self.is_auto or num_samples is None or (size or 0) < num_samples
        return all_reduce_min(trainer, int(not is_large)) == 0

    def _start_proof(self, trainer: Any, pl_module: Any, parts: BatchParts) -> None:
        """Prove how the losses of micro-batches are weighted, or yield."""
        runner, batch = self.runner, parts.batch
        assert runner is not None, "batches pass with a runner"
        tensors = [*pl_module.parameters(), *(leaf for _, leaf in leaves_of(batch))]
        if any(map(is_fake, tensors)):  # for a prediction
            equal = Weighting("weighted equally", lambda part: 1.0)
            runner.use([equal], find_shared_leaves(batch)[0])
            return
        proof = self.prove(trainer, pl_module, parts, None)
        if proof.reason and not self.is_auto:
            raise IncompatibleError(self.name, [refusal_of(self.written, proof)])
        if proof.reason and self.stay_whole is not None:
            self.proof = proof
            self.stay_whole(proof.reason)
            self.size, self.is_kept_whole = None, True
            self.runner = self._make_runner(trainer, pl_module)
            self._show(trainer, pl_module)
        elif proof.reason:
            self.proof = proof
            self.show("off", proof.reason, proof.fix.partition(", or set ")[0])
        elif proof.weightings:
            self.proof = proof
            runner.use(proof.weightings, proof.whole)
            self._show(trainer, pl_module)
        else:
            return
        self._log_row(trainer)

    def _log_row(self, trainer: Any) -> None:
        row = self.rows[0]
        log_info(trainer, f"{row.name}={row.value}: {row.status}. {'; '.join(row.details)}.")

    def _tell_apart(
        self, trainer: Any, pl_module: Any, parts: BatchParts, batch: Any, differ: bool
    ) -> bool:
        """Prove again, with a batch whose micro-batches get other weights."""
        if all_reduce_min(trainer, int(not differ)):
            return True
        proof = self.settle(trainer, pl_module, parts)
        if proof.reason:
            problem = refusal_of(self.written, proof)
            if self.is_auto:
                raise MemoryExhaustedError(f"A whole batch was too large, and {problem}")
            raise IncompatibleError(self.name, [problem])
        return bool(proof.weightings)

    def settle(self, trainer: Any, pl_module: Any, parts: BatchParts) -> Proof:
        """Keep the weightings that a further batch allows, to which they give other weights."""
        proof = self.prove(trainer, pl_module, parts, self.proof)
        if proof.weightings:
            assert self.runner is not None, "the first proof has made it"
            self.proof = proof
            self.runner.use(proof.weightings, self.runner.whole)
            others = [w.text for w in proof.weightings[1:]]
            self._tie = (
                f"its samples cannot tell this from losses that are {others[0]}" if others else ""
            )
            self._show(trainer, pl_module)
        return proof

    def prove(self, trainer: Any, pl_module: Any, parts: BatchParts, known: Proof | None) -> Proof:
        """Find the weightings of the loss of a batch, among those that are known."""
        assert self.technique is not None, "there is something to run"
        # The workspace of cuBLAS stays, and the proof's blocks go again: among blocks of the proof,
        # no prediction could know where what comes next would lie.
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.current_blas_handle()
        is_sharded = is_strategy(trainer, "FSDPStrategy", "ModelParallelStrategy")
        with contextlib.ExitStack() as stack:
            if not is_sharded:
                stack.enter_context(alone(trainer))
            if trainer.world_size == 1:
                stack.enter_context(quiet())
            room = None
            if self.peak_bytes is not None:
                peak = PeakMemory(pl_module, trainer.optimizers, trainer.strategy.root_device)
                room = PlannedRoom(peak, self.peak_bytes)
            check = LossCheck(
                *(parts.compute_loss, parts.batch, pl_module),
                loss_weight=self.technique.loss_weight,
                split_batch=self.technique.split_batch,
                known=known,
                needs_split=not self.is_auto or (self.is_planned and self.size is not None),
                room=room,
            )
            proof = prove(check, functools.partial(all_reduce_min, trainer))
        torch.cuda.empty_cache()
        return proof

    def _weighted(self) -> str:
        return self.proof.weightings[0].text if self.proof.weightings else ""

    def _check_counts(self, trainer: Any, pl_module: Any, batch: Any) -> None:
        assert self.runner is not None, "batches pass with a runner"
        if self._meets is None:  # once: it visits every module
            self._meets = communicates_in_forward(trainer, pl_module)
        if not self._meets:
            return
        num_parts = len(self.runner.split(batch)[0])
        if -all_reduce_min(trainer, -num_parts) != all_reduce_min(trainer, num_parts):
            raise IncompatibleError(
                self.name,
                [
                    Problem(
                        self.written,
                        f"{self._meets}, and batches of different lengths came, of which some have "
                        "more parts than others",
                        "Use `drop_last=True` in the DataLoader.",
                    )
                ],
            )

    def _show(self, trainer: Any, pl_module: Any) -> None:
        if self.is_auto and self.runner is not None and self.runner.failure:
            why = f"a batch that runs out of memory is not repeated: {self.runner.failure}"
            self.show("off", why)
            return
        if self.is_kept_whole:
            how = "whole batches; repeated with a smaller plan when memory runs out"
            self.show("on", how, self.proof.reason, exactness="bitwise")
            return
        details = ["batches pass in micro-batches of this size"]
        if self.is_auto:
            why = "planned" if self.is_planned else "memory ran out with more"
            details = [
                "whole batches; halved when memory runs out"
                if self.size is None
                else f"in micro-batches of {self.size} samples, as {why}"
            ]
        details.append(
            f"losses of micro-batches are {self._weighted()}, proven with "
            f"{self.proof.num_samples} samples of a batch in {self.proof.seconds * 1000:.0f} ms"
            if self.proof.weightings
            else "how their losses are weighted is proven before the first batch is split"
        )
        details.append(self._tie)
        if self.is_auto and trainer.world_size > 1:
            details.append("gradients are shared after backward in the first two steps")
        # More than two processes can sum in an order that is not DDP's.
        is_bitwise = self.is_auto and self.size is None and trainer.world_size <= 2
        in_parts = "approximate" if has_batch_norm(pl_module) else "rounding"
        self.show("on", *details, exactness="bitwise" if is_bitwise else in_parts)


class BlockMicroBatchSetting(ModuleSetting):
    """Samples pass a block in micro-batches."""

    name = BlockMicroBatching.argument
    kind = BlockMicroBatching
    is_for_evaluation = True

    def read(self) -> Any:
        """Read micro-batches of blocks, with the blocks that the user named."""
        technique = BlockMicroBatching.from_value(self.arguments[self.name])
        if technique is not None and technique.blocks is None:
            technique = dataclasses.replace(technique, blocks=self.arguments["blocks"])
        return technique

    def show_off(self) -> None:
        """Leave the row to the setting of batches."""
        self.rows = []
