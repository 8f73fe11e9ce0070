"""LoRA beside base weights of 4 bits (`Linear4bit`): streamed, recomputed, predicted; and of 8."""

import gc
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, MemSaveCallback, predict_memory
from lightning_memsave.core.memory import is_host
from lightning_memsave.errors import NoEffectWarning
from tests.callbacks.lit import callback_with, loader_of, make_trainer, peak_of
from tests.helpers import assert_same

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
WIDTH, NUM_BLOCKS = 128, 3


def quantize(model: nn.Module, num_bits: int) -> nn.Module:
    """Give all layers but the head weights of 4 or 8 bits."""
    for name, layer in [*model.named_modules()]:
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        sizes, new = (layer.in_features, layer.out_features), nn.Module()
        if num_bits == 4:
            new = Linear4bit(*sizes, bias=False, quant_type="nf4")
            new.weight = Params4bit(layer.weight.data, quant_type="nf4")
        else:
            new = Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            new.weight = Int8Params(layer.weight.data, requires_grad=False)
        model.set_submodule(name, new.to("cpu"))
    return model


class Lit(pl.LightningModule):
    def __init__(self, num_blocks: int = NUM_BLOCKS, num_bits: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=WIDTH,
            num_hidden_layers=num_blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=2 * WIDTH,
            vocab_size=128,
        )
        base = quantize(transformers.LlamaForCausalLM(config), num_bits)
        lora = peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"])
        self.model = peft.get_peft_model(base, lora)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach().cpu())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, fused=True)

    @property
    def quantized(self) -> list[Any]:
        return [p for p in self.parameters() if isinstance(p, Params4bit)]


def batches() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randint(0, 128, (4, 32), generator=make) for _ in range(4)]


def fit(callback: Any = None, *others: Any, num_bits: int = 4, **how: Any) -> Lit:
    lit = Lit(num_bits=num_bits)
    trainer = make_trainer(pl, *filter(None, (callback, *others)), **how)
    trainer.fit(lit, loader_of(batches()))
    return lit


SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointing": {"activation_checkpointing": "all"},
    "nested": {"activation_checkpointing": "nested"},
    "weights": {"offload": "parameters"},
    "weights, recomputed": {"offload": "parameters", "activation_checkpointing": "all"},
    "everything": {"offload": "parameters+activations", "activation_checkpointing": "all"},
    "in backward": {"offload": "parameters", "optimizer_in_backward": True},
}


@pytest.fixture(scope="module")
def plain() -> Lit:
    return fit()


@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_the_same_bit_for_bit(name, plain):
    lit = fit(MemSaveCallback(preset="off", report=False, predict=False, **SETTINGS[name]))
    assert_same(lit.losses, plain.losses)
    assert_same(lit.state_dict(), plain.state_dict())
    with torch.no_grad():  # as before, with their scales
        assert torch.equal(lit.model(batches()[0]).logits, plain.model(batches()[0]).logits)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")  # of bitsandbytes, in float16
@pytest.mark.parametrize("name", ["nested", "weights"])
def test_those_of_8_bits_stay_on_the_device_as_predicted(name):
    plain = fit(num_bits=8)
    callback = MemSaveCallback(preset="off", predict=20.0, **SETTINGS[name])
    assert_same(fit(callback, num_bits=8).losses, plain.losses)
    assert callback.prediction is not None
    # But for a number that only the real kernel makes.
    assert callback.prediction.peak_bytes == pytest.approx(peak_of(callback), abs=4)


@pytest.mark.parametrize("offload", [None, "parameters"])
def test_in_tiles_of_the_sequence(offload, plain):
    tiled: dict[str, Any] = {"activation_checkpointing": ActivationCheckpointing("tiled", tile=32)}
    callback = MemSaveCallback(preset="off", report=False, predict=False, offload=offload, **tiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)  # if no feed-forward part runs in tiles
        lit = fit(callback)
    for loss, expected in zip(lit.losses, plain.losses, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_they_wait_on_the_host_and_come_back():
    found: list[bool] = []

    def look(_: Any, trainer: Any, lit: Lit, *args: object) -> None:
        found.extend(is_host(param.data.untyped_storage()) for param in lit.quantized)

    before = Lit()
    bytes_before = [param.data.clone() for param in before.quantized]
    callback = MemSaveCallback(preset="off", offload="parameters", report=False, predict=False)
    lit = fit(callback, callback_with(on_train_batch_start=look))
    assert len(found) == 4 * 7 * NUM_BLOCKS
    assert all(found)
    assert not any(is_host(param.data.untyped_storage()) for param in lit.quantized)
    assert all(map(torch.equal, [param.data for param in lit.quantized], bytes_before))
    assert all(param.quant_state is not None for param in lit.quantized)


@pytest.mark.parametrize("num_blocks", [4, 6])
def test_two_blocks_are_on_the_device_at_a_time(num_blocks):
    def parameter_bytes(**settings: Any) -> int:
        settings |= {"preset": "off", "activation_checkpointing": "all"}
        found = predict_memory(Lit(num_blocks), batches()[0], settings=settings)
        return found.by_phase["backward"].parameter_bytes

    on_device, streamed = parameter_bytes(), parameter_bytes(offload="parameters")
    lit = Lit(num_blocks)
    in_blocks = lit.model.base_model.model.model.layers.parameters()
    block_bytes = sum(param.nbytes for param in in_blocks) / num_blocks
    assert on_device - streamed == (num_blocks - 2) * block_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_a_gpu_needs_what_is_predicted(name):
    fit_on: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
    callback = MemSaveCallback(preset="off", report=False, predict=60, **SETTINGS[name])
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    lit = fit(callback, **fit_on)
    peak_bytes = torch.cuda.max_memory_allocated()
    assert callback.prediction is not None
    assert callback.prediction.allocated_bytes == pytest.approx(peak_bytes, rel=0.01)
    torch.testing.assert_close(lit.losses, fit(**fit_on).losses, rtol=1e-4, atol=1e-4)
