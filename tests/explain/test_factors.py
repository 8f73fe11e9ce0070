import pytest
import torch
from torch import nn

from lightning_memsave.api import make_what_if, predict_memory
from lightning_memsave.explain.factors import FACTORS, explain_factors
from lightning_memsave.measure.parameters import parameter_table
from lightning_memsave.units import format_bytes
from tests.helpers import ResidentGrowth

VOCABULARY, TOKENS, SAMPLES = 500, 64, 4


def bert(attention="eager", **changes):
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
    }
    config = BertConfig(**{**sizes, **changes})
    config._attn_implementation = attention
    return BertForMaskedLM(config)


def large_vocabulary():
    return bert(vocab_size=5000)


def ids(samples=SAMPLES, tokens=TOKENS):
    tensor = torch.arange(samples * tokens).view(samples, tokens) % VOCABULARY
    return {"input_ids": tensor, "labels": tensor.clone()}


def ask(name, model, batch, **options):
    return explain_factors(make_what_if(model, batch, **options), [name])[0]


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(1), nn.Linear(12_544, 10)
    )


IMAGES = torch.ones(8, 3, 32, 32)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_samples_and_fixed_cost_come_from_two_predictions(device):
    found = ask("batch size", bert, ids(), device=device)
    whole = predict_memory(bert, ids(), device=device)
    half = predict_memory(bert, ids(2), device=device).by_phase[whole.peak_phase].total_bytes
    each = (whole.peak_bytes - half) / 2
    assert found.figures["bytes_per_sample"] == round(each)
    assert found.figures["fixed_bytes"] == whole.peak_bytes - round(4 * each)
    assert found.num_bytes == round(4 * each)


def test_a_batch_of_one_is_compared_with_two():
    model = nn.Linear(100, 100, bias=False)
    found = ask("batch size", model, torch.ones(1, 100), device="cpu")
    one, two = (predict_memory(model, torch.ones(n, 100), device="cpu") for n in (1, 2))
    each = two.by_phase[one.peak_phase].total_bytes - one.peak_bytes
    assert found.figures["bytes_per_sample"] == each


