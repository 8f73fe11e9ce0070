"""Submodules in tiles of the sequence in a Trainer: what it says, and memory to the byte."""

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, MemSaveCallback
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.offloading.technique import Offloading
from tests.callbacks.lit import fit, make_lit, peak_of, quiet, rows_of
from tests.techniques.hugging_face import tiny

pytestmark = pytest.mark.usefixtures("no_prediction")


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("llama", intermediate_size=256, vocab_size=2048)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten().argsort()[None] % 60 + 2  # one sequence of 256
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class OfTorch(nn.Module):
    """Layers whose feed-forward layers are called by a method of theirs."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(16, 2, 256, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten()[None, :, None].expand(1, -1, 16)  # one sequence of 256
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def silent(model: type[nn.Module] = LanguageModel) -> Any:
    """A module whose step logs nothing, so that its memory is that of the model."""
    return make_lit(model=model(), training_step=lambda self, x, batch_idx: self.model(x))


def only(**settings: Any) -> MemSaveCallback:
    given: dict[str, Any] = {"preset": "off"}
    given |= {"activation_checkpointing": ActivationCheckpointing("tiled", tile=16)}
    return quiet(**(given | settings))


def test_row():
    callback = only()
    fit(silent(), callback)
    row = rows_of(callback)["activation_checkpointing"]
    assert (row.status, row.exactness) == ("on", "rounding")
    assert "on 16 tokens at a time, if they compute each position by itself" in row.details[0]
    with pytest.raises(ConfigurationError, match="is rounding, which `exactness='bitwise'`"):
        only(exactness="bitwise")


ON_HOST = {"chunked_cross_entropy": True, "low_precision_weights": "master"}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("32-true", {}),
    "mixed": ("bf16-mixed", {}),
    "8-bit": ("bf16-mixed", {"optimizer": "8bit", "optimizer_in_backward": True}),
    "weights": ("32-true", {"offload": Offloading("parameters", min_bytes=1)}),
    "offload": (
        "bf16-mixed",
        {"offload": Offloading("parameters+activations", min_bytes=1)} | ON_HOST,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        *((LanguageModel, name) for name in SETTINGS),
        *((OfTorch, name) for name in SETTINGS if name != "offload"),  # it has no head
    ],
)
def test_is_predicted_to_the_byte(model, name):
    precision, more = SETTINGS[name]
    callback = only(predict=600, **more)
    fit(silent(model), callback, precision=precision)
    assert callback.prediction is not None
    assert callback.prediction.peak_bytes == peak_of(callback)
