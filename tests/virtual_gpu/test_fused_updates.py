"""Compiled updates need no memory beside their state."""

import pytest

from tests.virtual_gpu.processes import run_python

pytestmark = pytest.mark.gpu


def test_an_8bit_update_has_no_buffers_in_float32():
    """Without VGPU_COMPUTE the code that `torch.compile` makes really runs, on nothing."""
    found = run_python(
        """
        import json, torch
        from lightning_memsave.techniques.low_precision_weights import fused_steps

        numel = 2**22
        blocks = numel // 256
        param, grad = (torch.zeros(numel, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        kinds = [(numel, torch.uint8), (blocks, torch.float32), (256, torch.float32)]
        kinds.append((255, torch.float32))
        state = [torch.zeros(n, dtype=d, device="cuda") for n, d in kinds for _ in range(2)]
        numbers = fused_steps.Numbers(1.0, 0.0, 0.9, 0.99, 1e-3, 1.0, 1e-8, 3)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused_steps._run_adam_8bit(param, grad, state, None, *numbers)
        print(json.dumps(torch.cuda.max_memory_allocated() - before))
        """,
        VGPU_COMPUTE="0",
        VGPU_MEMORY="4GiB",
    )
    assert found < 2**20  # it was 32 MiB: both moments in float32
