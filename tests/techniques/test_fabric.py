"""Techniques on what Lightning Fabric's ``setup`` returns: they hold, or are refused."""

import pytest
import torch
from lightning.fabric import Fabric

from lightning_memsave import ActivationCheckpointing, AttentionKernel, Exactness, IncompatibleError
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from tests.cases import make_batch, make_model
from tests.helpers import adamw


@pytest.mark.parametrize(
    "apply",
    [
        lambda optimizer: LowBitOptimizer().apply(optimizer),
        lambda optimizer: OptimizerInBackward(trust_optimizer=True).apply(optimizer),
        lambda optimizer: LowPrecisionWeights().round_updates(optimizer),
    ],
    ids=["low_bit_optimizer", "optimizer_in_backward", "low_precision_weights"],
)
def test_refuses_the_wrapper_of_an_optimizer(apply):
    """Its step is that of the optimizer inside, which would know nothing of the technique."""
    model = make_model("classifier")
    _, optimizer = Fabric(accelerator="cpu", devices=1).setup(model, adamw(model))
    with pytest.raises(IncompatibleError, match=r"fabric.setup\(model, handle.target\)`"):
        apply(optimizer)


# Most only round: that they do something is in the changes that they name.
@pytest.mark.parametrize(
    ("technique", "name", "changed"),
    [
        (ActivationCheckpointing(), "classifier", "_forward_module.blocks.0"),
        (ChunkedCrossEntropy(heads="re:.*head"), "classifier", "_forward_module.head"),
        (AttentionKernel(), "eager_bert", "`_forward_module.bert`"),
        (LowPrecisionWeights(), "classifier", "10 of 27 tensors in bfloat16"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_changes_the_module_inside_of_a_wrapper(technique, name, changed):
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")

    def losses(*, is_applied: bool) -> list[torch.Tensor]:
        model = make_model(name).train()
        wrapped, optimizer = fabric.setup(model, adamw(model))
        if is_applied:
            assert changed in " ".join(technique.apply(wrapped).changes)
        torch.manual_seed(7)
        found = []
        for index in range(3):
            optimizer.zero_grad()
            loss = wrapped(make_batch(index))
            fabric.backward(loss)
            optimizer.step()
            found.append(loss.detach())
        return found

    for ours, plain in zip(losses(is_applied=True), losses(is_applied=False), strict=True):
        exactly = technique.exactness is Exactness.BITWISE
        assert abs(ours - plain) <= (0.0 if exactly else 2**-7 * abs(plain))
