import json
import re

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_memsave.api import explain_memory, predict_memory
from lightning_memsave.explain.dominant_parts import ModelStates
from lightning_memsave.targets.find import load_target
from lightning_memsave.units import format_bytes
from tests.explain.test_factors import IMAGES, bert, conv_net, ids
from tests.tabular_bert import LARGE_VOCABULARY, Rows, TabularBert, Vocabulary


def explain(model, batch=None, **options):
    return explain_memory(model, batch, **{"device": "cpu", "remedies": False, **options})


def text_of(found):
    return " ".join(found.sentences)


def test_a_function_goes_with_a_batch_in_words():
    def make():
        return nn.Linear(10, 2)

    peak = explain(make, torch.ones(8, 10)).prediction.peak
    assert explain(make, "float32[8,10]").prediction.peak == peak
    assert explain(make(), "float32[8,10]").prediction.peak == peak


def test_a_model_that_cannot_run_is_explained_by_its_parameters():
    found = explain(lambda: TabularBert(LARGE_VOCABULARY))
    assert found.table.num_parameters == 874_326_757
    assert "hold 88.9 % of the 874,326,757 parameters" in found.sentences[0]
    assert "11.59 GiB of the 13.03 GiB" in found.sentences[1]
    assert found.prediction is None
    assert found.remedies is None


def test_batches_that_are_no_tensors_are_predicted():
    columns = {"city": 3000, "month": 12}
    rows = Rows(tuple(columns), torch.full((2, 3, 2), 7), torch.full((2, 3, 2), 7))
    rows.ids[..., 1] = rows.labels[..., 1] = 3007

    def model():
        return TabularBert(3019, 2, num_layers=1, vocabulary=Vocabulary(columns))

    found = explain(model, rows, factors=["batch size", "vocabulary and labels"])
    assert found.prediction.peak_bytes == predict_memory(model, rows, device="cpu").peak_bytes
    batch = found.factor("batch size")
    assert batch.figures["num_samples"] == 2
    assert found.factor("vocabulary and labels").verdict == "matters"


def test_a_vocabulary_that_dominates_is_named():
    def model():
        return bert(vocab_size=50_000)

    names = ["model structure", "vocabulary and labels", "copies of the logits"]
    found = explain(model, ids(1, 16), factors=names)
    prediction = predict_memory(model, ids(1, 16), device="cpu")
    costs = ModelStates.from_prediction(prediction, "AdamW").by_module
    table = costs["bert.embeddings.word_embeddings"]
    assert found.factor("vocabulary and labels").figures["table_bytes"] == table
    assert f"it needs {format_bytes(table)} of the" in text_of(found)
    assert "`bert.embeddings.word_embeddings` (50,000 x 32) holds 9" in text_of(found)
    matters = max(found.factors, key=lambda s: s.num_bytes or 0)
    assert matters.name in {"vocabulary and labels", "model structure"}


def test_logits_that_dominate_are_named():
    names = ["copies of the logits"]
    found = explain(lambda: bert(vocab_size=5000), ids(16, 64), factors=names)
    copies = found.factor("copies of the logits")
    assert copies.verdict == "matters"
    assert f"{copies.figures['num_copies']} tensors of 5,000 outputs" in copies.sentence
    assert format_bytes(copies.num_bytes) in copies.sentence


def test_activations_that_dominate_are_named_with_their_blocks():
    def model():
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))

    found = explain(model, torch.ones(10_000, 32))
    prediction = predict_memory(model, torch.ones(10_000, 32), device="cpu")
    share = prediction.peak.activation_bytes / prediction.peak_bytes
    assert f"({share:.0%})" in found.sentences[1]
    assert found.sentences[1].startswith("The peak holds activations")
    assert "the 6 blocks of `*`" in text_of(found)
    assert found.factor("batch size").verdict == "matters"
    assert found.factor("model structure").verdict == "does not matter"


@pytest.mark.slow
def test_scores_of_eager_attention_are_named():
    names = ["attention kernel", "sequence length"]
    found = explain(bert, ids(1, 512), device="cuda", factors=names)
    assert found.factor("attention kernel").verdict == "matters"
    assert found.factor("sequence length").figures["order"] == "quadratic"


