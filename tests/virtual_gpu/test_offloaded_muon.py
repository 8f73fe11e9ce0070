"""Updates that pass the device on a stream of their own, beside the next step, as Muon's do."""

from typing import Any

import pytest

from tests.virtual_gpu.processes import run_python

pytestmark = pytest.mark.gpu

CODE = """
    import json, torch
    from torch import nn
    from lightning_memsave import LowBitOptimizer, NamedOptimizer, Offloading, OptimizerInBackward

    def train(kind, what, in_backward):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64))
            for _ in range(3)]
        model = nn.Sequential(*layers).cuda()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        technique = Offloading(what, blocks="Sequential") if what else None
        handle = technique and technique.apply(model)
        named = LowBitOptimizer if "8bit" in kind else NamedOptimizer
        optimizer = named(kind, module=model, blocks="Sequential").apply(adamw).target
        if in_backward:
            OptimizerInBackward().apply(optimizer)
        updates = technique and technique.update_in_background(optimizer)
        losses = []
        for number in range(5):
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).cuda()
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if technique:
            updates.undo()
            handle.undo()
        return losses

    kinds = "muon", "muon_8bit", "adamw_bf16_state"
    ways = [("optimizer", False), ("parameters", False), ("parameters", True)]
    print(json.dumps([[train(kind, None, False), *(train(kind, *way) for way in ways)]
        for kind in kinds]))
"""


@pytest.mark.parametrize("how", [[], ["VGPU_LATE"], ["VGPU_LATE", "TORCH_CUDA_SANITIZER"]])
def test_have_the_same_bits_as_without_offloading(how):
    """Also where copies come as late as they may, and torch's check for races finds nothing."""
    variables: Any = {"VGPU_COMPUTE": "1", "VGPU_STRICT": "1"} | dict.fromkeys(how, "1")
    for plain, *offloaded in run_python(CODE, card="a100", **variables):
        assert plain[-1] < plain[0]
        for losses in offloaded:
            assert losses == plain
