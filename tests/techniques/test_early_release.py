"""Copies that autocast makes of weights, and when they are gone."""

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RobertaConfig, RobertaForMaskedLM

from lightning_memsave.errors import ConfigurationError, NoEffectWarning
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.planning.fake_models import fake_tensors
from lightning_memsave.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memsave.techniques.early_release import EarlyRelease
from tests.cases import MODELS, WIDTH, Block, Model, make_batch, make_model
from tests.helpers import assert_bitwise_equal, snapshot, train

NUM_LAYERS = 4


def roberta(**changes: Any) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": NUM_LAYERS,
    }
    config = RobertaConfig(
        num_attention_heads=4, vocab_size=300, max_position_embeddings=40, **sizes | changes
    )
    return RobertaForMaskedLM(config).train()


def words(seed=0):
    return torch.randint(2, 300, (2, 16), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


def in_autocast(model):
    """Micro-batches, each in a context of its own."""

    def step(batch):
        total = torch.zeros(())
        for part in batch.chunk(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(part)
            loss.backward()
            total = total + loss.detach()
        return total

    return step


def in_one_context(model):
    """Forward and backward of all micro-batches in one context."""

    def step(batch):
        total = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for part in batch.chunk(2):
                loss = model(part)
                loss.backward()
                total = total + loss.detach()
        return total

    return step


class Both(EarlyRelease):
    """With checkpointing, which the module may be given before or after."""

    def _apply(self, target):
        checkpointing = ActivationCheckpointing(blocks=self.blocks).apply(target)
        handle = super()._apply(target)
        handle._undo.insert(0, checkpointing.undo)
        return handle


class SharingBlock(Block):
    """A weight that is used twice."""

    def forward(self, x, *, scale=None):
        return super().forward(super().forward(x, scale=scale), scale=scale)


class SharingModel(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([SharingBlock(nn.LayerNorm(WIDTH)) for _ in range(4)])


@pytest.mark.parametrize("step", [in_autocast, in_one_context])
@pytest.mark.parametrize("technique", [EarlyRelease, Both])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "unrepeated"])
def test_trains_bit_for_bit_as_before(name, technique, step):
    model = make_model(name)
    plain = train(model, make_batch, run_step_of=step)
    assert_bitwise_equal(plain, train(model, make_batch, technique(), run_step_of=step))


@pytest.mark.parametrize("technique", [EarlyRelease, Both])
def test_gradients_of_a_weight_that_is_used_twice_are_summed_as_before(technique):
    model = SharingModel()
    plain = train(model, make_batch, run_step_of=in_autocast)
    assert_bitwise_equal(plain, train(model, make_batch, technique(), run_step_of=in_autocast))


def forward_peaks(model, num_steps=3):
    """Bytes at the peak of each forward pass, while gradients accumulate."""
    peaks = []
    with LiveTensors(model) as live:
        for step in range(num_steps):
            live.reset_peak()
            loss = loss_of(model, words(step))
            peaks.append(live.peak)
            loss.backward()
    model.zero_grad()
    return peaks


def copies_of_blocks(model):
    linears = [m for m in model.roberta.encoder.modules() if isinstance(m, nn.Linear)]
    return sum(2 * p.numel() for m in linears for p in m.parameters())


def test_copies_are_not_alive_at_the_peak_of_forward():
    model = roberta()
    with ActivationCheckpointing().apply(model):
        kept = forward_peaks(model)
        with EarlyRelease().apply(model):
            released = forward_peaks(model)
    assert released[0].total_bytes == kept[0].total_bytes, "the first call is watched"
    for before, after in zip(kept[1:], released[1:], strict=True):
        saved = before.total_bytes - after.total_bytes
        # All but, in one call, the smallest weight of each block: a bias that was looked at.
        assert saved >= copies_of_blocks(model) - NUM_LAYERS * 1024
        assert before.weight_copy_bytes - after.weight_copy_bytes == saved
        assert before.gradient_bytes == after.gradient_bytes > 0


def test_order_of_techniques_does_not_matter():
    model = roberta()
    with EarlyRelease().apply(model), ActivationCheckpointing().apply(model):
        first = forward_peaks(model)
    with ActivationCheckpointing().apply(model), EarlyRelease().apply(model):
        second = forward_peaks(model)
    assert [p.total_bytes for p in first] == [p.total_bytes for p in second]


# transformers' own checkpointing calls the whole block again, ours what is inside of the call.
@pytest.mark.parametrize("reentrant", [False, True])
def test_works_with_checkpointing_of_hugging_face(reentrant):
    model = roberta()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    plain = forward_peaks(other)
    gradients = _gradients(other, seed=3)
    with EarlyRelease().apply(model):
        torch.manual_seed(3)
        released = forward_peaks(model)
        assert all(map(torch.equal, _gradients(model, seed=3), gradients))
    saved = plain[-1].total_bytes - released[-1].total_bytes
    # A reentrant block has no graph in forward, so nothing is known of it.
    assert saved == 0 if reentrant else saved >= copies_of_blocks(model) - NUM_LAYERS * 1024


def _gradients(model, seed):
    torch.manual_seed(seed)
    for step in range(2):
        loss_of(model, words(step)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


class Casts(TorchDispatchMode):
    """Counts casts of two-dimensional tensors to bfloat16."""

    num_casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            self.num_casts += isinstance(args[0], nn.Parameter)
        return func(*args, **kwargs)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["dropout", "used_twice", "tuple_output"])
def test_no_weight_is_cast_more_often(name, checkpointed):
    def casts(model):
        model.train()
        with Casts() as counted:
            for step in range(3):
                in_autocast(model)(make_batch(step))
        return counted.num_casts

    model: Any = make_model(name)
    technique = ActivationCheckpointing() if checkpointed else None
    with technique.apply(model) if technique else contextlib.nullcontext():
        before = casts(model)
        with EarlyRelease().apply(model):
            # In its second call each block looks at one weight, once.
            num_looks = 0 if name == "used_twice" else len(model.blocks)
            assert casts(model) == before + num_looks
            assert casts(model) == before > 0


def test_blocks_that_are_called_twice_are_left_alone():
    model = make_model("used_twice")
    model.train()
    with ActivationCheckpointing().apply(model):
        before = _model_peak(model)
        with EarlyRelease().apply(model):
            assert _model_peak(model) == before


def _model_peak(model):
    step = in_autocast(model)
    step(make_batch(0))
    with LiveTensors(model) as live:
        step(make_batch(0))
    model.zero_grad()
    return live.peak.total_bytes


def test_evaluation_keeps_its_copies():
    model = roberta().eval()
    ids = words()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), EarlyRelease().apply(model):
        model(ids)
        with Casts() as counted:
            model(ids)
    assert counted.num_casts == 0


