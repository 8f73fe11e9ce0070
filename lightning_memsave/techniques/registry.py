"""Registry of the techniques and Trainer settings of `MemSaveCallback`, and of its presets."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_memsave.core.technique import Exactness, Offer, Technique
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_memsave.techniques.attention_kernel.technique import AttentionKernel
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import (
    LowBitOptimizer,
    problems_of_name,
)
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.in_blocks import BlockMicroBatching
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.offloading.weights import AUTO
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward


@dataclass(frozen=True)
class Entry:
    """An argument of `MemSaveCallback` whose value is set by presets."""

    argument: str
    technique: type[Technique[Any]] | None = None
    classic: Any = None
    bitwise: Any = None
    single_gpu: Any = None
    offload: Any = None
    details: Mapping[str, Any] = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    exactness: Exactness = Exactness.BITWISE

    @classmethod
    def of(cls, technique: type[Technique[Any]], **values: Any) -> "Entry":
        return cls(
            technique.argument,
            technique,
            **values,
            offers=technique.offers,
            exactness=technique.exactness,
        )


ALL_8BIT = LowBitOptimizer(force_8bit=("*",))
"""8-bit state of all parameters, embeddings included."""

_ON = ("classic", "bitwise", "single_gpu", "offload")
_AUTO: dict[str, Any] = dict.fromkeys(_ON, "auto")
_ENTRIES = (
    Entry(
        "precision",
        classic="auto",
        single_gpu="bf16-mixed",
        offload="bf16-mixed",
        exactness=Exactness.APPROXIMATE,
    ),
    # In "bitwise" too, batches that do not fit are split: the alternative is that the run ends.
    Entry.of(MicroBatching, **_AUTO),
    Entry.of(AttentionKernel, single_gpu="sdpa", offload="sdpa"),
    Entry.of(ChunkedCrossEntropy, single_gpu=True, offload=True),
    Entry.of(
        ActivationCheckpointing,
        classic="all",
        bitwise="all",
        single_gpu="nested",
        offload="nested",
        details={"blocks": None},
    ),
    # In the order in which they are applied to optimizers.
    Entry.of(LowBitOptimizer, classic="8bit", single_gpu=ALL_8BIT),
    Entry.of(
        Offloading,
        offload="parameters+activations+embeddings",
        details={"blocks": None, "host_budget": None},
    ),
    Entry.of(LowPrecisionWeights, single_gpu="stochastic", offload="master"),
    Entry.of(OptimizerInBackward, bitwise=True, single_gpu=True),
)

PRESETS = ("off", *_ON)
"""Presets: everything off, the defaults, everything that keeps training bit for bit the same, and
the least memory on a single GPU without and with host memory."""
BARE = "classic"
"""The default preset."""
SMALLER_PRESET = "single_gpu"
"""What takes the place of `preset="offload"` where nothing can be on the host."""
BESIDE_OFFLOAD: Mapping[str, Any] = {"optimizer": None, "low_precision_weights": "master"}
"""What takes the place of other values where weights are on the host: there is room for whole
state, and updates are made in float32."""
_WHY_OFF_BESIDE_OFFLOAD = {
    "optimizer": "keeps the whole state on the host, where there is room for it",
    "optimizer_in_backward": "lets the host update weights while the next step begins",
}
_SMALLER_ON_HOST: tuple[dict[str, Any], ...] = (
    {"low_precision_weights": "split"},
    {"optimizer_in_backward": True},
    {"optimizer": "8bit"},
    {"optimizer": ALL_8BIT},
)
"""What makes that smaller, one after the other, from fast to small."""
FINAL = ("optimizer_in_backward",)  # not beside clipping of norms


def entries() -> tuple[Entry, ...]:
    return _ENTRIES


def techniques() -> tuple[type[Technique[Any]], ...]:
    """Return the techniques, in order of application."""
    found = [entry.technique for entry in _ENTRIES if entry.technique is not None]
    # Of the argument of `MicroBatching`, applied to blocks that may be recomputed.
    found.insert(found.index(ActivationCheckpointing) + 1, BlockMicroBatching)
    found.insert(found.index(LowBitOptimizer) + 1, NamedOptimizer)  # of the same argument
    return tuple(found)


def frees_early(arguments: Mapping[str, Any]) -> bool:
    """Say whether tensors are freed early: always, unless `preset="off"` is all that is given."""
    names = [*(entry.argument for entry in _ENTRIES), "accumulate_grad_batches"]
    values = [arguments[name] for name in names]
    is_on = any(value is not None and value is not False for value in values)
    return arguments["preset"] != "off" or is_on


def values_of(preset: str) -> dict[str, Any]:
    return {e.argument: None if preset == "off" else getattr(e, preset) for e in _ENTRIES}


_GONE = (
    *("block_micro_batch_size", "early_release", "eval_micro_batch_size", "force_8bit"),
    *("keep_32bit", "optimizer_kwargs"),
)


def current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of a plan in a checkpoint, also those of earlier versions."""
    found = {name: _restored(value) for name, value in settings.items() if name not in _GONE}
    optimizer, patterns = settings.get("optimizer"), settings.get("force_8bit")
    if isinstance(optimizer, str) and patterns:  # before they were settings of `LowBitOptimizer`
        found["optimizer"] = LowBitOptimizer(optimizer, force_8bit=tuple(patterns))
    return found


# What else is an object, such as with functions of the user, is given again.
def _restored(value: Any) -> Any:
    if isinstance(value, Mapping):
        for kind in (LowBitOptimizer, NamedOptimizer, Offloading):
            if value["class_path"].endswith(f".{kind.__name__}"):
                return kind(**value["init_args"])
    return value