def test_a_conv_net_is_explained_without_a_sequence():
    found = explain(conv_net, IMAGES)
    assert "tokens" not in text_of(found)
    assert "`0`" in text_of(found) or "`2`" in text_of(found) or "`*`" in text_of(found)
    assert found.factor("sequence length").num_bytes == 0
    assert found.factor("batch size").verdict == "matters"


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.wrapped_twice = nn.Linear(100, 100)

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return self.wrapped_twice(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_modules_train_in_their_own_way():
    found = explain(Lit(), torch.ones(4, 100))
    assert found.prediction.peak.optimizer_state_bytes == 0
    assert found.factor("model structure").num_bytes == 2 * 4 * 10_100
    assert "With SGD it needs" in text_of(found)
    assert found.factor("model structure").sentence.startswith("Parameters and gradients:")


def test_gradients_that_are_not_alive_are_not_said_to_be_counted():
    names = ["model structure", "vocabulary and labels"]
    found = explain(lambda: bert("sdpa"), ids(8, 64), factors=names)
    peak, number = found.prediction.peak, found.table.num_parameters
    assert peak.gradient_bytes == 0
    fixed = peak.parameter_bytes + peak.optimizer_state_bytes
    assert f"of the {format_bytes(fixed)} that parameters and optimizer state" in text_of(found)
    assert f"the gradients, {format_bytes(4 * number)}, are not alive then" in text_of(found)
    structure = found.factor("model structure")
    assert structure.num_bytes == fixed
    assert structure.sentence.startswith("Parameters and state of AdamW:")
    assert "gradients and" not in found.factor("vocabulary and labels").sentence


def test_targets_and_sizes_are_taken(tmp_path):
    bert().config.save_pretrained(tmp_path)
    # Written by hand in real configs: which class it is for.
    target = load_target(tmp_path, task="masked_lm", arguments={"num_hidden_layers": 1})
    found = explain(target, "2x16", factors=[])
    assert found.prediction is not None
    assert found.prediction.peak.input_bytes == 3 * 2 * 16 * 8
    assert not explain(target).prediction


def test_checkpoints_are_explained_without_code(tmp_path):
    torch.save(bert(vocab_size=5000).state_dict(), tmp_path / "weights.pt")
    found = explain(str(tmp_path / "weights.pt"), ids())
    assert found.prediction is None
    assert found.factor("batch size").verdict == "unknown"
    assert "5,000 x 32" in found.sentences[0]


@pytest.mark.slow
def test_all_of_it_is_shown_and_given_as_json():
    # A long line to type.
    settings = {"accumulate_grad_batches": 2, **dict.fromkeys(("predict", "report"), False)}
    factors = ["attention kernel"]
    found = explain_memory(bert, ids(), settings=settings, gpu="GTX-1660-Ti", factors=factors)
    text = str(found)
    for part in ("What the peak depends on", "What to type", "largest tensors", "(whole)"):
        assert part in text
    assert "GTX-1660-Ti has 5.80 GiB: it fits" in text_of(found)
    assert "It fits GTX-1660-Ti without changes." in text
    assert all(len(line) <= 110 for line in text.splitlines())
    typed = text.partition("What to type\n")[2].splitlines()
    assert any(line.startswith("    ") for line in typed)
    marks = re.compile(r"( *\d+\. MemSave| *\d+\. model|    \S|It fits|$)")
    assert all(marks.match(line) for line in typed)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["factors"][0]["figures"] == dict(found.factors[0].figures)
    assert plain["remedies"][0]["how"] == found.remedies[0].how
    assert plain["prediction"]["peak_bytes"] == found.prediction.peak_bytes
    assert found.num_predictions <= 20


def test_says_what_is_missing_on_a_small_card():
    found = explain(bert, ids(), gpu="256MiB", device="cuda", factors=[])
    missing = found.prediction.device_bytes - 256 * 2**20
    assert f"it does not fit, {format_bytes(missing)} are missing" in text_of(found)


def test_unknown_names_of_factors_are_refused():
    with pytest.raises(KeyError):
        explain(nn.Linear(2, 2)).factor("weather")
