"""Pass a training batch through the stages of a pipeline, in micro-batches."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleLoopedBFS,
)

from lightning_memsave.core.nested import find_shared_leaves, leaves_of, split_samples, sum_in_order
from lightning_memsave.core.saved_state import RandomState, devices_of
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.micro_batching.loss_observed import LossCheck, Proof
from lightning_memsave.techniques.micro_batching.loss_probe import SavesBeforeWrites
from lightning_memsave.techniques.micro_batching.loss_proof import prove
from lightning_memsave.techniques.micro_batching.module_state import ModuleState
from lightning_memsave.techniques.micro_batching.runner import MicroBatchRunner, samples_of
from lightning_memsave.trainer.distributed import all_reduce_min, sum_gradients
from lightning_memsave.trainer.hooks import find_zero_grad_override
from lightning_memsave.trainer.logged_values import combined
from lightning_memsave.trainer.pipeline_chain import OWNER, Chain, Until
from lightning_memsave.trainer.pipeline_state import StageState
from lightning_memsave.trainer.tensor_parallel import draw_alike

SCHEDULES: Mapping[str, Any] = MappingProxyType({"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe})

Step = Callable[[Any], Any]
"""The module's training step, for a micro-batch."""


class Batches:
    """Runs training batches of one fit."""

    def __init__(self, strategy: Any, trainer: Any, chain: Chain, state: StageState) -> None:
        self._strategy, self._trainer, self._chain, self._state = strategy, trainer, chain, state
        self._module: nn.Module = strategy.lightning_module
        self._runner = MicroBatchRunner(1, strategy.loss_weight, None)
        self._runner.require_proof()
        self._proof = Proof()
        self._dtypes: tuple[torch.dtype, ...] = ()
        """Of what is received and sent, once the first batch was looked at."""
        self._form: Any = None
        """Of micro-batches: what their tensors look like, and the shape that comes to blocks."""
        self._schedule: tuple[Any, Any] = (None, None)
        self._stage = _Stage()

    def train(self, step: Step, batch: Any) -> Tensor:
        """Run forward and backward of a batch; backward of the loss adds the gradients."""
        seed = self._agree(batch)
        if not self._dtypes:
            self._look(step, batch)
        parts, weights, sizes = self._split(step, batch)
        shape = self._shape_of_hidden(step, parts[0])
        schedule = self._schedule_for(len(parts), shape)
        logs, losses = _Logs(self._module), list[Tensor]()

        def run_part(index: int, received: Tensor | None = None) -> Tensor:
            logs.start(weights[index], sizes[index])
            loss = self._run_part(step, parts[index], received, (seed, index, len(parts)), shape)
            if self._chain.is_last:
                loss = loss * weights[index]
                losses.append(loss.detach())
                loss = loss.float().reshape(())  # torch 2.10 looks at type and shape
            return loss

        with self._gradients_apart() as gradients, logs, _random_numbers(self._module):
            self._stage.run(schedule, len(parts), run_part)
            sum_gradients([p for p in self._state.outside if p.requires_grad], self._chain.device)
        loss = self._share(losses, logs)
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return _Loss.apply(anchor, loss, gradients)  # type: ignore[no-any-return, no-untyped-call]

    def _agree(self, batch: Any) -> int:
        """Check that all processes have the same batch; returns a seed that they share."""
        tensors = [t for _, t in leaves_of(batch) if isinstance(t, Tensor) and not t.is_complex()]
        sums = [t.sum(dtype=torch.float64) for t in tensors]
        sums += [t[:1].sum(dtype=torch.float64) for t in tensors if t.ndim]
        there = [one.to(self._chain.device) for one in sums]
        found = repr(torch.stack(there).tolist() if there else [])  # with NaN, which equals nothing
        with _random_numbers(self._module):
            drawn = int(torch.randint(2**48, ()))
        box: list[Any] = [None] * self._chain.size
        dist.all_gather_object(box, (found, drawn))
        if len({one for one, _ in box}) > 1:
            why = "each process has another one, and all stages need the same"
            fix = "Let the DataLoader give the same on all processes: no sampler by rank or seed."
            raise IncompatibleError(OWNER, [Problem("the batch", why, fix)])
        if len({own for _, own in box}) > 1:  # hooks of one process have drawn some
            draw_alike(self._chain.device, dist.group.WORLD)
        # Steps that draw none leave the state as it is.
        number: int = self._trainer.fit_loop.total_batch_idx
        return int(box[0][1]) + 2**20 * number

    # The step ends at the same place on all processes: none waits for another one.
    def _look(self, step: Step, batch: Any) -> None:
        """Find out, with a few samples, what passes from block to block, and refuse the rest."""
        whole = find_shared_leaves(batch)[0]
        number, wanted = samples_of(batch, whole), self._strategy.num_micro_batches
        if number is None and wanted > 1:
            why = "its tensors and lists have different numbers of samples"
            fix = "Use `num_micro_batches=1`, or give all of them one number."
            raise IncompatibleError(OWNER, [Problem("the batch", why, fix)])
        part = batch if number is None else split_samples(batch, max(number // wanted, 1), whole)[0]
        state = ModuleState(self._module, batch)
        try:
            with torch.no_grad(), SavesBeforeWrites(state), _Logs(self._module) as logs:
                loss = _loss_in(self._chain.run_checked(lambda: step(part)))
        finally:
            state.restore()
        self._require_one_loss(loss)
        if metrics := logs.metrics:
            why = "each micro-batch updates it, on the last process only"
            fix = "Log its value: `self.log(name, self.metric(...))`, which is a tensor."
            raise IncompatibleError(OWNER, [Problem(f"`self.log({metrics[0]!r}, ...)`", why, fix)])
        self._dtypes = self._chain.dtype_received, self._chain.dtype_sent

    # Blocks may leave something in their attributes, such as a loss of their own.
    def _require_one_loss(self, loss: Tensor | None) -> None:
        box: list[Any] = [None] * self._chain.size
        dist.all_gather_object(box, None if loss is None else loss.item())
        if loss is None or any(abs(one - box[0]) > 1e-5 * abs(box[0]) for one in box):
            why = f"processes that got the same from the last block have other ones: {box}"
            fix = "Compute it from the result of the last block alone."
            raise IncompatibleError(OWNER, [Problem("the loss", why, fix)])

    def _split(self, step: Step, batch: Any) -> tuple[list[Any], list[float], list[int | None]]:
        wanted, runner = self._strategy.num_micro_batches, self._runner
        number = samples_of(batch, runner.whole)
        if wanted == 1 or number is None:
            return [batch], [1.0], [None]
        if not runner.weightings:
            self._prove(step, batch, None)
        if not self._proof.is_settled:
            runner.tell_apart = functools.partial(self._tell_apart, step)
        runner.size = number // max(n for n in range(1, wanted + 1) if number % n == 0)
        try:
            return runner.split(batch)
        finally:
            runner.tell_apart = None

    def _prove(self, step: Step, batch: Any, known: Proof | None) -> Proof:
        """Find the weights of micro-batches, on all processes alike."""

        def loss_of(part: Any) -> Tensor | None:
            with _Logs(self._module):
                return _loss_in(self._chain.run(lambda: step(part), Until.END))

        check = LossCheck(
            *(loss_of, batch, self._module),
            loss_weight=self._strategy.loss_weight,
            known=known,
            needs_split=True,
        )
        proof = prove(check, functools.partial(all_reduce_min, self._trainer))
        if proof.reason:
            fix = (
                "Pass `PipelineStrategy(loss_weight=...)`, a function of a micro-batch that gives "
                "what its loss is divided by, or `num_micro_batches=1`."
            )
            problem = Problem("the loss", proof.reason, proof.fix or fix)
            raise IncompatibleError(OWNER, [problem])
        if proof.weightings:
            self._proof = proof
            self._runner.use(proof.weightings, proof.whole)
        return proof

    def _tell_apart(self, step: Step, batch: Any, differ: bool) -> bool:
        return not differ or bool(self._prove(step, batch, self._proof).weightings)

    def _shape_of_hidden(self, step: Step, part: Any) -> torch.Size:
        """Find the shape of what comes to the blocks, without running them."""
        tensors = [leaf for _, leaf in leaves_of(part) if isinstance(leaf, Tensor)]
        form = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._form is None or self._form[0] != form:
            with torch.no_grad(), _Logs(self._module), _random_numbers(self._module):
                hidden = self._chain.run(lambda: step(part), Until.FIRST_BLOCK)
            self._form = form, hidden.shape
        shape: torch.Size = self._form[1]
        return shape

    def _schedule_for(self, number: int, shape: torch.Size) -> Any:
        if self._schedule[0] != (number, shape):
            chain = self._chain
            like = functools.partial(torch.empty, device="meta", requires_grad=True)
            before, after = like(()), like(())
            if chain.rank:
                before = like(shape, dtype=self._dtypes[0])
            if not chain.is_last:
                after = like(shape, dtype=self._dtypes[1])
            stage = PipelineStage(
                *(self._stage, chain.rank, chain.size, chain.device),
                input_args=(before,) if chain.rank else (),
                output_args=(after,),
            )
            how: dict[str, Any] = {"loss_fn": _itself, "scale_grads": False}
            if number >= chain.size:
                made = SCHEDULES[self._strategy.schedule](stage, number, **how)
            else:  # GPipe, which torch 2.10 refuses for fewer micro-batches than stages
                made = ScheduleLoopedBFS([stage], number, **how)
            self._schedule = (number, shape), made
        return self._schedule[1]

    def _run_part(
        self,
        step: Step,
        part: Any,
        received: Tensor | None,
        numbers: tuple[int, int, int],
        shape: torch.Size,
    ) -> Tensor:
        """Run the module's step up to the end of the stage, or to the loss."""
        chain, (seed, index, number) = self._chain, numbers
        _seed(seed + index)  # what the step draws before the blocks is the same on all stages
        own = functools.partial(torch.manual_seed, seed + index + number * (chain.rank + 1))
        received = None if received is None else received.clone()  # blocks may write to their input
        found = chain.run(lambda: step(part), Until.OWN_BLOCKS, received, own)
        if chain.is_last:
            loss = _loss_in(found)
            if loss is None:
                why = "it returned no loss, and other processes wait for its gradients"
                problem = Problem("`training_step`", why, "Return a loss for every batch.")
                raise IncompatibleError(OWNER, [problem])
            return loss
        hidden: Tensor = found.contiguous()
        if hidden.shape != shape or hidden.dtype != self._dtypes[1]:
            why = f"between blocks it has shape {tuple(hidden.shape)} and {hidden.dtype}, and not "
            why += f"{tuple(shape)} and {self._dtypes[1]} as in the first micro-batch"
            fix = "Give micro-batches of a batch one shape."
            raise IncompatibleError(OWNER, [Problem("the batch", why, fix)])
        # The next stage sends a gradient in any case.
        return hidden if hidden.requires_grad else hidden.detach().requires_grad_()

    @contextlib.contextmanager
    def _gradients_apart(self) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
        """Collect the gradients of a batch in a list: Lightning zeroes them before backward."""
        params = [p for p in self._module.parameters() if self._state.is_here(p)]
        trainer, found = self._trainer, list[tuple[nn.Parameter, Tensor]]()
        is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        is_zeroed = is_first and not find_zero_grad_override(trainer, self._module)
        before = [(p, None if is_zeroed else p.grad) for p in params]
        for param in params:
            param.grad = None
        try:
            yield found
            found += [(p, p.grad) for p in params if p.grad is not None]
        finally:
            for param, grad in before:
                param.grad = grad

    def _share(self, losses: list[Tensor], logs: "_Logs") -> Tensor:
        """Give all processes the loss and what the last one has logged."""
        box: list[Any] = [None]
        if self._chain.is_last:
            box = [(sum_in_order(losses).cpu(), logs.calls())]
        dist.broadcast_object_list(box, self._chain.size - 1)
        loss, calls = box[0]
        log: Any = self._module.log
        for name, value, args, kwargs in calls:
            log(name, value, *args, **kwargs)
        found: Tensor = loss.to(self._chain.device)
        return found


class _Stage(nn.Module):
    """What torch runs as a stage: part of the user's step."""

    def __init__(self) -> None:
        super().__init__()
        self._run_part: Callable[..., Tensor] | None = None
        self._error: Exception | None = None

    def run(self, schedule: Any, number: int, run_part: Callable[..., Tensor]) -> None:
        self._run_part, numbers = run_part, torch.arange(number)
        try:
            schedule.step(index=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            if self._error is None or error.__cause__ is not self._error:
                raise
            raise self._error from None  # torch's own says less
        finally:
            self._run_part = self._error = None

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        assert self._run_part is not None, "the schedule runs in `run`"
        try:
            return self._run_part(int(index), *received)
        except Exception as error:
            self._error = error
            raise


class _Loss(torch.autograd.Function):
    """The loss of a batch whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: Any) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, None]:
        factor = float(grad_output)  # as with `accumulate_grad_batches`
        gradients, ctx.gradients = ctx.gradients, ()
        for param, grad in gradients:
            if factor != 1:
                grad.mul_(factor)
            if param.grad is None:
                param.grad = grad
            else:
                param.grad += grad
        gradients.clear()
        return None, None, None


class _Logs:
    """Keeps what a module logs, for all micro-batches of a batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._noted: dict[tuple[str, int], list[Any]] = {}
        self._seen: dict[str, int] = {}
        self._weight = 1.0
        self._size: int | None = None
        self.metrics: list[str] = []
        """Names under which other things than values were logged."""

    def __enter__(self) -> "_Logs":
        self._own = {"log": vars(self._module)["log"]} if "log" in vars(self._module) else {}
        vars(self._module)["log"] = self._note
        return self

    def __exit__(self, *exc: object) -> None:
        del vars(self._module)["log"]
        vars(self._module).update(self._own)

    def start(self, weight: float, size: int | None) -> None:
        """Begin a micro-batch."""
        self._weight, self._size, self._seen = weight, size, {}

    def _note(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, nn.Module):
            self.metrics.append(name)
            return
        number = self._seen[name] = self._seen.get(name, -1) + 1
        value = torch.as_tensor(value).detach()
        noted = (self._weight, self._size, value, args, kwargs)
        self._noted.setdefault((name, number), []).append(noted)

    def calls(self) -> list[tuple[str, Tensor, Any, Any]]:
        """Give the arguments of one call for the whole batch in the place of each."""
        found = []
        for (name, _), noted in self._noted.items():
            weights, sizes, values, args, kwargs = zip(*noted, strict=True)
            value, settings = values[0], dict(kwargs[0])
            if len(noted) > 1:
                how = settings.get("reduce_fx", "mean")
                kind = how if isinstance(how, str) else getattr(how, "__name__", "")
                kinds = {f"is_{k}_reduction": kind == k for k in ("mean", "sum", "max")}
                value = combined(SimpleNamespace(**kinds), values, weights)
                given = [each.get("batch_size") for each in kwargs]
                if given == [*sizes] and None not in sizes:
                    settings["batch_size"] = sum(sizes)
            found.append((name, value.cpu(), args[0], settings))
        return found


def _loss_in(result: Any) -> Tensor | None:
    loss: Tensor | None = result.get("loss") if isinstance(result, Mapping) else result
    return loss


def _itself(loss: Tensor, _: Tensor) -> Tensor:
    return loss


@contextlib.contextmanager
def _random_numbers(module: nn.Module) -> Iterator[None]:
    """Restore the states of random numbers afterwards."""
    before = RandomState(devices_of(module))
    try:
        yield
    finally:
        before.restore()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
