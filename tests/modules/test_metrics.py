"""What is logged equals what one computes by hand from all logits."""

import math

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from lightning_memsave.modules.steps import LossPerplexity, WeightedMean, accuracy, num_targets
from tests.callbacks.lit import PACKAGES, make_trainer, without_dropout
from tests.modules.tiny import CONFIGS, ONLY_CHECKPOINTING, VOCAB, loader, make_lit


@torch.no_grad()
def logits_and_targets(lit, data) -> tuple[Tensor, Tensor]:
    """All of them, flat, with the shift of causal models and without what is not asked for."""
    lit.eval()
    logits, targets = [], []
    for batch in data:
        out, labels = lit.predict_step(batch, 0), batch["labels"]
        if lit.task == "causal_lm":
            out, labels = out[:, :-1], labels[:, 1:]
        logits.append(out.flatten(0, -2))
        targets.append(labels.flatten())
    is_asked = torch.cat(targets) != -100
    return torch.cat(logits)[is_asked], torch.cat(targets)[is_asked]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", CONFIGS)
def test_validation_equals_a_hand_computation(name, package):
    lit = make_lit(name, package, memsave=None)
    with torch.no_grad():  # logits that differ, so that some answers are right
        for parameter in lit.parameters():
            parameter.mul_(3.0)
    data = loader(lit.task, length=14)  # the last batch is shorter
    [logged] = make_trainer(PACKAGES[package]).validate(lit, data, verbose=False)
    logits, targets = logits_and_targets(lit, data)

    assert 0 < len(targets) < 14 * 12
    loss = nn.functional.cross_entropy(logits, targets)
    right = MulticlassAccuracy(num_classes=logits.shape[-1], average="micro")(logits, targets)
    assert logged.pop("val_loss") == pytest.approx(loss.item(), rel=1e-5)
    assert logged.pop("val_accuracy") == pytest.approx(right.item(), rel=1e-5)
    if lit.task != "sequence_classification":
        expected = Perplexity()(logits.unsqueeze(0), targets.unsqueeze(0))
        assert logged.pop("val_perplexity") == pytest.approx(expected.item(), rel=1e-4)
    assert logged == {}


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_training_perplexity_is_that_of_all_tokens_of_the_epoch(name):
    lit = make_lit(name, memsave=ONLY_CHECKPOINTING, learning_rate=1e-12)
    without_dropout(lit)
    data = loader(lit.task, length=14)
    trainer = make_trainer()
    trainer.fit(lit, data, data)
    metrics = trainer.callback_metrics
    assert metrics["train_perplexity"] == pytest.approx(metrics["val_perplexity"].item(), rel=1e-5)


def test_perplexity_is_exp_of_the_weighted_mean():
    metric = LossPerplexity()
    metric.update(torch.tensor(1.0), torch.tensor(3))
    metric.update(torch.tensor(2.0), torch.tensor(1))
    assert metric.compute().item() == pytest.approx(math.exp(1.25))


def test_a_batch_without_targets_counts_nothing_and_a_bad_loss_is_seen():
    metric = WeightedMean()
    metric.update(torch.tensor(2.0), torch.tensor(4))
    metric.update(torch.tensor(math.nan), torch.tensor(0))
    assert metric.compute() == 2.0
    metric.update(torch.tensor(math.nan), torch.tensor(1))
    assert metric.compute().isnan()


def test_half_precision_losses_are_summed_in_float32():
    metric = WeightedMean().bfloat16()
    for _ in range(300):
        metric.update(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1))
    assert metric.compute() == 1.0
    assert metric.count == 300.0


def test_causal_models_are_asked_for_all_but_the_first_token():
    labels = torch.tensor([[7, 1, -100], [8, 0, 1]])
    assert num_targets("causal_lm", labels) == 3
    assert num_targets("masked_lm", labels) == 5
    logits = nn.functional.one_hot(torch.tensor([[1, 0, 0], [0, 0, 0]]), VOCAB).float()
    assert accuracy("causal_lm", logits, labels) == pytest.approx(2 / 3)