def test_evaluation_of_torchs_layers_is_as_before():
    """They compute in another way while there are hooks on them."""
    model = make_model("transformer").eval()
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        expected = model(x)
        with EarlyRelease().apply(model):
            assert torch.equal(model(x), expected)


def test_autocast_is_as_before_after_an_error():
    model = roberta()
    with EarlyRelease().apply(model):
        loss_of(model, words()).backward()
        model.roberta.encoder.layer[2].output.dense.register_forward_hook(_fail)
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(ZeroDivisionError):
                model(words())
            assert torch.is_autocast_cache_enabled()


def _fail(*_):
    raise ZeroDivisionError


def test_undo_restores_the_module():
    model = roberta()
    before, keys = snapshot(model), list(model.state_dict())
    handle = EarlyRelease().apply(model)
    assert len(handle.changes) == NUM_LAYERS
    assert "after each of 4 blocks: 4 x RobertaLayer" in handle.summary
    assert list(model.state_dict()) == keys
    loss_of(model, words()).backward()
    handle.undo()
    handle.undo()
    model.zero_grad()
    assert snapshot(model) == before


def test_copies_are_on_their_own():
    model = roberta(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    expected = copy.deepcopy(model)
    with EarlyRelease().apply(model):
        loss_of(model, words()).backward()
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
    assert snapshot(loaded).keys() == snapshot(model).keys()
    for other in (copied, loaded, expected):
        other.zero_grad()
        other.roberta.embeddings.word_embeddings.weight.data.zero_()
    truth = _gradients(expected, seed=0)
    for other in (copied, loaded):
        assert all(map(torch.equal, _gradients(other, seed=0), truth))


def test_applying_twice_equals_once():
    model = roberta()
    first = EarlyRelease().apply(model)
    with pytest.warns(NoEffectWarning, match="4 of 4 blocks release them already"):
        second = EarlyRelease().apply(model)
    second.undo()
    assert forward_peaks(model)[-1].total_bytes < forward_peaks(roberta())[-1].total_bytes
    first.undo()


def test_blocks_that_share_weights_are_left_alone():
    model = make_model("dropout")
    model.blocks[1].up.weight = model.blocks[0].up.weight
    handle = EarlyRelease().apply(model)
    assert handle.changes == ("blocks.2", "blocks.3")
    assert handle.skipped == ("2 of 4 blocks share weights",)
    handle.undo()


def test_says_when_there_is_no_block():
    with pytest.warns(NoEffectWarning, match='for example `blocks="Block"`'):
        EarlyRelease().apply(make_model("unrepeated"))
    with pytest.warns(NoEffectWarning, match="nothing matches `blocks="):
        EarlyRelease(blocks="Layer").apply(roberta())


def test_refuses_blocks_that_choose_nothing():
    with pytest.raises(ConfigurationError, match="chooses nothing"):
        EarlyRelease(blocks=())


def test_is_predicted_to_the_byte():
    model = roberta()
    techniques = ActivationCheckpointing(), EarlyRelease()
    with techniques[0].apply(model), techniques[1].apply(model):
        measured = [peak.total_bytes for peak in forward_peaks(model)]
    with fake_tensors() as fake:
        copied = fake.copy_module(model)
        with techniques[0].apply(copied), techniques[1].apply(copied):
            assert [peak.total_bytes for peak in forward_peaks(copied)] == measured


def test_compiled_models_compute_the_same():
    model = make_model("dropout").eval()
    x = make_batch(0)
    expected = model(x)
    with EarlyRelease().apply(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)


def test_repr_makes_it_again():
    for technique in (EarlyRelease(), EarlyRelease(blocks="Block")):
        assert eval(repr(technique)) == technique
