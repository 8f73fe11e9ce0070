"""Settings that may lower the peak, the cheapest first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memsave.techniques.registry import STACKS

_NOTHING = "nothing"
_SUM = "the sum of their costs"
_EXACTNESS = ("bitwise", "rounding", "approximate")
_STACK = "single_gpu"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try.

    Args:
        name: Such as ``"recompute all blocks"``.
        changes: Arguments of `MemSaveCallback` that differ from those in force.
        exactness: How far numbers may move: ``"bitwise"``, ``"rounding"`` or ``"approximate"``.
        cost: Roughly what it costs: counted in passes, not measured.
    """

    name: str
    changes: Mapping[str, Any]
    exactness: str
    cost: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What is trained now.

    Args:
        arguments: Of `MemSaveCallback`, those in force.
        precision: Of the Trainer.
        has_bf16: Whether the device computes in bfloat16.
        num_samples: Of the batch; 0 if they cannot be counted.
        embedding: Name of a parameter of an embedding that dominates the model; empty without one.
        is_on_cuda: Whether it trains on a GPU.
    """

    arguments: Mapping[str, Any]
    precision: str
    has_bf16: bool
    num_samples: int
    embedding: str = ""
    is_on_cuda: bool = True

    @property
    def mixed(self) -> str | None:
        """The mixed precision that could be used; ``None`` if the Trainer names another already."""
        if self.precision not in ("32-true", "32"):
            return None
        return "bf16-mixed" if self.has_bf16 else "16-mixed"

    @property
    def may_have_bf16_weights(self) -> bool:
        """Whether weights are in 32 bits and products may be in bfloat16."""
        return (
            self.has_bf16
            and self.precision in ("32-true", "32", "bf16-mixed")
            and not self.is_on("low_precision_weights")
        )

    def is_on(self, name: str) -> bool:
        """Say whether an argument switches something on.

        Args:
            name: Of the argument.

        Returns:
            Whether it does.
        """
        return self.arguments.get(name) not in (None, False)


def single_candidates(now: Situation) -> list[Candidate]:
    """List what can be switched on by itself, but for parts of batches.

    Args:
        now: What is trained now.

    Returns:
        The candidates: first what leaves numbers alone or nearly so.
    """
    return [candidate for make in _SINGLE for candidate in make(now)]


def part_candidates(now: Situation) -> list[Candidate]:
    """List smaller parts of batches.

    Args:
        now: What is trained now.

    Returns:
        Half, a quarter and one sample at once, as far as these differ.
    """
    size = now.arguments.get("micro_batch_size")
    if size not in (None, "auto") and not isinstance(size, int):
        return []
    number = size if isinstance(size, int) else now.num_samples
    sizes = dict.fromkeys(size for size in (number // 2, number // 4, 1) if 0 < size < number)
    cost = "smaller kernels, slower the smaller they are"
    return [
        Candidate(f"micro-batches of {n}", {"micro_batch_size": n}, "rounding", cost) for n in sizes
    ]


def joint_candidates(now: Situation, helpful: Sequence[Candidate]) -> list[Candidate]:
    """List what can be switched on together.

    Args:
        now: What is trained now.
        helpful: Those from `single_candidates` and `part_candidates` that are to be joined.

    Returns:
        First all of them, then with parts of one sample, then the stack with the least memory.
    """
    if len(helpful) < 2:
        return []
    # Weights of 16 bits are for when nothing else is enough.
    joined = [c for c in helpful if "low_precision_weights" not in c.changes]
    settings = {name: value for c in joined for name, value in c.changes.items()}
    settings.pop("micro_batch_size", None)
    is_open = now.arguments.get("micro_batch_size") in (None, "auto")
    as_parts = {"micro_batch_size": "auto"} if is_open else {}
    of_one = {"micro_batch_size": 1} if is_open and now.num_samples > 1 else {}
    exactness = max((c.exactness for c in joined), key=_EXACTNESS.index, default="bitwise")
    found = [Candidate("all together", settings | as_parts, exactness, _SUM)]
    if of_one:
        exactness = max(exactness, "rounding", key=_EXACTNESS.index)
        name = "all together, one sample at once"
        found.append(Candidate(name, settings | of_one, exactness, _SUM))
    if now.may_have_bf16_weights:
        name = f"stack {_STACK}"
        stack = {"stack": _STACK} | {n: "auto" for n in STACKS[_STACK] if n != "force_8bit"}
        stack |= {} if is_open else {"micro_batch_size": now.arguments["micro_batch_size"]}
        found.append(Candidate(name, stack, "approximate", _SUM))
        if of_one:
            name = f"{name}, one sample at once"
            found.append(Candidate(name, stack | of_one, "approximate", _SUM))
    return found


def _kernel(now: Situation) -> list[Candidate]:
    if now.is_on("attention"):
        return []
    name = "attention with sdpa"
    return [Candidate(name, {"attention": "sdpa"}, "rounding", f"{_NOTHING}; mostly faster")]


def _early(now: Situation) -> list[Candidate]:
    if now.is_on("early_release"):
        return []
    return [Candidate("early release", {"early_release": True}, "bitwise", _NOTHING)]


def _no_gradients(now: Situation) -> list[Candidate]:
    if now.is_on("optimizer_in_backward"):
        return []
    changes = {"optimizer_in_backward": True}
    return [Candidate("optimizer in backward", changes, "bitwise", _NOTHING)]


def _no_logits(now: Situation) -> list[Candidate]:
    if now.is_on("chunked_cross_entropy"):
        return []
    changes = {"chunked_cross_entropy": True}
    return [Candidate("loss without logits", changes, "rounding", "several products, not one")]


def _recomputation(now: Situation) -> list[Candidate]:
    name = "activation_checkpointing"
    if now.arguments.get(name) in ("all", "auto", "nested"):
        return []
    return [
        Candidate(what, {name: which}, "bitwise", cost)
        for which, what, cost in (
            ("selective", "recompute selectively", "less than recomputing all: not the products"),
            (0.5, "recompute half of the blocks", "about 1/6 more compute"),
            ("all", "recompute all blocks", "about 1/3 more compute"),
        )
        if now.arguments.get(name) != which
    ]


def _mixed_precision(now: Situation) -> list[Candidate]:
    if now.mixed is None:
        return []
    cost = "faster on GPUs with tensor cores; 16 bits in most products"
    return [
        Candidate(f"precision {now.mixed}", {"precision": now.mixed}, "approximate", cost),
    ]


def _low_bit(now: Situation) -> list[Candidate]:
    found = []
    cost = "a kernel of its own on a GPU" if now.is_on_cuda else "slower optimizer steps on a CPU"
    changes: dict[str, Any] = {"optimizer": "8bit"}
    if not now.is_on("optimizer"):
        found.append(Candidate("8-bit optimizer", changes, "approximate", cost))
    if now.embedding and not now.arguments.get("force_8bit"):
        changes = changes | {"force_8bit": (f"*{now.embedding}",)}
        name = "8-bit optimizer, also for the embedding"
        found.append(Candidate(name, changes, "approximate", f"{cost}; less exact rare rows"))
    return found


def _half_weights(now: Situation) -> list[Candidate]:
    if not now.may_have_bf16_weights:
        return []
    changes = {"precision": "bf16-mixed", "low_precision_weights": "stochastic"}
    cost = "weights of 8 significant bits, rounded at random"
    return [Candidate("weights in bf16", changes, "approximate", cost)]


_SINGLE: tuple[Callable[[Situation], list[Candidate]], ...] = (
    _kernel,
    _early,
    _no_gradients,
    _no_logits,
    _recomputation,
    _mixed_precision,
    _low_bit,
    _half_weights,
)
