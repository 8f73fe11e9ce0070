"""The step of bitsandbytes' optimizers without a wait for the GPU after each parameter."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def update_all(optimizer: Any) -> None:
    """Update every parameter that has a gradient.

    bitsandbytes waits for the GPU after each parameter. Its kernels and copies of pages all go to
    CUDA's default stream, one after the other. Work of torch on another stream is put in order with
    them on the GPU; the host waits for paged state only, which it may read at once.

    Args:
        optimizer: One of bitsandbytes'; gradients are switched off.
    """
    if not optimizer.initialized:
        optimizer.check_overrides()
        optimizer.to_gpu()
        optimizer.initialized = True
    paged_on = set()
    for group_index, group in enumerate(optimizer.param_groups):
        for param_index, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            is_new = not optimizer.state[param]
            with _in_order(param.device):
                if is_new:
                    optimizer.init_state(group, param, group_index, param_index)
                optimizer.prefetch_state(param)
                optimizer.update_step(group, param, group_index, param_index)
            if param.device.type == "xpu":  # where nobody has tried to do without
                _synchronize(param.device)
            elif optimizer.is_paged and param.device.type == "cuda":
                paged_on.add(param.device)
                # The host writes to new pages, which on some systems it must not beside a kernel.
                if is_new:
                    _synchronize(param.device)
    for device in paged_on:
        _synchronize(device)


@contextlib.contextmanager
def _in_order(device: torch.device) -> Iterator[None]:
    """Put kernels on CUDA's default stream in order with the work on the current one."""
    if device.type != "cuda":
        yield
        return
    default, current = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
    if current == default:
        yield
        return
    default.wait_stream(current)
    yield
    current.wait_stream(default)


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)
