"""Settings that may lower the peak, the cheapest first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_memsave.core.technique import Offer
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.registry import Entry, entries, values_of

_SUM = "the sum of their costs"
_EXACTNESS = ("bitwise", "rounding", "approximate")
_STACK, _HOST = "single_gpu", "offload"
"""Stacks; the second is an argument, too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try."""

    name: str
    changes: Mapping[str, Any]
    exactness: str
    cost: str
    slowdown: float = 0.0


@dataclass(frozen=True, slots=True)
class CurrentSettings:
    """What is trained now."""

    arguments: Mapping[str, Any]
    precision: str
    has_bf16: bool
    num_samples: int
    embedding: str = ""
    overflows: bool = False
    device: str = "cuda"

    @property
    def mixed(self) -> str | None:
        """The mixed precision that could be used; ``None`` if the Trainer names another."""
        if self.precision not in ("32-true", "32"):
            return None
        if self.has_bf16:
            return "bf16-mixed"
        return None if self.overflows else "16-mixed"

    @property
    def may_have_bf16_weights(self) -> bool:
        """Whether weights are in 32 bits and products may be in bfloat16."""
        return (
            self.has_bf16
            and self.precision in ("32-true", "32", "bf16-mixed")
            and not self.is_on("low_precision_weights")
        )

    def is_on(self, name: str) -> bool:
        """Say whether an argument switches something on."""
        return self.arguments.get(name) not in (None, False)


def single_candidates(now: CurrentSettings) -> list[Candidate]:
    """List the techniques that can be switched on alone, without micro-batches and the host."""
    found = []
    for entry in entries():
        if entry.argument != _HOST:
            found += _WITH_CONDITIONS.get(entry.argument, _of_entry)(now, entry)
    return sorted(found, key=lambda one: (one.exactness == "approximate", one.slowdown))


def micro_batch_candidates(now: CurrentSettings) -> list[Candidate]:
    """List smaller micro-batches."""
    size = now.arguments.get("micro_batch_size")
    if size not in (None, "auto") and not isinstance(size, int):
        return []
    number = size if isinstance(size, int) else now.num_samples
    sizes = dict.fromkeys(size for size in (number // 2, number // 4, 1) if 0 < size < number)
    cost = "smaller kernels, slower the smaller they are"
    return [
        Candidate(f"micro-batches of {n}", {"micro_batch_size": n}, "rounding", cost) for n in sizes
    ]


def joint_candidates(now: CurrentSettings, helpful: Sequence[Candidate]) -> list[Candidate]:
    """List what can be switched on together."""
    if len(helpful) < 2:
        return []
    # Weights of 16 bits are for when nothing else is enough.
    joined = [c for c in helpful if "low_precision_weights" not in c.changes]
    settings = {name: value for c in joined for name, value in c.changes.items()}
    settings.pop("micro_batch_size", None)
    is_open = now.arguments.get("micro_batch_size") in (None, "auto")
    of_one = {"micro_batch_size": 1} if is_open and now.num_samples > 1 else {}
    exactness = max((c.exactness for c in joined), key=_EXACTNESS.index, default="bitwise")
    found = [Candidate("all together", settings, exactness, _SUM)]
    if of_one:
        exactness = max(exactness, "rounding", key=_EXACTNESS.index)
        name = "all together, one sample at once"
        found.append(Candidate(name, settings | of_one, exactness, _SUM))
    return [*found, *_stack(now, _STACK)]


def host_candidates(now: CurrentSettings) -> list[Candidate]:
    """List what uses the host's memory, for when nothing else is enough."""
    entry = next(entry for entry in entries() if entry.argument == _HOST)
    if now.device == "cpu" or now.is_on(_HOST):
        return []
    # A CPU rounds updates in another way than a GPU.
    found = [replace(one, exactness="rounding") for one in _of_entry(now, entry)]
    return [*found, *_stack(now, _HOST)]


def _stack(now: CurrentSettings, name: str) -> list[Candidate]:
    if not now.may_have_bf16_weights:
        return []
    size = now.arguments.get("micro_batch_size")
    values = {"stack": name} | dict.fromkeys(values_of(name), "auto")
    values |= {} if size in (None, "auto") else {"micro_batch_size": size}
    found = [Candidate(f"stack {name}", values, "approximate", _SUM)]
    if size in (None, "auto") and now.num_samples > 1:
        of_one = values | {"micro_batch_size": 1}
        found.append(Candidate(f"stack {name}, one sample at once", of_one, "approximate", _SUM))
    return found


def _of_entry(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    if now.is_on(entry.argument):
        return []
    return [_candidate(entry, offer) for offer in entry.offers]


def _candidate(entry: Entry, offer: Offer, **changes: Any) -> Candidate:
    changes = {entry.argument: offer.value} | changes
    return Candidate(offer.name, changes, entry.exactness.value, offer.cost, offer.slowdown)


def _precision(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    if now.mixed is None:
        return []
    cost = "faster on GPUs with tensor cores; 16 bits in most products"
    return [_candidate(entry, Offer(f"precision {now.mixed}", now.mixed, cost))]


def _activation_checkpointing(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    which = now.arguments.get(entry.argument)
    if which in ("all", "auto", "nested"):
        return []
    return [_candidate(entry, offer) for offer in entry.offers if offer.value != which]


def _optimizer(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    (offer,), found = entry.offers, _of_entry(now, entry)
    given = now.arguments.get(entry.argument)
    given = offer.value if given in (None, "auto") else given
    technique = given if isinstance(given, LowBitOptimizer) else LowBitOptimizer(given)
    if now.embedding and not technique.force_8bit:
        name, cost = f"{offer.name}, also for the embedding", f"{offer.cost}; less exact rare rows"
        technique = replace(technique, force_8bit=(f"*{now.embedding}",))
        found.append(_candidate(entry, Offer(name, technique, cost)))
    return found


def _low_precision_weights(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    if not now.may_have_bf16_weights:
        return []
    return [_candidate(entry, offer, precision="bf16-mixed") for offer in entry.offers]


# What depends on more than whether it is on.
_WITH_CONDITIONS: Mapping[str, Callable[[CurrentSettings, Entry], list[Candidate]]] = {
    "precision": _precision,
    "activation_checkpointing": _activation_checkpointing,
    "optimizer": _optimizer,
    "low_precision_weights": _low_precision_weights,
}
