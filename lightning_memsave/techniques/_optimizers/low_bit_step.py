"""The step of bitsandbytes' optimizers with one wait for the GPU instead of one per parameter."""

from typing import Any

import torch

# Whose work is done later than it is asked for, as far as bitsandbytes runs there.
_ASYNCHRONOUS = ("cuda", "xpu")


def update_all(optimizer: Any) -> None:
    """Update every parameter that has a gradient.

    bitsandbytes waits for the GPU after each parameter. Its kernels and copies of pages all go to
    CUDA's default stream, one after the other, and so does torch's work unless the user has chosen
    another stream. Then nothing has to wait: what a parameter needs is done before its kernel, and
    memory that is freed behind it is given to what comes after it. In the end there is one wait, as
    the host may read paged state at once, and errors of kernels belong to the step. Where a step is
    for a single parameter, as in backward, there would be one per parameter again; there it is left
    out, unless state is paged.

    Args:
        optimizer: One of bitsandbytes'; gradients are switched off.
    """
    if not optimizer.initialized:
        optimizer.check_overrides()
        optimizer.to_gpu()
        optimizer.initialized = True
    waits = _Waits(is_paged=optimizer.is_paged)
    for group_index, group in enumerate(optimizer.param_groups):
        for param_index, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            is_new = not optimizer.state[param]
            if is_new:
                optimizer.init_state(group, param, group_index, param_index)
            optimizer.prefetch_state(param)
            optimizer.update_step(group, param, group_index, param_index)
            waits.add(param.device, is_new=is_new)
    waits.end()


class _Waits:
    def __init__(self, *, is_paged: bool) -> None:
        self._is_paged = is_paged
        self._num_updates = 0
        self._can_wait: dict[torch.device, bool] = {}

    # After an update on a device.
    def add(self, device: torch.device, *, is_new: bool) -> None:
        self._num_updates += 1
        if device.type not in _ASYNCHRONOUS:
            return
        if device not in self._can_wait:
            self._can_wait[device] = _is_in_order(device)
        # The host writes to new pages, which on some systems it must not do beside a kernel.
        if not self._can_wait[device] or (is_new and self._is_paged):
            _synchronize(device)

    def end(self) -> None:
        if self._num_updates == 1 and not self._is_paged:
            return
        for device, can_wait in self._can_wait.items():
            if can_wait:
                _synchronize(device)


# For other kinds of devices nobody has tried it.
def _is_in_order(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)
