"""What takes memory of the device beside tensors."""

import torch

from lightning_memsave.analysis._explain_suspect import Suspect, answered, unknown
from lightning_memsave.analysis._explain_trials import Trials
from lightning_memsave.measure.nvml import read_nvml
from lightning_memsave.units import format_bytes


def fragmentation(trials: Trials) -> Suspect:
    """Say what the allocator holds that no tensor uses.

    Args:
        trials: What predicts.

    Returns:
        The answer.
    """
    name, base = "fragmentation", trials.base()
    if base.reserved_bytes is None:
        return answered(name, 0, "It is a matter of CUDA's caching allocator.", base)
    slack = base.reserved_bytes - base.peak_bytes
    return answered(
        name,
        slack,
        f"The allocator takes {format_bytes(base.reserved_bytes)} from the driver for "
        f"{format_bytes(base.peak_bytes)} in tensors: {format_bytes(slack)} lies between them. "
        "With samples of many lengths it is more; `PYTORCH_CUDA_ALLOC_CONF="
        "expandable_segments:True` lowers it.",
        base,
        reserved_bytes=base.reserved_bytes,
    )


def other_process(trials: Trials) -> Suspect:
    """Ask the driver whether others are on the device.

    Args:
        trials: What predicts.

    Returns:
        The answer; unknown without NVIDIA's driver.
    """
    name = "another process"
    if trials.device != "cuda":
        return Suspect(name, "does not matter", 0, "It is not on a GPU.")
    # To ask torch would begin to use the device.
    is_used = torch.cuda.is_initialized()
    reserved_bytes = torch.cuda.memory_reserved() if is_used else None
    reading = read_nvml(0, reserved_bytes)
    own_bytes = reading.process_bytes if is_used else 0
    if reading.used_bytes is None or own_bytes is None:
        return unknown(name, f"It is not known here ({reading.reason}). `nvidia-smi` shows it.")
    others = max(reading.used_bytes - own_bytes, 0)
    total = reading.total_bytes or 0
    return Suspect(
        name,
        "matters" if others >= 0.05 * total else "does not matter",
        others,
        f"Other processes and the driver hold {format_bytes(others)} of {format_bytes(total)} on "
        "the GPU of this machine now.",
        {"used_bytes": reading.used_bytes, "total_bytes": total},
    )


def cuda_context(trials: Trials) -> Suspect:
    """Say what CUDA needs for itself.

    Args:
        trials: What predicts.

    Returns:
        What NVML tells of this process if it uses the device, else what the prediction assumes.
    """
    name, base = "CUDA context", trials.base()
    if trials.device != "cuda":
        return answered(name, 0, "It is not on a GPU.", base)
    if torch.cuda.is_initialized():
        context_bytes = read_nvml(0, torch.cuda.memory_reserved()).context_bytes
        if context_bytes is not None:
            return answered(
                name,
                context_bytes,
                f"It takes {format_bytes(context_bytes)} in this process, with the libraries.",
                base,
                is_measured=True,
            )
    return answered(
        name,
        base.context_bytes,
        f"It is taken to be {format_bytes(base.context_bytes)}; it depends on GPU and driver.",
        base,
        is_measured=False,
    )
