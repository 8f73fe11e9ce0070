"""Settings of `MemSaveCallback` that programs are trained with."""

from collections.abc import Collection, Mapping
from random import Random
from typing import Any

from lightning_memsave import ChunkedCrossEntropy, Offloading


def _offload(what: str) -> dict[str, Any]:
    return {"offload": Offloading(what, min_bytes=4, min_table_bytes=64)}


# Without precision, weights in bfloat16 and 8-bit state: what is left of a preset is bitwise.
_IN_FLOAT32 = {"precision": None, "low_precision_weights": None, "optimizer": None}
_CHUNKED = ChunkedCrossEntropy(heads="net.head", chunk_size=2)
PRESETS: Mapping[str, dict[str, Any]] = {
    "default": {"preset": None},
    "bitwise": {"preset": "bitwise"},
    "single_gpu32": {"preset": "single_gpu", **_IN_FLOAT32},
    "offload32": {"preset": "offload", **_IN_FLOAT32},
}
_OF_PRESETS = {
    "default": ("activation_checkpointing",),
    "bitwise": ("activation_checkpointing", "optimizer_in_backward"),
    "single_gpu32": ("activation_checkpointing", "optimizer_in_backward"),
    "offload32": ("activation_checkpointing", "offload"),
}
_SINGLE: Mapping[str, dict[str, Any]] = {
    "all": {"activation_checkpointing": "all"},
    "selective": {"activation_checkpointing": "selective"},
    "nested": {"activation_checkpointing": "nested"},
    "in_backward": {"optimizer_in_backward": True},
    "offload_optimizer": _offload("optimizer"),
    "offload_parameters": _offload("parameters"),
    "offload_activations": _offload("activations"),
    "offload_both": _offload("parameters+activations"),
    "micro_batches": {"micro_batch_size": 2},
    "chunked": {"chunked_cross_entropy": _CHUNKED},
}
_WEIGHTS = {
    "all": 3,
    "selective": 2,
    "nested": 2,
    "in_backward": 3,
    "micro_batches": 5,
    "chunked": 3,
    "offload_optimizer": 3,
    "offload_parameters": 3,
    "offload_activations": 2,
    "offload_both": 2,
    "default": 4,
    "bitwise": 4,
    "single_gpu32": 3,
    "offload32": 3,
    "all+in_backward": 2,
    "selective+in_backward": 2,
    "in_backward+offload_optimizer": 2,
    "in_backward+offload_parameters": 2,
    "all+offload_parameters": 2,
    "nested+offload_both": 2,
    "selective+offload_optimizer": 2,
    "all+micro_batches": 2,
    "in_backward+micro_batches": 2,
    "micro_batches+offload_optimizer": 3,
    "all+chunked": 2,
    "chunked+in_backward": 2,
    "chunked+offload_both": 2,
    "chunked+micro_batches": 3,
}
SETTINGS = tuple(_WEIGHTS)
LEAST_SHARE = 0.1
"""A setting that is on in fewer of its runs tests too little."""
PER_PROGRAM = 4
"""How many settings each program is trained with."""
_RECOMPUTE = {"all", "selective", "nested", *PRESETS}
_UPDATE_IN_BACKWARD = {"in_backward", "bitwise", "single_gpu32"}


def arguments_of(setting: str) -> dict[str, Any]:
    """Return the arguments of a setting, or of several with ``+`` between them."""
    if setting in PRESETS:
        return PRESETS[setting]
    given = [_SINGLE[name] for name in setting.split("+")]
    return {"preset": "off"} | {name: value for each in given for name, value in each.items()}


def as_text(setting: str) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments_of(setting).items())


def techniques_of(setting: str) -> tuple[str, ...]:
    """Name the techniques without which a setting tests nothing."""
    return _OF_PRESETS.get(setting) or tuple(set(arguments_of(setting)) - {"preset"})


def parts_of(setting: str) -> list[str]:
    return setting.split("+")


def recomputes(setting: str) -> bool:
    return not _RECOMPUTE.isdisjoint(parts_of(setting))


def updates_in_backward(setting: str) -> bool:
    return not _UPDATE_IN_BACKWARD.isdisjoint(parts_of(setting))


def splits_batches(setting: str) -> bool:
    return "micro_batches" in parts_of(setting)


def offloads_weights(setting: str) -> bool:
    names = ("offload_optimizer", "offload_parameters", "offload_both", "offload32")
    return not set(names).isdisjoint(parts_of(setting))


def settings_for(seed: int, allowed: Collection[str]) -> list[str]:
    """Choose the settings that a program is trained with."""
    random = Random(-seed)
    weights = {name: weight for name, weight in _WEIGHTS.items() if name in allowed}
    chosen = []
    for _ in range(min(PER_PROGRAM, len(weights))):
        chosen.append(random.choices([*weights], [*weights.values()])[0])
        del weights[chosen[-1]]
    return sorted(chosen)
