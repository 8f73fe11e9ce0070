"""Which settings would lower the peak, and by how much."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from lightning_memsave.analysis._explain_inputs import make_trials
from lightning_memsave.analysis._explain_trials import Trials
from lightning_memsave.analysis.predict import MakeOptimizer
from lightning_memsave.analysis.targets import Target
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.planning.gpus import Gpu
from lightning_memsave.planning.prediction import MemoryPrediction
from lightning_memsave.units import format_bytes


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that lowers the peak.

    Args:
        name: Such as ``"recompute all blocks"``.
        how: What to type.
        peak_bytes: Predicted with it.
        device_bytes: What the device must have then.
        saved_bytes: Off the peak without it.
        exactness: How far numbers may move: ``"bitwise"``, ``"rounding"`` or ``"approximate"``.
        cost: Roughly what it costs: counted in passes, not measured.
        fits: Whether that fits the GPU; ``None`` if none was named.
    """

    name: str
    how: str
    peak_bytes: int
    device_bytes: int
    saved_bytes: int
    exactness: str
    cost: str
    fits: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names.
        """
        return asdict(self)

    def __str__(self) -> str:
        fits = {None: "", True: "; fits", False: "; does not fit"}[self.fits]
        return (
            f"{self.name}: -{format_bytes(self.saved_bytes)}, to {format_bytes(self.device_bytes)} "
            f"on the device{fits} ({self.exactness}; {self.cost}): {self.how}"
        )


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    changes: Mapping[str, Any]
    exactness: str
    cost: str
    attention: str | None = None


_NOTHING = "nothing"
_MIXED_COST = "faster on GPUs with tensor cores; 16 bits in most products"
_PARTS_COST = "smaller kernels, slower the smaller they are"


def find_remedies(
    model: nn.Module | Callable[[], nn.Module] | Target | str,
    batch: Any,
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    gpu: str | Gpu | None = None,
    attention: str | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    may_extrapolate: bool = True,
) -> list[Remedy]:
    """Find the settings that lower the predicted peak, the cheapest first.

    Each one is predicted: by itself on top of ``settings``, and at the end all together. What does
    not lower the peak, or does not go with the model, is left out.

    Args:
        model: As for `explain_memory`.
        batch: As for `explain_memory`.
        optimizer: As for `predict_memory`.
        settings: As for `predict_memory`: what is on already.
        loss: As for `predict_memory`.
        device: As for `predict_memory`.
        gpu: The card that it shall fit; each remedy then says whether it does.
        attention: As for `predict_memory`.
        trainer_arguments: As for `predict_memory`.
        may_extrapolate: As for `predict_memory`.

    Returns:
        The remedies; `cheapest_that_fits` finds the one to take.

    Raises:
        ConfigurationError: If an argument is wrong.

    Note:
        Takes up to a dozen predictions: half a minute for a model of 12 blocks. Costs are rough:
        they are counted in passes over the model and not measured.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        >>> remedies = find_remedies(model, torch.ones(8, 256), device="cpu")
        >>> remedies[0].name, remedies[0].exactness
        ('8-bit optimizer', 'approximate')
    """
    trials = make_trials(
        model,
        batch,
        optimizer,
        settings,
        device=device,
        gpu=gpu,
        loss=loss,
        attention=attention,
        trainer_arguments=trainer_arguments,
        may_extrapolate=may_extrapolate,
    )
    return remedies_of(trials)


def cheapest_that_fits(remedies: list[Remedy]) -> Remedy | None:
    """Find the remedy to take.

    Args:
        remedies: From `find_remedies` with a GPU.

    Returns:
        The first that fits; ``None`` if none does.
    """
    return next((remedy for remedy in remedies if remedy.fits), None)


def remedies_of(trials: Trials) -> list[Remedy]:
    """Predict what would lower the peak.

    Args:
        trials: What predicts.

    Returns:
        As `find_remedies`.
    """
    found: list[tuple[_Candidate, Remedy]] = []
    for candidate in _single(trials):
        _try(trials, candidate, found)
    _try_parts(trials, found)
    _try(trials, _half_weights(trials), found)
    together = _together(trials, [candidate for candidate, _ in found])
    for candidate in together:
        _try(trials, candidate, found)
        if trials.gpu is None or any(remedy.fits for _, remedy in found):
            break
    return [remedy for _, remedy in found]


def _try(
    trials: Trials, candidate: _Candidate | None, found: list[tuple[_Candidate, Remedy]]
) -> bool:
    if candidate is None:
        return False
    base = trials.base()
    prediction = trials.attempt(candidate.changes, attention=candidate.attention)
    if isinstance(prediction, str) or prediction.peak_bytes >= base.peak_bytes:
        return False
    found.append((candidate, _remedy(trials, candidate, base, prediction)))
    return True


# Where one sample at once does not help, larger parts do not either; and where half of the batch
# does as much, smaller ones are of no use.
def _try_parts(trials: Trials, found: list[tuple[_Candidate, Remedy]]) -> None:
    parts = _parts(trials)
    if not parts or not _try(trials, parts[-1], found):
        return
    last = found.pop()
    for candidate in parts[:-1]:
        helped = _try(trials, candidate, found)
        if helped and found[-1][1].peak_bytes <= last[1].peak_bytes:
            return
    found.append(last)


def _remedy(
    trials: Trials, candidate: _Candidate, base: MemoryPrediction, prediction: MemoryPrediction
) -> Remedy:
    how = []
    if candidate.attention:
        how.append(f'model.set_attn_implementation("{candidate.attention}")')
    if candidate.changes:
        how.append(trials.callback_with(candidate.changes))
    gpu = trials.gpu
    return Remedy(
        candidate.name,
        "; ".join(how),
        prediction.peak_bytes,
        prediction.device_bytes,
        base.peak_bytes - prediction.peak_bytes,
        candidate.exactness,
        candidate.cost,
        None if gpu is None else prediction.device_bytes <= gpu.total_bytes,
    )


def _single(trials: Trials) -> list[_Candidate]:
    found = []
    if trials.attention == "eager":
        found.append(
            _Candidate("attention with sdpa", {}, "rounding", "none; mostly faster", "sdpa")
        )
    if trials.arguments.get("micro_batch_size") is None:
        changes: dict[str, Any] = {"micro_batch_size": "auto"}
        found.append(_Candidate("gradients freed first", changes, "bitwise", _NOTHING))
    for which, name, cost in (
        ("selective", "recompute selectively", "less than recomputing all: not the products"),
        (0.5, "recompute half of the blocks", "about 1/6 more compute"),
        ("all", "recompute all blocks", "about 1/3 more compute"),
    ):
        changes = {"activation_checkpointing": which}
        if trials.arguments.get("activation_checkpointing") not in (which, "all", "auto"):
            found.append(_Candidate(name, changes, "bitwise", cost))
    mixed = _mixed(trials)
    if mixed:
        changes = {"precision": mixed}
        found.append(_Candidate(f"precision {mixed}", changes, "approximate", _MIXED_COST))
    if trials.arguments.get("optimizer") is None:
        changes = {"optimizer": "8bit"}
        found.append(_Candidate("8-bit optimizer", changes, "approximate", _NOTHING))
    return found


def _mixed(trials: Trials) -> str | None:
    if trials.precision not in ("32-true", "32"):
        return None
    return "bf16-mixed" if trials.gpu is None or trials.gpu.has_bf16 else "16-mixed"


def _parts(trials: Trials) -> list[_Candidate]:
    number = trials.num_samples or 1
    if trials.arguments.get("micro_batch_size") not in (None, "auto"):
        return []
    sizes = dict.fromkeys(size for size in (number // 2, number // 4, 1) if 0 < size < number)
    return [
        _Candidate(f"micro-batches of {n}", {"micro_batch_size": n}, "rounding", _PARTS_COST)
        for n in sizes
    ]


def _half_weights(trials: Trials) -> _Candidate | None:
    if _mixed(trials) != "bf16-mixed":
        return None
    return _Candidate(
        "precision bf16-true",
        {"precision": "bf16-true"},
        "approximate",
        "faster; weights of 8 significant bits lose small updates: watch the loss",
    )


# First with what keeps weights in 32 bits and whole batches, then with less of both.
def _together(trials: Trials, helped: list[_Candidate]) -> list[_Candidate]:
    names = {name for candidate in helped for name in candidate.changes}
    attention = next((c.attention for c in helped if c.attention), None)
    if len(helped) < 2:
        return []
    changes: dict[str, Any] = {}
    if "activation_checkpointing" in names:
        changes["activation_checkpointing"] = "all"
    if "optimizer" in names:
        changes["optimizer"] = "8bit"
    if any(c.changes.get("precision") == _mixed(trials) for c in helped):
        changes["precision"] = _mixed(trials)
    if trials.arguments.get("micro_batch_size") is None:
        changes["micro_batch_size"] = "auto"
    variants = [("all together", changes)]
    parts = {"micro_batch_size": 1}
    if (trials.num_samples or 1) > 1 and trials.arguments.get("micro_batch_size") is None:
        variants.append(("all together, one sample at once", {**changes, **parts}))
    if _half_weights(trials) is not None:
        half = {"precision": "bf16-true", "micro_batch_size": "auto"}
        variants.append(("all together, weights in bf16", {**changes, **half}))
    return [
        _Candidate(name, of_all, "approximate", "the sum of their costs", attention)
        for name, of_all in variants
    ]
