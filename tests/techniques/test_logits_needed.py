"""Logits that somebody changes, keeps or needs: right numbers, or a clear word."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memsave import ChunkedCrossEntropy, MemSaveCallback
from lightning_memsave.errors import IncompatibleError, NoEffectWarning
from lightning_memsave.techniques.chunked_cross_entropy.deferred_logits import DeferredLogits
from tests.callbacks.lit import PACKAGES, loader, make_trainer
from tests.techniques.test_deferred_logits import CLASSES, TOKENS, Model, ce

LIGHTNING = PACKAGES["lightning"]
SAVES_NOTHING = "ignore:.chunked_cross_entropy. saves nothing"


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def deferring(model: Model) -> Model:
    return ChunkedCrossEntropy("head").apply(copy.deepcopy(model)).target  # type: ignore[return-value]


def loss_of(logits: Tensor) -> Tensor:
    return ce(logits.view(-1, CLASSES), TOKENS.view(-1) % 20)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "some classes": lambda logits: logits[..., :5].fill_(-9.0),
    "no such words": lambda logits: logits[:, :, 30:].fill_(-float("inf")),
    "one class": lambda logits: logits[..., 3].sub_(5.0),
    "narrow": lambda logits: logits.narrow(-1, 0, 5).zero_(),
    "diagonal": lambda logits: logits.view(-1, CLASSES).diagonal().zero_(),
    "strides": lambda logits: logits.as_strided((36, 2), (CLASSES, 1)).zero_(),
    "detached": lambda logits: logits.detach()[..., :5].fill_(3.0),
    "transposed": lambda logits: logits.permute(2, 0, 1)[5].fill_(9.0),
    "rows": lambda logits: logits[0].fill_(1.0),
    "array": lambda logits: logits.detach().numpy().fill(0.5),
}


@pytest.mark.filterwarnings(SAVES_NOTHING)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen_by_the_loss(model, deferring, name):
    found = []
    for net in (model, deferring):
        logits = net()
        copied, view = logits.double(), logits[:, 1:]
        CHANGES[name](logits)
        loss = loss_of(logits)
        loss.backward()
        of_view = ce(view.flatten(0, 1), TOKENS[:, 1:].flatten() % 20)
        found.append((loss, logits.argmax(-1), loss_of(copied), of_view, net.head.weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_vector_may_change_after_it_was_added(model, deferring):
    losses = []
    for net in (model, deferring):
        prior = torch.linspace(0, 1, CLASSES)
        logits = net() + prior
        prior.mul_(-3.0)
        losses.append(loss_of(logits))
    assert torch.allclose(losses[0], losses[1])


class TestChangesBetweenHeadAndLoss:
    @pytest.mark.filterwarnings(SAVES_NOTHING)
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("use", [loss_of, lambda logits: logits.argmax(-1), torch.sum])
    def test_exchanged_weights_are_an_error(self, deferring, mode, use):
        weight = deferring.head.weight
        with mode():
            logits = deferring()
            weight.data = torch.randn_like(weight)
            with pytest.raises(IncompatibleError, match="swapping in others"):
                use(logits)

    def test_a_buffer_that_is_used_again_is_an_error(self, deferring):
        with torch.no_grad():
            hidden = torch.randn(4, 9, 8)
            logits = deferring.head(hidden)
            hidden.copy_(torch.randn(4, 9, 8))
            with pytest.raises(IncompatibleError, match="the input of `head`"):
                logits.sum()


class TestWarning:
    def test_says_once_what_needed_logits(self, deferring):
        with pytest.warns(NoEffectWarning, match=r"nothing for `head`.*`softmax`.*5\.62 KiB"):
            deferring().softmax(-1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            deferring().softmax(-1)

    def test_not_in_validation_and_not_for_what_is_free(self, deferring):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(deferring()).backward()
            with torch.no_grad():
                deferring().softmax(-1)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
    def test_compiled_models_are_left_alone(self, model):
        model.compile()
        with pytest.warns(NoEffectWarning, match="`Model` is compiled"):
            handle = ChunkedCrossEntropy("head").apply(model)
        assert handle.changes == ()

    def test_capped_logits_are_left_alone(self):
        from transformers import Gemma2Config, Gemma2ForCausalLM

        small: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "head_dim": 8,
        }
        config = Gemma2Config(vocab_size=64, num_attention_heads=2, num_key_value_heads=1, **small)
        with pytest.warns(NoEffectWarning, match=r"final_logit_softcapping=30\.0"):
            handle = ChunkedCrossEntropy().apply(Gemma2ForCausalLM(config))
        assert handle.changes == ()


class Lit(LIGHTNING.LightningModule):  # type: ignore[name-defined, misc]
    """Keeps logits in one way or another."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.model, self.keep = Model(), keep
        self.kept: list[Tensor] = []
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> object:
        logits = self.model()
        loss = loss_of(logits) * batch.mean()
        if self.keep == "attribute":
            self.last = logits.detach()
        elif self.keep == "list":
            self.kept.append(logits)
        return {"loss": loss, "logits": logits} if self.keep == "output" else loss

    def on_train_batch_end(self, outputs: object, batch: Tensor, batch_idx: int) -> None:
        if self.keep == "attribute":
            self.seen.append(self.last.clone())
        elif self.keep == "output":
            self.seen.append(outputs["logits"].detach().clone())

    def on_train_epoch_end(self) -> None:
        if self.keep == "list":
            self.seen = [logits.detach() for logits in self.kept]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated = self.model()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def callback(**settings: Any) -> MemSaveCallback:
    off: dict[str, Any] = {"activation_checkpointing": None, "optimizer": None}
    head = ChunkedCrossEntropy("model.head")
    return MemSaveCallback(**{"chunked_cross_entropy": head, **off, **settings})


class TestInATrainer:
    @pytest.mark.parametrize("settings", [{}, {"optimizer_in_backward": True}])
    @pytest.mark.parametrize("keep", ["attribute", "list", "output"])
    def test_what_is_kept_is_of_the_weights_before_the_step(self, keep, settings):
        lit = Lit(keep)
        plain, saving = copy.deepcopy(lit), copy.deepcopy(lit)
        make_trainer(LIGHTNING).fit(plain, loader(), loader())
        with pytest.warns(NoEffectWarning, match="a reference kept after the training step"):
            make_trainer(LIGHTNING, callback(**settings)).fit(saving, loader(), loader())
        assert len(plain.seen) == len(saving.seen) > 1
        for one, other in zip(plain.seen, saving.seen, strict=True):
            assert torch.allclose(one, other, atol=1e-5)

    def test_nothing_is_computed_for_who_keeps_nothing(self):
        lit = Lit("nothing")
        with warnings.catch_warnings():
            warnings.simplefilter("error", NoEffectWarning)
            make_trainer(LIGHTNING, callback()).fit(lit, loader(), loader())

    def test_validation_by_itself(self):
        lit = Lit("nothing")
        make_trainer(LIGHTNING, callback()).validate(lit, loader(), verbose=False)
        assert type(lit.validated) is DeferredLogits
        assert type(lit.model()) is Tensor


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use
def test_forward_mode(model, deferring):
    found = []
    for net in (model, deferring):
        weight = net.head.weight
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(net.embedding(TOKENS), torch.ones(4, 9, 8))
            loss = loss_of(net.head(dual))
            found.append(torch.autograd.forward_ad.unpack_dual(loss).tangent)
        assert weight.grad is None
    assert torch.allclose(found[0], found[1], atol=1e-6)