@pytest.mark.slow
def test_the_largest_batch_fits_and_a_third_more_does_not():
    what_if = make_what_if(bert, ids(), gpu="800MiB")
    (found,) = explain_factors(what_if, ["batch size"])
    assert what_if.num_predictions == 3
    largest = found.figures["largest_batch"]
    assert largest > SAMPLES
    assert predict_memory(bert, ids(largest), gpu="800MiB").device_bytes <= 800 * 2**20
    assert f"At least {largest:,} samples fit" in found.sentence
    more = predict_memory(bert, ids(largest * 4 // 3), gpu="800MiB")
    assert more.device_bytes > 800 * 2**20


def test_a_guessed_batch_takes_no_memory():
    with ResidentGrowth() as growth:
        found = ask("batch size", nn.Linear(100, 1), torch.ones(64, 100), gpu="A100-80GB")
    assert found.figures["largest_batch"] * 400 > 10 * 2**30
    assert growth.num_bytes < 200 * 2**20


def test_not_even_one_sample_fits():
    found = ask("batch size", bert, ids(), gpu="500MiB")
    assert found.figures["largest_batch"] == 0
    assert "Not even one sample fits on the GPU" in found.sentence


def test_a_batch_without_samples_is_unknown():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, y):
            return self.layer(x).mean() + self.layer(y).mean()

    found = ask("batch size", Two(), [torch.ones(4, 3), torch.ones(5, 3)], device="cpu")
    assert (found.verdict, found.num_bytes) == ("unknown", None)


@pytest.mark.parametrize(
    ("attention", "vocabulary", "tokens"), [("eager", VOCABULARY, 64), ("sdpa", 5000, 16)]
)
def test_growth_with_length_is_that_of_predictions(attention, vocabulary, tokens):
    def model():
        return bert(attention, vocab_size=vocabulary)

    found = ask("sequence length", model, ids(tokens=tokens), device="cpu")
    figures = found.figures
    half = predict_memory(model, ids(tokens=tokens // 2), device="cpu").peak_bytes
    assert figures["other_length"] == tokens // 2
    assert figures["other_peak_bytes"] == half
    assert f"with {tokens // 2} the step would need {format_bytes(half)}" in found.sentence
    now = predict_memory(model, ids(tokens=tokens), device="cpu").peak_bytes
    assert min(figures["linear_bytes"], figures["quadratic_bytes"], figures["fixed_bytes"]) >= 0
    parts = figures["fixed_bytes"] + figures["linear_bytes"] + figures["quadratic_bytes"]
    assert parts == pytest.approx(now, rel=0.01)
    assert found.num_bytes == figures["linear_bytes"] + figures["quadratic_bytes"]


# The peak of 64 tokens is elsewhere than that of 32, where the optimizer needs most.
def test_a_peak_that_moves_with_the_length_is_no_parabola():
    def model():
        return bert("sdpa", vocab_size=20_000)

    peaks = {n: predict_memory(model, ids(1, n), device="cpu") for n in (32, 64, 128)}
    assert peaks[32].peak_phase != peaks[64].peak_phase
    found = ask("sequence length", model, ids(1, 64), device="cpu")
    assert found.figures["other_peak_bytes"] == peaks[32].peak_bytes
    assert found.figures["order"] == "linear"
    more = found.figures["linear_bytes"] + 3 * found.figures["quadratic_bytes"]
    assert more == pytest.approx(peaks[128].peak_bytes - peaks[64].peak_bytes, rel=0.01)


@pytest.mark.slow
def test_long_sequences_with_eager_attention_grow_with_the_square():
    found = ask("sequence length", bert, ids(1, 512))
    assert found.figures["order"] == "quadratic"
    assert "with its square" in found.sentence
    with_sdpa = ask("sequence length", lambda: bert("sdpa"), ids(1, 512))
    assert with_sdpa.figures["order"] == "linear"


class Rows:
    """A batch that is no container."""

    def __init__(self, samples=4):
        self.cells = torch.arange(samples * 16 * 8).view(samples, 16, 8) % VOCABULARY
        self.columns = ["a", "b"]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, batch):
        if isinstance(batch, Rows):
            batch = self.table(batch.cells).mean(2)
        return self.encoder(batch)


@pytest.mark.parametrize(
    ("batch", "shorter"), [(Rows(), None), (torch.ones(4, 64, 32), torch.ones(4, 32, 32))]
)
def test_the_sequence_is_what_is_attended_to(batch, shorter):
    what_if = make_what_if(Attending(), batch, device="cpu")
    samples, length, kernel = explain_factors(
        what_if, ["batch size", "sequence length", "attention kernel"]
    )
    if shorter is None:
        shorter = Rows()
        shorter.cells = shorter.cells[:, :8].clone()
    expected = predict_memory(Attending(), shorter, device="cpu").peak_bytes
    assert length.figures["other_peak_bytes"] == pytest.approx(expected, rel=0.01)
    assert length.num_bytes > 0
    given = batch.cells if isinstance(batch, Rows) else batch
    assert samples.figures["num_samples"] == 4
    assert f"{given.shape[1]} tokens" in kernel.sentence or kernel.num_bytes


def test_attention_by_hand_is_found_in_batches_without_ids():
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x)
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    what_if = make_what_if(ByHand(), torch.ones(4, 96, 8), device="cpu")
    length, kernel = explain_factors(what_if, ["sequence length", "attention kernel"])
    assert (length.figures["length"], length.figures["order"]) == (96, "quadratic")
    assert kernel.num_bytes == kernel.figures["num_matrices"] * 4 * 96 * 96 * 4 > 0


def test_what_may_be_a_sequence_is_not_cleared():
    found = ask("sequence length", nn.Linear(8, 8), torch.ones(4, 96, 8), device="cpu")
    assert (found.verdict, found.num_bytes) == ("unknown", None)
    assert "sequence_axis=" in found.sentence


def test_a_batch_without_tensors_is_unknown():
    class OfText(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, texts):
            return self.layer(torch.ones(len(texts), 8))

    class Texts(str):
        __slots__ = ()

    what_if = make_what_if(OfText(), lambda: Texts("words"), device="cpu")
    for found in explain_factors(what_if, ["sequence length", "batch size"]):
        assert (found.verdict, found.num_bytes) == ("unknown", None)


def test_looking_leaves_torch_as_it_was():
    before = nn.functional.scaled_dot_product_attention
    what_if = make_what_if(Attending(), torch.ones(4, 64, 32), device="cpu")
    base = what_if.base()
    assert nn.functional.scaled_dot_product_attention is before
    assert what_if.observed.attended == {64}
    assert what_if.observed.optimizers == ["AdamW"]
    plain = predict_memory(Attending(), torch.ones(4, 64, 32), device="cpu")
    assert base.by_phase == plain.by_phase


def test_a_conv_net_has_no_sequence():
    found = ask("sequence length", conv_net(), IMAGES)
    assert (found.verdict, found.num_bytes) == ("does not matter", 0)
    kernel = ask("attention kernel", conv_net(), IMAGES)
    assert (kernel.verdict, kernel.num_bytes) == ("does not matter", 0)


@pytest.mark.slow
def test_eager_attention_is_compared_with_sdpa():
    found = ask("attention kernel", bert, ids(2, 256))
    eager = predict_memory(bert, ids(2, 256)).peak_bytes
    sdpa = predict_memory(lambda: bert("sdpa"), ids(2, 256)).peak_bytes
    assert found.num_bytes == eager - sdpa > 0.2 * eager
    assert found.verdict == "matters"
    assert 'model.set_attn_implementation("sdpa")' in found.sentence


def test_sdpa_is_left_as_it_is():
    model = bert("sdpa")
    found = ask("attention kernel", model, ids(2, 256))
    assert (found.verdict, found.sentence) == ("does not matter", "It is `sdpa` already.")
    assert model.config._attn_implementation == "sdpa"


def test_scores_of_other_models_are_counted():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, 16)

        def forward(self, input_ids):
            x = self.table(input_ids)
            return ((x @ x.transpose(1, 2)).softmax(-1) @ x).sum()

    found = ask("attention kernel", Attention(), {"input_ids": ids()["input_ids"]}, device="cpu")
    num = found.figures["num_matrices"]
    assert num >= 1
    assert found.num_bytes == num * SAMPLES * TOKENS * TOKENS * 4


