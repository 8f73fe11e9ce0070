"""Single settings of `MemSaveCallback` that may lower the peak of a step."""

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_memsave.core.technique import Exactness, Offer
from lightning_memsave.explain.dominant_parts import dominant_embedding
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.micro_batching.technique import (
    BATCH_STATISTICS,
    size_of_batches,
)
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.techniques.registry import Entry, entries, techniques

MICRO_BATCH, OFFLOAD = "micro_batch_size", "offload"
_SMALL_KERNELS = "smaller kernels, slower the smaller they are"


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    changes: Mapping[str, Any]
    exactness: Exactness
    cost: str
    slowdown: float = 0.0
    is_advised_against: bool = False

    @property
    def argument(self) -> str:
        return next(iter(self.changes))


def advised_against(settings: Mapping[str, Any], has_batch_norm: bool) -> dict[str, str]:
    """List settings that the defaults leave off and `memsave doctor` warns of, with the reason."""
    found = {}
    if has_batch_norm and isinstance(size_of_batches(settings.get(MICRO_BATCH)), int):
        found[MICRO_BATCH] = f"{BATCH_STATISTICS}: training differs from that with whole batches"
    if str(settings.get("precision")).startswith("16"):
        found["precision"] = "float16 has a small range, and training can overflow"
    if getattr(settings.get("optimizer"), "force_8bit", ()):
        found["optimizer"] = "with 8-bit state of embeddings, training can become unstable"
    return found


def exactness_of(entry: Entry, has_batch_norm: bool) -> Exactness:
    is_of_statistics = has_batch_norm and entry.argument == MICRO_BATCH
    return Exactness.APPROXIMATE if is_of_statistics else entry.exactness


def exactness_of_all(
    given: Sequence[Entry], settings: Mapping[str, Any], has_batch_norm: bool
) -> Exactness:
    # "32-true" is what Lightning does by itself.
    is_exact = str(settings.get("precision")) in ("32", "32-true")
    found = [
        exactness_of(entry, has_batch_norm)
        for entry in given
        if not (entry.argument == "precision" and is_exact)
    ]
    return max(found, key=lambda exactness: exactness.rank, default=Exactness.BITWISE)


@dataclass(frozen=True, slots=True)
class CurrentSettings:
    arguments: Mapping[str, Any]
    precision: str
    has_bf16: bool
    num_samples: int
    embedding: str = ""
    overflows: bool = False
    device: str = "cuda"
    has_batch_norm: bool = False

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
        return (
            self.has_bf16
            and self.precision in ("32-true", "32", "bf16-mixed")
            and not self.is_on("low_precision_weights")
        )

    def is_on(self, name: str) -> bool:
        return self.arguments.get(name) not in (None, False)


def candidates_of(what_if: WhatIf, settings: Mapping[str, Any] | None = None) -> list[Candidate]:
    step = what_if.step.with_settings(settings or {})
    now = CurrentSettings(
        step.effective_settings,
        step.precision,
        what_if.step.gpu is None or what_if.step.gpu.has_bf16,
        what_if.num_samples or 0,
        dominant_embedding(what_if.table),
        what_if.overflows,
        what_if.step.device,
        what_if.has_batch_norm,
    )
    return single_candidates(now)


def single_candidates(now: CurrentSettings) -> list[Candidate]:
    """List single settings: the cheapest first, then the host's memory, then what is unwise."""

    def order(one: Candidate) -> tuple[bool, bool, bool, float]:
        is_approximate = one.exactness is Exactness.APPROXIMATE
        return one.is_advised_against, one.argument == OFFLOAD, is_approximate, one.slowdown

    offered = (_WITH_CONDITIONS.get(e.argument, _of_entry)(now, e) for e in entries())
    return sorted((_judged(now, one) for found in offered for one in found), key=order)


def _judged(now: CurrentSettings, one: Candidate) -> Candidate:
    return replace(one, is_advised_against=bool(advised_against(one.changes, now.has_batch_norm)))


def _of_entry(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    if now.is_on(entry.argument):
        return []
    return [_candidate(entry, offer) for offer in entry.offers]


def _candidate(entry: Entry, offer: Offer, **changes: Any) -> Candidate:
    changes = {entry.argument: offer.value} | changes
    # A CPU rounds updates in another way than a GPU.
    exactness = Exactness.ROUNDING if entry.argument == OFFLOAD else entry.exactness
    return Candidate(offer.name, changes, exactness, offer.cost, offer.slowdown)


def _precision(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    if now.mixed is None:
        return []
    cost = "faster on GPUs with tensor cores; 16 bits in most products"
    return [_candidate(entry, Offer(f"precision {now.mixed}", now.mixed, cost))]


def _activation_checkpointing(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    which = now.arguments.get(entry.argument)
    if which in ("all", "auto", "nested", "tiled"):
        return []
    return [_candidate(entry, offer) for offer in entry.offers if offer.value != which]


def _micro_batches(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    size = now.arguments.get(MICRO_BATCH)
    if size not in (None, "auto", "halve") and not isinstance(size, int):
        return []
    number = size if isinstance(size, int) else now.num_samples
    sizes = dict.fromkeys(size for size in (number // 2, number // 4, 1) if 0 < size < number)
    cost = f"{BATCH_STATISTICS}; {_SMALL_KERNELS}" if now.has_batch_norm else _SMALL_KERNELS
    exactness = exactness_of(entry, now.has_batch_norm)
    offers = (Offer(f"micro-batches of {n}", n, cost, 0.4) for n in sizes)
    return [replace(_candidate(entry, offer), exactness=exactness) for offer in offers]


def _optimizer(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    (offer,), found = entry.offers, _of_entry(now, entry)
    given = now.arguments.get(entry.argument)
    if NamedOptimizer.from_value(given) is not None:  # what was asked for stays
        return []
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


def _offload(now: CurrentSettings, entry: Entry) -> list[Candidate]:
    return [] if now.device == "cpu" else _of_entry(now, entry)


# What depends on more than whether it is on.
_WITH_CONDITIONS: Mapping[str, Callable[[CurrentSettings, Entry], list[Candidate]]] = {
    "precision": _precision,
    "activation_checkpointing": _activation_checkpointing,
    MICRO_BATCH: _micro_batches,
    "optimizer": _optimizer,
    "low_precision_weights": _low_precision_weights,
    OFFLOAD: _offload,
}


def not_installed(options: Collection[Candidate]) -> Iterator[str]:
    """Say which open settings cannot be planned without their package."""
    open_arguments = {one.argument for one in options}
    for technique in techniques():
        for package in technique.requires if technique.argument in open_arguments else ():
            if importlib.util.find_spec(package) is None:
                what = f"`{technique.argument}=` is not planned: {package} is not installed"
                yield f"{what}. Run `pip install {package}`."


def untried(options: Collection[Candidate], failures: Mapping[str, str]) -> str:
    """Say what was not planned, and why, in sentences behind a refusal."""
    lack = "".join(f" {why}" for why in not_installed(options))
    if not failures:
        return lack
    what, why = min(failures.items(), key=lambda item: len(item[0]))
    others = f", and {len(failures) - 1} other combinations" if len(failures) > 1 else ""
    return f"{lack} Not tried, as the model raised an error with it: `{what}` ({why}){others}."