def with_optimizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Let an optimizer that is named by its class be the technique, which knows its state."""
    found = dict(settings)
    with contextlib.suppress(ConfigurationError):  # a wrong name is refused where it is read
        value = settings.get(NamedOptimizer.argument)
        found[NamedOptimizer.argument] = NamedOptimizer.from_value(value) or value
    return found


def uses_blocks(settings: Mapping[str, Any]) -> bool:
    """Say whether `blocks` is used without checkpointing, too."""
    in_blocks = BlockMicroBatching.from_value(settings.get(MicroBatching.argument))
    optimizer = settings.get(NamedOptimizer.argument)
    name = getattr(optimizer, NamedOptimizer.argument, optimizer)
    is_muon = isinstance(name, str) and name in ("muon", "muon_8bit")
    return bool(settings.get(Offloading.argument)) or in_blocks is not None or is_muon


def unused_details(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """List the details of what is off, which would be refused beside it."""
    off = [e for e in _ENTRIES if settings.get(e.argument) is None]
    used = {name for e in _ENTRIES if e not in off for name in e.details}
    used |= {"blocks"} if uses_blocks(settings) else set()
    found = [(n, v) for e in off if e.argument in names for n, v in e.details.items()]
    return {n: v for n, v in found if n not in used}


def forms_on_host(
    form: Mapping[str, Any], may_set: Callable[[str, Any], bool]
) -> Iterator[dict[str, Any]]:
    """List what may take the place of other values where weights are on the host."""
    form = dict(form)
    yield dict(form)
    for smaller in _SMALLER_ON_HOST:
        name, value = next(iter(smaller.items()))
        is_split = name == LowPrecisionWeights.argument
        if may_set(name, value) and (not is_split or form.get(name) == "master"):
            form |= {n: v for n, v in smaller.items() if n == name or may_set(n, v)}
            yield dict(form)


_NOT_NEEDED = "the plan fits the device without it"


def leaves_open(value: Any) -> bool:
    """Say whether a plan decides on a value: what it is, or how many blocks stay on the device."""
    return value == "auto" or getattr(value, "resident", None) == AUTO


def with_plan(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    open_arguments = [e.argument for e in _ENTRIES if leaves_open(arguments[e.argument])]
    values = {name: settings.get(name) for name in open_arguments}
    values |= {name: "auto" for name in (MicroBatching.argument,) if name in values}
    values |= unused_details({**arguments, **values}, open_arguments)
    # What is on in a plan is applied or refused: without it the plan would not hold.
    left_out = {name: "" for name, value in values.items() if value in (None, "auto")}
    left_out |= {name: _NOT_NEEDED for name in left_out if arguments[name] != "auto"}
    return {**arguments, **values, "from_preset": left_out}


def preset_forms(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """List what a preset may set beside weights on the host, from fast to small."""
    found = with_preset(arguments)
    preset = BARE if arguments["preset"] is None else arguments["preset"]
    limit = Exactness(arguments["exactness"])
    on = {
        e.argument for e in _ENTRIES if preset == "offload" or getattr(e, preset, None) is not None
    }
    exactness = {e.argument: e.exactness for e in _ENTRIES}

    def may_set(name: str, value: Any) -> bool:
        if name == "offload":
            return bool(arguments[name] == "auto")
        if name == "optimizer" and "embeddings" in str(arguments["offload"]):
            return False
        is_open = name in found["from_preset"] and preset != "off"
        return is_open and (name in on or name in FINAL) and limit.allows(exactness[name])

    first = {name: found[name] for name in found["from_preset"]}
    for form in forms_on_host(first, may_set):
        yield {n: v for n, v in form.items() if n not in found or v != found[n]}


def with_preset(
    arguments: Mapping[str, Any], form: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Replace ``"auto"`` by values of the preset; with a budget, by those without a plan yet.

    ``"from_preset"`` names what was replaced, and says what of the preset another setting has
    switched off.
    """
    if arguments.get("budget") is not None and arguments["preset"] is None:
        return with_plan(arguments, {})
    preset = BARE if arguments["preset"] is None else arguments["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigurationError(
            f"`preset={preset!r}` is not a valid preset. Use {', '.join(map(repr, PRESETS))}, or "
            "`None`."
        )
    values = values_of(preset)
    missing = {name: value for name, value in values.items() if arguments[name] == "auto"}
    what = getattr(arguments["offload"], "what", arguments["offload"])
    if what is True or not {"optimizer", "parameters"}.isdisjoint(str(what).split("+")):
        instead = {n: v for n, v in BESIDE_OFFLOAD.items() if missing.get(n) is not None}
        missing |= instead | dict.fromkeys((n for n in FINAL if n in missing), None)
    missing |= form or {}
    reasons = {
        name: f"`offload={what!r}` {_WHY_OFF_BESIDE_OFFLOAD[name]}"
        if values[name] is not None and value is None
        else ""
        for name, value in missing.items()
    }
    # A name written beside it keeps the state of embeddings in 8 bits, as the preset does.
    own = arguments["optimizer"]
    is_8bit = isinstance(own, str) and "8bit" in own and not problems_of_name(own)
    if is_8bit and values["optimizer"] == ALL_8BIT:
        arguments = {**arguments, "optimizer": replace(ALL_8BIT, optimizer=own)}
    return {**arguments, **missing, "from_preset": reasons}