def test_old_gradients_are_those_at_the_peak_in_forward():
    batch = ids(2, 16)
    found = ask("previous gradients", large_vocabulary, batch, device="cpu")
    base = predict_memory(large_vocabulary, batch, device="cpu")
    first = predict_memory(large_vocabulary, batch, settings={"precision": "32-true"}, device="cpu")
    assert base.peak_phase == "forward"
    assert found.num_bytes == base.peak.gradient_bytes
    assert found.num_bytes == 4 * parameter_table(large_vocabulary()).num_parameters
    assert found.figures["saved_bytes"] == base.peak_bytes - first.peak_bytes > 0


def test_old_gradients_are_gone_where_they_are_freed_first():
    found = ask(
        "previous gradients", bert, ids(), settings={"micro_batch_size": "auto"}, device="cpu"
    )
    assert (found.verdict, found.num_bytes) == ("does not matter", 0)


def test_logits_are_counted_and_belong_to_the_vocabulary():
    what_if = make_what_if(bert, ids(), device="cpu")
    cardinality, copies = explain_factors(
        what_if, ["vocabulary and labels", "copies of the logits"]
    )
    logits = SAMPLES * TOKENS * VOCABULARY * 4
    assert copies.num_bytes == copies.figures["num_copies"] * logits > 0
    assert cardinality.figures["logits_bytes"] == copies.num_bytes
    table = VOCABULARY * 32 * 4 * 4  # with gradient and two of AdamW
    assert cardinality.figures["table_bytes"] >= table


def test_classes_are_the_outputs_of_a_conv_net():
    found = ask("copies of the logits", conv_net(), IMAGES, device="cpu")
    assert found.num_bytes == found.figures["num_copies"] * 8 * 10 * 4


def test_structure_is_what_parameters_cost():
    found = ask("model structure", bert, ids(), device="cpu")
    peak = predict_memory(bert, ids(), device="cpu").peak
    costs = peak.parameter_bytes + peak.gradient_bytes + peak.optimizer_state_bytes
    assert found.num_bytes == costs


def test_the_allocator_needs_more_than_tensors():
    base = predict_memory(bert, ids())
    least_bytes = base.device_bytes - base.context_bytes
    assert base.allocated_bytes <= least_bytes == base.least_reserved_bytes <= base.reserved_bytes


def test_without_a_batch_parameters_are_answered_and_the_rest_is_unknown():
    found = {s.name: s for s in explain_factors(make_what_if(bert))}
    assert found.keys() == FACTORS.keys()
    assert found["batch size"].verdict == "unknown"
    assert found["model structure"].num_bytes >= 16 * parameter_table(bert()).num_parameters


def test_a_change_that_the_model_refuses_makes_a_factor_unknown():
    class Eight(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x.view(4, 8))

    found = ask("batch size", Eight(), torch.ones(4, 8), device="cpu")
    assert found.verdict == "unknown"
    assert "fails with a batch of 2" in found.sentence


def test_a_peak_of_nothing_is_no_reason_to_matter():
    found = ask("vocabulary and labels", nn.ReLU(), None)
    assert (found.verdict, found.num_bytes) == ("does not matter", 0)
