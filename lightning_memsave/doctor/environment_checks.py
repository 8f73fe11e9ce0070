"""Checks on environment variables, debugging switches and installed packages."""

from collections.abc import Iterator

from lightning_memsave.core.names import did_you_mean
from lightning_memsave.doctor.subject import Subject
from lightning_memsave.errors import Problem
from lightning_memsave.prediction.cuda.allocator import ALLOCATOR_VARIABLES

# Of torch 2.10 to 2.13.
_KEYS = frozenset(
    {
        *("backend", "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb"),
        *("garbage_collection_threshold", "roundup_power2_divisions", "expandable_segments"),
        *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"),
        *("graph_capture_record_stream_reuse", "per_process_memory_fraction"),
        *("pinned_use_background_threads", "pinned_use_cuda_host_register"),
        *("pinned_use_hip_host_register", "pinned_num_register_threads"),
        *("pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb"),
        *("pinned_max_cached_size_mb", "pinned_free_catch_all"),
    }
)
_FLAGS = frozenset(
    {
        *("expandable_segments", "release_lock_on_cudamalloc", "throw_on_cudamalloc_oom"),
        *("pinned_use_background_threads", "pinned_use_cuda_host_register"),
        "graph_capture_record_stream_reuse",
    }
)
_MIN_SPLIT_MIB = 20


def find_allocator_settings(subject: Subject) -> Iterator[Problem]:
    """Wrong or harmful values in `PYTORCH_CUDA_ALLOC_CONF` and `PYTORCH_ALLOC_CONF`."""
    found = {name: subject.environment.get(name) for name in ALLOCATOR_VARIABLES}
    given = {name: text for name, text in found.items() if text is not None}
    if len(set(given.values())) == 2:
        first, second = given
        yield Problem(
            f"`{first}` and `{second}`",
            f"they differ, and torch reads only `{first}`",
            f"Run `unset {first}`, and write all settings into `{second}`.",
        )
    for name, text in list(given.items())[:1]:
        # Values in brackets have commas, too: their parts are no names of settings.
        for item in filter(None, text.replace(" ", "").split(",")):
            why, fix = _wrong_setting(*item.partition(":"))
            if why:
                yield Problem(f"`{name}={text}`", why, fix)


def _wrong_setting(key: str, colon: str, value: str) -> tuple[str, str]:
    if not colon:
        name, _, rest = key.partition("=")
        return f"`{key}` has no colon", f"Write `{name}:{rest or 'VALUE'}`."
    near = did_you_mean(key, _KEYS)
    if key not in _KEYS and near:  # a later version of torch may know other keys
        return f"torch has no setting `{key}`, and refuses it on CUDA", near.strip()
    if key in _FLAGS and value not in ("True", "False"):
        return (
            f"`{key}` is `True` or `False`, with a capital letter, and torch refuses `{value}`",
            f"Write `{key}:{'False' if value.lower() in ('0', 'false') else 'True'}`.",
        )
    return _VALUE_CHECKS[key](value) if key in _VALUE_CHECKS else ("", "")


def _wrong_split_size(value: str) -> tuple[str, str]:
    if not value.isdecimal() or int(value) >= _MIN_SPLIT_MIB:
        return "", ""
    return (
        f"torch refuses a `max_split_size_mb` below {_MIN_SPLIT_MIB}",
        "Write `expandable_segments:True` instead, which avoids fragmentation without a limit.",
    )


def _wrong_threshold(value: str) -> tuple[str, str]:
    if 0 < _number(value) < 1:
        return "", ""
    return (
        f"`garbage_collection_threshold` is a share between 0 and 1, and torch refuses `{value}`",
        "Write for example `garbage_collection_threshold:0.8`.",
    )


def _wrong_backend(value: str) -> tuple[str, str]:
    if value != "cudaMallocAsync":
        return "", ""
    return (
        "this allocator has no `expandable_segments` and no memory snapshots, which `OOMObserver` "
        "and `torch.cuda.memory` use, and predictions are for the other one",
        "Remove `backend:cudaMallocAsync`; against fragmentation write `expandable_segments:True`.",
    )


_VALUE_CHECKS = {
    "max_split_size_mb": _wrong_split_size,
    "garbage_collection_threshold": _wrong_threshold,
    "backend": _wrong_backend,
}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


_SLOW = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is allocated and freed by the driver, which "
    "waits for the GPU; torch's documentation recommends it for memory checkers only",
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for, so the CPU and the GPU take turns",
}


def find_debug_settings(subject: Subject) -> Iterator[Problem]:
    """`PYTORCH_NO_CUDA_MEMORY_CACHING`, `CUDA_LAUNCH_BLOCKING`, `detect_anomaly`."""
    for name, why in _SLOW.items():
        value = subject.environment.get(name, "")
        if value not in ("", "0"):
            yield Problem(f"`{name}={value}`", why, f"Run `unset {name}`.")
    if subject.trainer_arguments.get("detect_anomaly"):
        yield Problem(
            "`Trainer(detect_anomaly=True)`",
            "autograd keeps a stack trace of each operation, and reads every gradient to look for "
            "NaN, which waits for the GPU",
            "Remove it when the NaN is found.",
        )


def find_broken_packages(subject: Subject) -> Iterator[Problem]:
    """`nvidia-ml-py` beside `nvidia-ml-py3`."""
    if {"nvidia-ml-py", "nvidia-ml-py3"} <= {name.lower() for name in subject.versions}:
        yield Problem(
            "the packages `nvidia-ml-py` and `nvidia-ml-py3`",
            "both install `pynvml.py`, and the older one may have replaced the other's",
            "Run `pip uninstall nvidia-ml-py3`, then `pip install --force-reinstall nvidia-ml-py`.",
        )
