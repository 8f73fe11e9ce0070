"""Split batches into micro-batches that fit, with the gradient of the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn

from lightning_memsave.core.blocks import BlockSelector, as_selectors
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.names import did_you_mean
from lightning_memsave.core.nested import sum_in_order
from lightning_memsave.core.saved_state import with_attribute
from lightning_memsave.core.technique import Exactness, Handle, Technique
from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    MemoryExhaustedError,
    Problem,
)
from lightning_memsave.techniques.micro_batching.loss_observed import LossCheck, Proof
from lightning_memsave.techniques.micro_batching.loss_proof import prove
from lightning_memsave.techniques.micro_batching.loss_weights import NAMES, LossWeight, Weighting
from lightning_memsave.techniques.micro_batching.runner import MicroBatchRunner
from lightning_memsave.techniques.micro_batching.training_state import TrainingState
from lightning_memsave.techniques.optimizer_step import all_in_backward, in_backward_of

Step: TypeAlias = Callable[[Any], Tensor]
"""Function of a batch that returns its loss, a mean over samples or tokens."""

BATCH_STATISTICS = "batch normalisation computes its statistics from each micro-batch alone"
"""Why micro-batches are approximate in a network with batch normalisation."""
_OF = ("batches", "blocks")
_HALF = (torch.float16, torch.bfloat16)
_FIX = (
    "Pass `loss_weight=`, a function of a micro-batch that gives what its loss is divided by; or "
    "use smaller batches, and several of them for each step of the optimizer."
)


@dataclass(frozen=True, repr=False)
class MicroBatching(Technique[Step]):
    """Split each batch into micro-batches whose gradients sum to the gradient of the batch.

    Activations exist for one micro-batch at a time. The number of optimizer steps and their
    gradients are unchanged. With ``"halve"`` the whole batch is tried first; when memory runs out,
    the same batch is repeated with half the size, and that size is kept.

    Args:
        micro_batch_size: Samples per micro-batch, or ``"halve"``.
        of: What is split: ``"batches"`` before they come to the model, or ``"blocks"``, in which
            the batch passes a few samples at a time, as with `BlockMicroBatching`.
        blocks: The repeated blocks, for ``of="blocks"``; ``None`` finds them.
        loss_weight: Weight of a micro-batch's loss, by the elements that the loss is a mean over:
            ``"samples"``; ``"tokens"``, labels other than -100; ``"tokens_shifted"``, the same
            without the first of each sequence, as in causal language models; or a function of a
            micro-batch. ``"proven"`` finds and proves it with the first batch that is split.
        split_batch: A function of batch and size that returns a list of batches, for batches that
            `split_samples` cannot split.
        evaluation: Whether validation, test and prediction of a Trainer pass in such micro-batches
            too. ``None``: in one process, where a few samples prove that it only rounds; other
            steps stay whole. True: also in several processes, whose steps must not communicate, and
            steps that cannot be split are refused. False: never.
        module: The model, whose gradients, buffers and metrics are restored before a batch is
            repeated, and after the loss has been tested with some samples. Required for ``"halve"``
            and ``loss_weight="proven"``, and together with `OptimizerInBackward` if a process
            trains several models at once. Without it `loss_weight` is not tested.

    Raises:
        ConfigurationError: If an argument is invalid.

    Note:
        Exactness is *rounding*: with dropout, other masks are drawn than for the whole batch; with
        batch normalisation *approximate*, as statistics are computed per micro-batch. A loss that
        is neither a weighted mean nor a sum, such as a contrastive loss, is refused.
        Parameters in half precision are refused: their gradients would be summed in half precision.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> technique = MicroBatching(2, module=model)
        >>> step = technique.apply(lambda batch: model(batch).square().mean()).target
        >>> batch = torch.ones(5, 3)
        >>> loss = step(batch)  # forward and backward
        >>> bool(torch.isclose(loss, model(batch).square().mean()))
        True

    References:
        Huang et al. (2019), GPipe, arXiv:1811.06965, for the term; BlackHC's toma for the retry.
    """

    name: ClassVar[str] = "micro_batching"
    argument: ClassVar[str] = "micro_batch_size"
    examples: ClassVar[str] = ""
    exactness: ClassVar[Exactness] = Exactness.ROUNDING

    micro_batch_size: int | Literal["halve"] = "halve"
    _: KW_ONLY
    of: Literal["batches", "blocks"] = "batches"
    blocks: BlockSelector | Sequence[BlockSelector] | None = None
    loss_weight: LossWeight = "proven"
    split_batch: Callable[[Any, int], Sequence[Any]] | None = None
    evaluation: bool | None = None
    module: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = self.micro_batch_size
        if size != "halve" and (type(size) is not int or size < 1):
            raise ConfigurationError(
                f"`micro_batch_size={size!r}` is not a batch size: it must be at least 1. Use "
                '`micro_batch_size=1` for the least memory, or `"halve"` to start with the full '
                "batch and shrink when memory runs out."
            )
        if not callable(self.loss_weight) and self.loss_weight not in NAMES:
            raise ConfigurationError(
                f"`loss_weight={self.loss_weight!r}` is not a valid weight of losses. "
                f"Use one of {', '.join(map(repr, NAMES))}, or a function of a micro-batch."
            )
        if self.split_batch is not None and not callable(self.split_batch):
            raise ConfigurationError(
                f"`split_batch={self.split_batch!r}` is not a function. Pass a function of batch "
                "and size that returns a list of batches."
            )
        if self.of not in _OF:
            raise ConfigurationError(
                f"`of={self.of!r}` is not a valid value. {did_you_mean(str(self.of), _OF)}Use "
                '`of="batches"` or `of="blocks"`.'
            )
        if self.evaluation is not None and not isinstance(self.evaluation, bool):
            raise ConfigurationError(
                f"`evaluation={self.evaluation!r}` is neither True, False nor `None`. Use "
                "`evaluation=False` to evaluate whole batches."
            )
        if problems := self._problems_of_blocks():
            raise ConfigurationError.from_problems(type(self).__name__, problems)
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_selectors(self.blocks))

    def _problems_of_blocks(self) -> list[Problem]:
        if self.of == "batches":
            why, fix = "batches are split before they come to the model", 'Write `of="blocks"` too.'
            unused = self.blocks is not None
            return [Problem(f"`blocks={self.blocks!r}`", why, fix)] if unused else []
        whys = {}
        if self.micro_batch_size == "halve":
            whys["micro_batch_size"] = "a block runs on a number of samples that does not change"
        if self.loss_weight != "proven":
            whys["loss_weight"] = "the loss is that of the whole batch"
        if self.split_batch is not None:
            whys["split_batch"] = (
                "the batch stays whole, and tensors in the arguments of blocks are split"
            )
        if self.evaluation is not None:
            whys["evaluation"] = "blocks run in the same way in evaluation"
        fixes = {"micro_batch_size": 'Write it, as in `MicroBatching(1, of="blocks")`.'}
        return [
            Problem(
                f'`{name}={getattr(self, name)!r}` with `of="blocks"`',
                why,
                fixes.get(name, "Remove it."),
            )
            for name, why in whys.items()
        ]

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Read a size; ``"auto"``, the value of all presets that split batches, is ``"halve"``."""
        return super().from_value("halve" if value == "auto" else value)

    def check(self, target: Step) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing."""
        if self.of == "blocks":
            why, fix = "a step has no blocks", f"Use `BlockMicroBatching({self.micro_batch_size})`."
            return [Problem('`MicroBatching(of="blocks")` in a loop', why, fix)]
        problems, fix = [], "Pass `module=model`"
        if self.micro_batch_size == "halve" and self.module is None:
            why = "to repeat a batch, gradients and buffers from before it must be restored"
            problems.append(Problem('`micro_batch_size="halve"` without `module`', why, f"{fix}."))
        elif self.loss_weight == "proven" and self.module is None:
            why = "to find what the loss is a mean over, some samples pass the model"
            fix += ', or what it is, such as `loss_weight="samples"`.'
            problems.append(Problem('`loss_weight="proven"` without `module`', why, fix))
        return problems + self.check_module(self.module)

    def check_module(self, module: nn.Module | None) -> list[Problem]:
        """Return the conflicts of a model, if it is known, with micro-batches."""
        parameters = [] if module is None else list(module.parameters())
        trained = [p for p in parameters if p.requires_grad and p.dtype in _HALF]
        # Gradients can have another type, as with `LowPrecisionWeights`.
        half = {p.dtype for p in trained if p.grad_dtype is not torch.float32}
        return [
            Problem(
                f"`micro_batch_size={self.micro_batch_size!r}`",
                f"trainable parameters are {dtype}, so gradients of micro-batches would be summed "
                "in half precision",
                'Keep parameters in float32 with `precision="bf16-mixed"`, or set '
                "`micro_batch_size=None`.",
            )
            for dtype in sorted(half, key=str)
        ]

    def make_runner(self, agree: Callable[[int], int] = lambda size: size) -> MicroBatchRunner:
        """Make what splits and repeats batches; ``agree`` gives the least of all processes."""
        return MicroBatchRunner(self.micro_batch_size, self.loss_weight, self.split_batch, agree)

    def _apply(self, target: Step) -> Handle[Step]:
        runner, module = self.make_runner(), self.module
        losses: list[Tensor] = []
        if module is not None:
            self._require_proof(runner, target, module)

        def pass_part(part: Any, weight: float, num_samples: int | None, is_last: bool) -> None:
            loss = target(part)
            loss = loss if weight == 1.0 else loss * weight
            # No updates in backward before the last micro-batch.
            updates = [] if is_last else _updates_of(module)
            with with_attribute(updates, "is_accumulating", True):
                loss.backward()
            losses.append(loss.detach())
            # An outer `torch.autocast` would keep its cast copies of all weights alive.
            torch.clear_autocast_cache()

        def save_state() -> TrainingState | None:
            return None if module is None else TrainingState(module, gradients="keep")

        def forget() -> None:
            check_repeatable(module)
            losses.clear()

        def step(batch: Any) -> Tensor:
            losses.clear()
            runner.meet(batch)
            runner.run(batch, pass_part, save_state=save_state, forget=forget)
            return sum_in_order(losses)

        size = self.micro_batch_size
        change = (
            "whole batches, smaller ones after out-of-memory"
            if size == "halve"
            else f"micro-batches of {size}"
        )
        return Handle(step, [change])

    def _require_proof(
        self, runner: MicroBatchRunner, compute_loss: Step, module: nn.Module
    ) -> None:
        """Test the loss with the first batch that is split, and again where weightings differ."""

        def use(batch: Any, known: Proof | None = None) -> None:
            check = LossCheck(
                *(compute_loss, batch, module),
                loss_weight=self.loss_weight,
                split_batch=self.split_batch,
                known=known,
                needs_split=True,
            )
            proof = prove(check)
            if proof.reason:
                size = '"halve"' if runner.is_auto else runner.size
                problem = Problem(f"`MicroBatching({size})`", proof.reason, proof.fix or _FIX)
                if runner.is_auto:
                    raise MemoryExhaustedError(f"A whole batch was too large, and {problem}")
                raise IncompatibleError(self.name, [problem])
            runner.use(proof.weightings, proof.whole)
            runner.tell_apart = None if proof.is_settled else tell_apart

        def prove_first(batch: Any) -> None:
            if not any(map(is_fake, module.parameters())):
                return use(batch)
            runner.use([Weighting("weighted equally", lambda part: 1.0)], runner.whole)
            runner.tell_apart = None  # for a prediction
            return None

        def tell_apart(batch: Any, differ: bool) -> bool:
            if differ:
                use(batch, Proof(tuple(runner.weightings), runner.whole))
            return bool(runner.weightings)

        runner.require_proof()
        runner.prove, runner.tell_apart = prove_first, tell_apart


_OTHER_THAN_UPDATES = (
    "Use a fixed size such as `micro_batch_size=4`, or `optimizer_in_backward=None`."
)


def check_repeatable(module: nn.Module | None = None, advice: str = _OTHER_THAN_UPDATES) -> None:
    """Check that a batch can be repeated after running out of memory; discard its gradients."""
    updates = _updates_of(module)
    for each in updates:
        if not each.has_updated:  # its gradients are held, or have only been gathered
            each.forget()
        if each.held is not None:
            each.held.keep(0)  # the device has no room for gradients that could wait elsewhere
    if any(each.has_updated for each in updates):
        raise MemoryExhaustedError(
            "Out of memory in a backward pass that has updated parameters already, as "
            "`optimizer_in_backward` does, so the batch cannot be repeated with micro-batches.\n"
            f"{advice}"
        )


# Another model of the same process may be trained at the same time.
def _updates_of(module: nn.Module | None) -> list[Any]:
    if module is None:
        return [updates for _, updates in all_in_backward()]
    return [updates for _, updates in in_backward_of(module.parameters())]


def batch_norms_of(module: nn.Module) -> list[str]:
    """Name the modules whose statistics micro-batches change."""
    norms = nn.modules.batchnorm._BatchNorm
    return [name for name, m in module.named_modules() if isinstance(m, norms)]


def size_of_batches(value: Any) -> Any:
    """Give the size of micro-batches that a value of the argument splits batches into."""
    if isinstance(value, MicroBatching):
        return value.micro_batch_size if value.of == "batches" else None
    return "halve" if value == "auto" else value
