"""Micro-batches of many kinds of losses: the gradient of the whole batch, or a refusal."""

import copy
import functools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
import transformers
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own abbreviation

from lightning_memsave import MemSaveCallback
from lightning_memsave.errors import (
    ConfigurationError,
    ExactnessWarning,
    IncompatibleError,
    MemsaveWarning,
)
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.micro_batching.loss_probe import LossProbe
from lightning_memsave.techniques.micro_batching.module_state import ModuleState
from tests.callbacks.lit import (
    assert_same,
    fit,
    gradients_of,
    late,
    loader_of,
    make_lit,
    no_step,
    only,
    rows_of,
    without_dropout,
)

pytestmark = pytest.mark.usefixtures("no_prediction")

VOCABULARY, WIDTH, TOKENS, SAMPLES, CLASSES = 13, 8, 6, 7, 4
REFUSED = "refused"
BY_SAMPLES = "weighted by samples"
UNMASKED = "entries of `labels` that are not -100"

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Kind:
    """A loss, with its batch, and what micro-batches are weighted by; or ``REFUSED``."""

    loss_of: Loss
    make_batch: Callable[[], Any]
    expected: str
    make_model: Callable[[], nn.Module]


# Models


class Tokens(nn.Module):
    """Sees each token and the mean of its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        return self.head(torch.tanh(hidden + hidden.mean(1, keepdim=True)))


def vectors(between: Any = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), between(), nn.Linear(16, CLASSES))


class WithQueue(nn.Module):
    """Compares with what came before, and keeps what is new."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("queue", torch.randn(16, CLASSES).double())

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.layer(x), dim=-1)
        compared = z @ self.queue.T
        self.queue = torch.cat([z.detach(), self.queue])[:16]
        return compared


# Batches


def ids(low: int = 1) -> Tensor:
    return torch.randint(low, VOCABULARY, (SAMPLES, TOKENS))


def uneven(fraction: float = 0.9) -> Tensor:
    """Marks entries, each sample others; the first of every second sample is among them."""
    marks = torch.rand(SAMPLES, TOKENS) < torch.linspace(0.1, fraction, SAMPLES)[:, None]
    marks[:, 0] = torch.arange(SAMPLES) % 2 == 0
    marks[:, 1] = False
    return marks


def labelled(ignored: int = -100, key: str = "labels") -> dict[str, Tensor]:
    x = ids()
    return {"x": x, key: x.masked_fill(uneven(), ignored)}


def padded() -> dict[str, Tensor]:
    x = ids()
    lengths = torch.arange(2, 2 + SAMPLES).clamp(max=TOKENS)
    mask = torch.arange(TOKENS) < lengths[:, None]
    return {"x": x * mask, "mask": mask, "lengths": lengths}


def float_mask() -> dict[str, Tensor]:
    batch = padded()
    return {"x": batch["x"], "mask": batch["mask"].double()}


def regression(**more: Any) -> dict[str, Any]:
    y = torch.randn(SAMPLES, CLASSES).double()
    return {"x": torch.randn(SAMPLES, WIDTH).double(), "y": y, **more}


def classes(num_samples: int = SAMPLES, **more: Any) -> dict[str, Tensor]:
    x, y = torch.randn(SAMPLES, WIDTH).double(), torch.tensor([0, 1, 2, 3, 0, 0, 1])
    return {"x": x[:num_samples], "y": y[:num_samples], **more}


def partly_labelled() -> dict[str, Tensor]:
    batch = classes()
    batch["y"][[1, 4]] = -100
    return batch


def weighted() -> dict[str, Tensor]:
    return regression(w=torch.rand(SAMPLES).double() + 0.1)


def with_gaps() -> dict[str, Tensor]:
    """The first two samples lack as many targets as each other, and later ones more."""
    batch = regression()
    gone = torch.rand(SAMPLES, CLASSES) < torch.linspace(0, 0.8, SAMPLES)[:, None]
    gone[:2] = False
    gone[:2, 0] = True
    return batch | {"y": batch["y"].masked_fill(gone, torch.nan)}


def series() -> dict[str, Tensor]:
    x, lengths = torch.randn(SAMPLES, TOKENS, WIDTH), torch.tensor([3, 3, 6, 5, 4, 2, 1])
    inside = torch.arange(TOKENS) < lengths[:, None]
    targets = torch.randn(SAMPLES, TOKENS, CLASSES)
    return {"x": (x * inside[..., None]).double(), "y": targets.double()}


# Losses over tokens


def ce(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **how)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights.flatten()).sum() / weights.sum()


def squares(model):
    return sum(p.square().sum() for p in model.parameters())


def masked(model, batch, **how):
    return ce(model(batch["x"]), batch["labels"], **how)


def shifted_mask(model, batch):
    losses = ce(model(batch["x"])[:, :-1], batch["x"][:, 1:], reduction="none")
    return weighted_mean(losses, batch["mask"][:, 1:])


def masked_by_comparison(model, batch):
    losses = ce(model(batch["x"]), batch["labels"], reduction="none")
    return losses[batch["labels"].flatten() != 5].mean()


def mean_per_sequence(model, batch):
    losses = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["labels"], reduction="none")
    keep = batch["labels"] != -100
    return ((losses * keep).sum(1) / keep.sum(1)).mean()


def two_means_of_different_things(model, batch):
    logits = model(batch["x"])
    return ce(logits, batch["labels"]) + logits.square().mean()


def packed_with_offsets(model, batch):
    parts = torch.tensor_split(batch["x"], batch["starts"][1:-1])
    return torch.stack([F.cross_entropy(model(p[None])[0], p) for p in parts]).mean()


# Losses over samples


def mse(model, batch, **how):
    return F.mse_loss(model(batch["x"]), batch["y"], **how)


def classification(model, batch):
    return ce(model(batch["x"]), batch["y"])


def errors(model, batch):
    return (model(batch["x"]) - batch["y"]).square()


def sample_weights(model, batch):
    return weighted_mean(errors(model, batch).mean(1), batch["w"])


def mean_of_weighted_errors(model, batch):
    return (errors(model, batch).mean(1) * batch["w"]).mean()


def contrastive(model, batch):
    z = model(batch["x"])
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def mixup(model, batch, permuted=torch.randperm):
    order = permuted(len(batch["x"]))
    x, y = ((v + v[order]) / 2 for v in batch.values())
    return F.mse_loss(model(x), y)


def shuffled(length):
    order = [*range(length)]
    random.Random(0).shuffle(order)
    return order


def dice(model, batch):
    chosen, target = model(batch["x"]).softmax(-1), F.one_hot(batch["y"], CLASSES)
    return 1 - 2 * (chosen * target).sum() / (chosen.sum() + target.sum() + chosen.square().sum())


def gradient_penalty(model, batch):
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch["y"]) + slope.square().sum(1).mean()


def known_errors(model, batch):
    known = ~batch["y"].isnan()
    return (model(batch["x"])[known] - batch["y"][known]).square().mean()


def series_padded_with_zeros(model, batch):
    inside = batch["x"].abs().sum(-1) > 0
    return (model(batch["x"])[inside] - batch["y"][inside]).square().mean()


def triplets(model, batch):
    """Two samples have no positive and no negative at once."""
    z = F.normalize(model(batch["x"]), dim=-1)
    distances, same = torch.cdist(z, z), batch["y"][:, None] == batch["y"]
    positive = (distances * same).max(1).values
    negative = distances.masked_fill(same, torch.inf).min(1).values
    return F.relu(positive - negative + 0.2).mean()


def momentum_contrast(model, batch):
    return F.cross_entropy(model(batch["x"]), torch.zeros(len(batch["x"]), dtype=torch.long))


OF_CLASSES = torch.tensor([0.2, 1.0, 3.0, 0.7], dtype=torch.float64)
OF_TOKENS = torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)
PADDED = "sum of `lengths`|sum of `mask`|entries of `x` that are not 0"
NOT = "entries of `labels` that are not {}"
FEWER = "have different numbers of samples (['x']: 7, ['y']: 7, ['names']: 2)"
TOKEN_KINDS: dict[str, tuple[Loss, Any, str]] = {
    "masked": (masked, labelled, UNMASKED),
    "regulariser": (lambda m, b: masked(m, b) + 0.1 * squares(m), labelled, UNMASKED),
    "shifted": (
        lambda m, b: ce(m(b["x"])[:, :-1], b["labels"][:, 1:]),
        labelled,
        f"{UNMASKED}, without the first",
    ),
    "in a tuple": (
        lambda m, b: ce(m(b[0]), b[1]),
        lambda: (*labelled().values(),),
        "entries of `batch[1]` that are not -100",
    ),
    "another key": (
        lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["tags"]),
        lambda: labelled(key="tags"),
        "entries of `tags` that are not",
    ),
    "ignored": (
        functools.partial(masked, ignore_index=-1),
        functools.partial(labelled, -1),
        NOT.format(-1),
    ),
    "masked by comparison": (masked_by_comparison, lambda: labelled(5), NOT.format(5)),
    "bool mask": (
        lambda m, b: weighted_mean(ce(m(b["x"]), b["x"], reduction="none"), b["mask"]),
        padded,
        PADDED,
    ),
    "shifted float mask": (
        shifted_mask,
        float_mask,
        "sum of `mask`, without the first|entries of `x` that are not 0",
    ),
    "mean per sequence": (mean_per_sequence, labelled, BY_SAMPLES),
    "sum": (functools.partial(masked, reduction="sum"), labelled, "summed"),
    "class weights": (
        functools.partial(masked, weight=OF_TOKENS),
        labelled,
        "class weights at `labels`",
    ),
    "perplexity": (lambda m, b: masked(m, b).exp(), labelled, REFUSED),
    "two means": (two_means_of_different_things, labelled, REFUSED),
    "time first": (
        lambda m, b: ce(m(b["x"].T), b["x"].T),
        lambda: {"x": ids().T.contiguous()},
        REFUSED,
    ),
    "packed in one row": (
        lambda m, b: ce(m(b["x"]), b["x"]),
        lambda: {"x": ids().view(1, -1)},
        "one sample",
    ),
    "packed with offsets": (
        packed_with_offsets,
        lambda: {"x": ids().flatten(), "starts": torch.arange(0, 43, 6)},
        REFUSED,
    ),
    "gather of targets": (
        lambda m, b: ce(m(b["x"]).mean(1)[b["at"]], b["x"][b["at"], 0]),
        lambda: {"x": ids(), "at": torch.arange(SAMPLES)},
        REFUSED,
    ),
}
VECTOR_KINDS: dict[str, tuple[Loss, Any, str]] = {
    "mse": (mse, regression, BY_SAMPLES),
    "gradient penalty": (gradient_penalty, regression, BY_SAMPLES),
    "over a constant": (lambda m, b: errors(m, b).sum() / 32, regression, "summed"),
    "rmse": (lambda m, b: mse(m, b).sqrt(), regression, REFUSED),
    "worst sample": (lambda m, b: errors(m, b).mean(1).max(), regression, REFUSED),
    "sample weights": (sample_weights, weighted, "sum of `w`"),
    "mean of weighted errors": (mean_of_weighted_errors, weighted, BY_SAMPLES),
    "classification": (classification, classes, BY_SAMPLES),
    "one-dimensional": (classification, partly_labelled, "entries of `y` that are not -100"),
    "weights of classes": (
        lambda m, b: ce(m(b["x"]), b["y"], weight=OF_CLASSES),
        classes,
        "class weights at `y`",
    ),
    **{
        f"weights in a batch of {n}": (
            lambda m, b: ce(m(b["x"]), b["y"], weight=b["weight"]),
            functools.partial(classes, n, weight=OF_CLASSES),
            "class weights at `y`",
        )
        for n in (CLASSES, SAMPLES)  # as many as classes, and not
    },
    "leading size one": (
        lambda m, b: (m(b["x"]) * b["scale"] - b["y"]).square().mean(),
        lambda: regression(scale=torch.randn(1, CLASSES).double()),
        BY_SAMPLES,
    ),
    "fewer names": (mse, lambda: regression(names=["a", "b"]), FEWER),
    "contrastive": (contrastive, regression, REFUSED),
    "mixup": (mixup, regression, REFUSED),
    # Those that two samples alone do not show.
    "missing targets": (known_errors, with_gaps, "entries of `y` that are not NaN"),
    "padded series": (series_padded_with_zeros, series, "vectors of `x` that are not 0"),
    "dice": (dice, classes, REFUSED),
    "triplets": (triplets, classes, REFUSED),
    "triplets beside": (lambda m, b: classification(m, b) + triplets(m, b), classes, REFUSED),
    "mixup by python": (lambda m, b: mixup(m, b, shuffled), regression, REFUSED),
    "under a margin": (lambda m, b: F.relu(m(b["x"]).abs().mean() - 100), regression, REFUSED),
}
KINDS: dict[str, Kind] = {
    **{name: Kind(*kind, Tokens) for name, kind in TOKEN_KINDS.items()},
    **{name: Kind(*kind, vectors) for name, kind in VECTOR_KINDS.items()},
}


# Models of Hugging Face

_LAYERS: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
_LAYERS |= {"intermediate_size": 16}
SMALL = _LAYERS | {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
_GPT2: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
_GPT2 |= {"vocab_size": VOCABULARY}
_VIT = _LAYERS | {"image_size": 4, "patch_size": 2}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2))


def text() -> dict[str, Tensor]:
    batch = labelled()
    return {"input_ids": batch["x"], "labels": batch["labels"]}


def llava_batch() -> dict[str, Tensor]:
    batch = text()
    batch["input_ids"] = batch["input_ids"].clamp(max=VOCABULARY - 2)
    batch["input_ids"][:, :4] = VOCABULARY - 1
    return batch | {"pixel_values": torch.randn(SAMPLES, 3, 4, 4).double()}


def encoder_decoder() -> nn.Module:
    encoder = transformers.BertConfig(**SMALL)
    decoder = transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.pad_token_id = config.decoder_start_token_id = 0
    return transformers.EncoderDecoderModel(config=config)


def llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VIT),
        text_config=transformers.LlamaConfig(**SMALL),
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


PLAIN = f"{UNMASKED}, proven"
SHIFTED = f"{UNMASKED}, without the first of each sample, proven"
MODELS: dict[str, Kind] = {
    "Bert": Kind(loss_of_model, text, PLAIN, bert),
    "GPT2": Kind(loss_of_model, text, SHIFTED, gpt2),
    "EncoderDecoder": Kind(loss_of_model, text, PLAIN, encoder_decoder),
    "Llava": Kind(loss_of_model, llava_batch, SHIFTED, llava),
}
KINDS |= MODELS


def row(callback: MemSaveCallback) -> Any:
    return rows_of(callback)["micro_batch_size"]


def train(model: nn.Module, batches: list[Any], loss_of: Loss, *callbacks: Any) -> Any:
    """The gradient of each batch; the model never changes."""
    return gradients_of(model, batches, loss_of, *callbacks, logs=False)[0]


def assert_proven(
    batches: Any, model: nn.Module, loss_of: Loss, callback: Any, details: str, *, ours: Any = None
) -> None:
    """The gradients are those of whole batches, and the row says what proves it."""
    truth = train(model, batches, loss_of)
    assert difference(train(model, batches, ours or loss_of, callback), truth) < 1e-11
    assert details in " ".join(row(callback).details)


def difference(first: list[list[Tensor]], second: list[list[Tensor]]) -> float:
    assert len(first) == len(second) > 0
    ours, truth = (
        torch.cat([g.flatten() for step in run for g in step]) for run in (first, second)
    )
    return float((ours - truth).norm() / truth.norm())


@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")
@pytest.mark.parametrize("name", KINDS)
def test_the_gradient_of_the_whole_batch_or_a_refusal(name):
    each = KINDS[name]
    torch.manual_seed(3)
    batches, model = [each.make_batch()], without_dropout(each.make_model()).train()
    truth = train(model, batches, each.loss_of)
    callback = only(3)  # of 7 samples: 3, 3 and 1
    if each.expected in (REFUSED, FEWER):
        with pytest.raises(IncompatibleError, match=r"loss_weight=|split_batch=") as caught:
            train(model, batches, each.loss_of, callback)
        assert each.expected == REFUSED or each.expected in str(caught.value)
        return
    ours = train(model, batches, each.loss_of, callback)
    # Hugging Face computes the loss of causal models in float32.
    assert difference(ours, truth) < (1e-6 if name in MODELS else 1e-11)
    if each.expected != "one sample":
        found = row(callback)
        assert any(text in found.details[1] for text in each.expected.split("|")), found


def dropout_batches() -> list[Any]:
    return [regression(extra=torch.ones(SAMPLES)) for _ in range(3)]


class Counting(nn.Module):
    """Keeps all kinds of things that the proof must not change."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = vectors(nn.Dropout)
        self.register_buffer("mean", torch.zeros(()).double())
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.metric = torchmetrics.MeanMetric()
        self.unregistered = [torchmetrics.MeanMetric()]
        self.queue = torch.zeros(3)  # neither parameter nor buffer
        self.teacher = nn.Linear(2, 2)
        self.count = 0
        self.losses: list[float] = []
        self.by_name: dict[str, list[float]] = {"all": []}
        self.recent: deque[float] = deque(maxlen=2)
        self.sizes: set[int] = set()
        self.generator = torch.Generator().manual_seed(3)
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)

    def loss_of(self, batch: Any) -> Tensor:
        loss = F.mse_loss(self.model(batch["x"]), batch["y"])
        draws: list[Any] = [torch.rand(()), random.random(), np.random.rand(), self.python.random()]
        draws += [self.numpy.random(), torch.rand((), generator=self.generator)]
        with torch.no_grad():
            self.mean.mul_(0.9).add_(loss)
            self.seen += 1
            self.queue[0] += 1
            self.teacher.weight.mul_(0.9)
            batch["extra"].mul_(2)
        self.metric(loss.detach())
        self.unregistered[0](loss.detach())
        self.count += 1
        self.losses.append(loss.item())
        self.by_name["all"].append(sum(map(float, draws)))
        self.recent.append(loss.item())
        self.sizes.add(len(batch["x"]) * self.count)
        return loss

    def facts(self) -> list[Any]:
        metrics = [m.compute().item() for m in (self.metric, *self.unregistered)]
        tensors = [self.mean, self.seen, self.queue, self.teacher.weight]
        return [
            *(t.tolist() for t in tensors),
            metrics,
            *(self.count, self.losses, self.by_name, list(self.recent), self.sizes),
        ]


class TestTheProof:
    def test_leaves_no_trace(self):
        """A whole batch trains bit for bit as without it; `training_step` was called by both."""
        torch.manual_seed(3)
        batches, models, gradients = dropout_batches(), [], []
        for callbacks in ([], [only(SAMPLES)], [only("auto")]):
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
            model = Counting()
            given = [{k: v.clone() for k, v in batch.items()} for batch in batches]
            calls: list[int] = []

            def loss_of(model, batch, calls=calls):
                calls.append(len(batch["x"]))
                models.append(model)
                return model.loss_of(batch)

            gradients.append(train(model, given, loss_of, *callbacks))
            # A size that no batch exceeds needs no proof.
            proof = [2, 1, 1, SAMPLES, 4, 3] if len(gradients) == 3 else []
            assert calls == [*proof, *[SAMPLES] * 3]
        plain, fixed, auto = (models[index].facts() for index in (0, 3, 6))
        assert plain == fixed == auto
        for run in gradients[1:]:
            same = zip(run, gradients[0], strict=True)
            assert all(torch.equal(a, b) for x, y in same for a, b in zip(x, y, strict=True))

    def test_leaves_weights_that_a_step_replaces(self):
        def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
            pairs = zip(self.teacher.parameters(), self.model.parameters(), strict=True)
            for average, param in pairs:
                average.data = average.data * 0.9 + param.data * 0.1
            loss = self.model(batch)
            self.log("loss", loss)
            return loss

        lit = make_lit(model="tied", training_step=training_step)
        lit.teacher = copy.deepcopy(lit.model).requires_grad_(False)
        assert_same(fit(lit, only("auto")), fit(lit))

    def test_logs_nothing(self):
        logged: list[Any] = []

        class Logger(CSVLogger):
            def log_metrics(self, metrics, step=None):
                logged.append((step, sorted(metrics)))

        def training_step(self, batch, batch_idx):
            self.logger.log_metrics({"own": 1.0}, step=self.global_step)
            self.log(f"of {len(batch['x'])}", 1.0)
            return F.mse_loss(self.model(batch["x"]), batch["y"])

        lit = make_lit(
            model=vectors().double(),
            training_step=training_step,
            validation_step=no_step,
            train_dataloader=lambda self: loader_of(dropout_batches()),
        )
        result = fit(lit, only("auto"), logger=Logger("."), log_every_n_steps=1, max_steps=1)
        assert logged == [(0, ["own"]), (0, ["epoch", f"of {SAMPLES}"])]
        assert list(result[2].callback_metrics) == [f"of {SAMPLES}"]

    @pytest.mark.parametrize("model", ["dropout", "batch_norm", "attention"])
    def test_randomness_does_not_spoil_it(self, model):
        if model == "attention":
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)
            make = lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Linear(4, WIDTH), layer)  # noqa: E731
        else:
            norm = nn.BatchNorm1d(16) if model == "batch_norm" else nn.Dropout(0.3)
            make = lambda: nn.Sequential(nn.Linear(WIDTH, 16), norm, nn.Linear(16, 3))  # noqa: E731

        def loss_of(model, batch):
            noisy = batch["x"] + torch.randn_like(batch["x"]) * F.dropout(batch["x"], 0.5)
            keep = torch.rand(len(noisy), 1) < 0.7
            return (model(noisy * keep.double())).square().mean()

        callback = only("auto")
        train(make(), [regression()], loss_of, callback)
        assert row(callback).status == "on"
        assert "weighted by samples, proven" in row(callback).details[1]

    def test_what_stays_random_is_not_split(self):
        def loss_of(model, batch):
            noise = torch.zeros_like(batch["x"]).cauchy_()
            return F.mse_loss(model(batch["x"] + noise), batch["y"])

        callback = only("auto")
        train(vectors(), [regression()], loss_of, callback)
        assert row(callback).status == "off"

    def test_in_bfloat16_as_in_float32(self):
        """Autocast and half-precision weights would hide the difference between two weightings."""
        callback = only("auto", precision="bf16-mixed")
        torch.manual_seed(0)
        lit = make_lit(
            model=gpt2(),
            training_step=lambda self, batch, batch_idx: self.model(**batch).loss,
            validation_step=no_step,
            train_dataloader=lambda self: loader_of([text()]),
        )
        fit(lit, callback)
        assert SHIFTED in row(callback).details[1]

    @pytest.mark.parametrize("form", ["mm", "addmm", "addmm_", "addmm.out", "linear"])
    def test_does_not_convert_the_whole_weight_of_a_head(self, form):
        """It may be frozen in bfloat16; in float32 it could need more memory than the step."""
        head = nn.Linear(512, 20_000).bfloat16()
        hidden, logits, bias = torch.randn(2, 512), torch.randn(2, 20_000), torch.randn(20_000)
        product: dict[str, Callable[[Tensor], Tensor]] = {
            "mm": lambda weight: hidden @ weight.t(),
            "addmm": lambda weight: torch.addmm(bias, hidden, weight.t(), beta=2),
            "addmm_": lambda weight: logits.clone().addmm_(hidden, weight.t(), alpha=3),
            "addmm.out": lambda weight: torch.addmm(bias, hidden, weight.t(), out=logits.clone()),
            "linear": lambda weight: F.linear(hidden[None].bfloat16(), weight, bias.bfloat16()),
        }
        weight = head.weight.detach()
        probe = LossProbe(ModuleState(head, {}), is_sharp=False)
        with LiveTensors(head) as live, probe:
            result = product[form](weight)
        assert live.peak.total_bytes - live.breakdown.total_bytes < 2 * weight.nbytes * 0.6
        if form == "linear":  # the probe casts to float32 instead
            expected = F.linear(hidden[None], weight.float(), bias)
        else:
            expected = product[form](weight.float())
        assert result.dtype is torch.float32
        torch.testing.assert_close(result, expected)

    def test_untrained_models_are_told_apart(self):
        """Their losses differ by little, and so do weights of long sequences."""

        class Uniform(Tokens):
            def forward(self, ids: Tensor) -> Tensor:
                return super().forward(ids) * 1e-3

        batch = float_mask()
        batch["mask"][:, 0] = (torch.arange(SAMPLES) % 2).double()
        batch["x"][:, 0] = 1
        torch.manual_seed(0)
        proven = "without the first of each sample"
        assert_proven([batch], Uniform(), shifted_mask, only(2), proven)

    def test_where_all_losses_are_equal_cross_entropy_says_what_it_counts(self):
        """A head that starts with zeros gives each token the same loss, however large."""
        model = Tokens()
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        assert_proven([labelled()], model, masked, only(3), UNMASKED)

    def test_is_repeated_where_a_later_batch_tells_more(self):
        """In the first batch no label is left out: samples and tokens are the same."""
        torch.manual_seed(3)
        full = {"x": ids(), "labels": ids()}
        assert_proven([full, labelled(), labelled()], Tokens(), masked, only(3), UNMASKED)
        full = series() | {"x": torch.randn(SAMPLES, TOKENS, WIDTH).double()}
        loss_of, proven = series_padded_with_zeros, "vectors of `x` that are not 0"
        assert_proven([full, series()], vectors(), loss_of, only(3), proven)

    def test_names_what_a_micro_batch_changes_for_the_next(self):
        with pytest.raises(IncompatibleError, match="such as a queue or running statistics"):
            train(WithQueue(), [regression()], momentum_contrast, only(3))

    @pytest.mark.parametrize("size", ["auto", 3])
    def test_a_loss_of_zero_proves_nothing(self, size):
        """`"auto"` waits for a batch that has one."""
        batches = [weighted(), weighted()]
        batches[0]["w"][:] = 0
        callback, loss_of = only(size), mean_of_weighted_errors
        if size == 3:
            with pytest.raises(IncompatibleError, match="is 0, so nothing can be proven"):
                train(vectors(), batches, loss_of, callback)
            return
        train(vectors(), batches, loss_of, callback)
        assert "weighted by samples, proven" in row(callback).details[1]

    def test_says_what_no_batch_tells_apart(self):
        """All samples have the same loss, whatever it is the mean over."""

        proven = "its samples cannot tell this from losses that are"
        assert_proven([labelled()] * 2, Tokens(), lambda m, b: squares(m), only(3), proven)

    def test_refuses_a_later_batch_that_disproves_it(self):
        batches = [{"x": ids(), "labels": ids()}, labelled()]
        with pytest.raises(IncompatibleError, match="its loss cannot be split"):
            train(Tokens(), batches, two_means_of_different_things, only(3))

    def test_labels_of_float64_prove_as_much_for_a_float32_module(self):
        """Which a DataLoader makes of Python's floats."""
        batch = regression()
        batch["x"] = batch["x"].float()
        lit = make_lit(
            model=vectors(),
            training_step=lambda self, batch, batch_idx: mse(self.model, batch),
            train_dataloader=lambda self: loader_of([batch, batch]),
        )
        callback = only(3)
        truth, *_ = fit(lit, limit_val_batches=0)
        losses, *_ = fit(lit, callback, limit_val_batches=0)  # of a copy
        assert losses == pytest.approx(truth, rel=1e-6)
        assert BY_SAMPLES in row(callback).details[1]

    def test_waits_for_a_batch_of_two_samples(self):
        batches = [{k: v[:1] for k, v in regression().items()}, regression()]
        callback = only(1)
        train(vectors(), batches, mse, callback)
        assert "samples of a batch" in row(callback).details[1]

    @pytest.mark.parametrize(
        "error", [torch.OutOfMemoryError("CUDA out of memory."), KeyError("x")]
    )
    def test_that_fails_proves_nothing(self, error):
        def loss_of(model, batch):
            if len(batch["x"]) < SAMPLES:
                raise error
            return mse(model, batch)

        callback = only("auto")
        train(vectors(), [regression()] * 2, loss_of, callback)
        assert row(callback).status == "off"
        assert type(error).__name__ in row(callback).details[0]
        # Of a size that was asked for, running out of memory says more than that nothing is proven.
        is_memory = isinstance(error, torch.OutOfMemoryError)
        raised = torch.OutOfMemoryError if is_memory else IncompatibleError
        with pytest.raises(raised, match="out of memory" if is_memory else "KeyError"):
            train(vectors(), [regression()], loss_of, only(2))

    # All samples; those that fit, their halves; these before those of the next batch, and halves.
    @pytest.mark.parametrize(
        ("limit", "tried"),
        [(4, [7, 3, 2, 1, 3, 3, 2, 1]), (2, [7, 3, 2, 1, 1, 2, 2, 1, 1])],
    )
    def test_needs_fewer_samples_where_memory_is_short(self, limit, tried):
        sizes = []

        def loss_of(model, batch):
            if not torch.is_grad_enabled():
                sizes.append(len(batch["x"]))
                if sizes[-1] > limit:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return masked(model, batch)

        assert_proven([labelled()], Tokens(), masked, only(2), UNMASKED, ours=loss_of)
        assert sizes[-len(tried) :] == tried

    def test_with_two_samples_still_sees_state_that_is_carried(self):
        def loss_of(model, batch):
            if not torch.is_grad_enabled() and len(batch["x"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            loss = mse(model, batch) * model.factor
            model.factor = model.factor * 0.5
            return loss

        model = vectors()
        model.factor = torch.ones((), dtype=torch.float64)
        with pytest.raises(IncompatibleError, match="state that the previous micro-batch changed"):
            train(model, [regression()], loss_of, only(1))


class TestAuto:
    @pytest.mark.parametrize("name", ["contrastive", "fewer names", "rmse"])
    def test_yields_at_the_first_batch_and_says_why(self, name):
        each, callback = KINDS[name], only("auto")
        truth = train(model := each.make_model(), [batch := each.make_batch()] * 2, each.loss_of)
        ours = train(model, [batch] * 2, each.loss_of, callback)
        assert difference(ours, truth) == 0
        assert row(callback).status == "off"
        reasons = ("its loss cannot be split", FEWER)
        assert any(reason in row(callback).details[0] for reason in reasons)

    def test_out_of_memory_ends_the_fit_where_it_yielded(self):
        def loss_of(model, batch):
            if len(batch["x"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return contrastive(model, batch)

        with pytest.raises(torch.OutOfMemoryError):
            train(vectors(), [regression()], loss_of, only("auto"))

    def test_the_warning_says_what_is_proven(self):
        def loss_of(model, batch):
            if len(batch["x"]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return masked(model, batch)

        batch, model = labelled(), Tokens()
        truth = train(model, [batch], masked)
        with pytest.warns(MemsaveWarning, match=UNMASKED) as caught:
            ours = train(model, [batch], loss_of, only("auto"))
        assert difference(ours, truth) < 1e-11
        (said,) = [str(w.message) for w in caught if w.category is MemsaveWarning]
        assert "Begin with `micro_batch_size=3` next time" in said
        assert "nothing was lost" not in said


class TestFunctionsOfTheUsers:
    @pytest.mark.parametrize(
        ("given", "match"),
        [
            (lambda batch, size: None, "returned `NoneType`"),
            (lambda batch, size: [], "returned an empty list"),
            (lambda batch, size: batch["x"], "returned `Tensor`"),
            (lambda batch, size: [{k: v[:1] for k, v in batch.items()}], "1 samples in total"),
            (lambda batch, size: [batch, batch], "samples in total for a batch of"),
        ],
    )
    @pytest.mark.parametrize("size", ["auto", 3])
    def test_split_batch(self, given, match, size):
        with pytest.raises(ConfigurationError, match=match):
            train(vectors(), [regression()], mse, only(size, split_batch=given))

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            (lambda part: None, "returned None of type `NoneType`"),
            (lambda part: "two", "returned 'two'"),
            (lambda part: float("nan"), "weights nan, nan"),
            (lambda part: -1, "weights -1, -1"),
            (lambda part: 0, "weights 0, 0"),
            (lambda part: part["x"], "is not a weight"),
        ],
    )
    def test_loss_weight(self, given, match):
        with pytest.raises(ConfigurationError, match=match):
            train(vectors(), [regression()], mse, only(3, loss_weight=given))

    def test_loss_weight_of_a_later_batch(self):
        spoiled = weighted()
        spoiled["w"][2] = float("nan")
        batches = [weighted(), spoiled]
        callback = only(3, loss_weight=lambda part: part["w"].sum())
        with pytest.raises(ConfigurationError, match="that are finite"):
            train(vectors(), batches, sample_weights, callback)

    @pytest.mark.parametrize(
        ("given", "name", "match"),
        [
            (lambda part: len(part["x"]) ** 2, "mse", "weights of `loss_weight=<lambda>`"),
            ("samples", "masked", r"loss_weight='samples'.*`MicroBatching\(loss_weight="),
        ],
    )
    def test_loss_weight_that_is_wrong_is_refused(self, given, name, match):
        each = KINDS[name]
        with pytest.raises(IncompatibleError, match=match):
            train(each.make_model(), [each.make_batch()], each.loss_of, only(3, loss_weight=given))

    def test_loss_weight_by_name(self, caplog):
        """A sample may have no label at all; the weight is said once, and in the table."""
        batch = labelled()
        batch["labels"][0] = -100
        shifted = TOKEN_KINDS["shifted"][0]
        with caplog.at_level("INFO", logger="lightning.pytorch.memsave"):
            for loss_of, weight in ((shifted, "tokens_shifted"), (masked, "proven")):
                callback = only(1, loss_weight=weight)
                assert_proven([batch, batch], Tokens(), loss_of, callback, "labels")
        said = [r.message for r in caplog.records if r.message.startswith("micro_batch_size=")]
        assert ["labels" in message for message in said] == [True, True]

    def test_split_batch_and_loss_weight(self):
        """Of batches that have no number of samples, weighted by anything."""

        def split(batch: Any, size: int) -> list[Any]:
            parts = zip(*(each.split(size) for each in vars(batch).values()), strict=True)
            return [SimpleNamespace(**dict(zip(vars(batch), part, strict=True))) for part in parts]

        callback = only(3, split_batch=split, loss_weight=lambda part: part.w.sum())
        loss_of = lambda model, batch: sample_weights(model, vars(batch))  # noqa: E731
        assert_proven([SimpleNamespace(**weighted())], vectors(), loss_of, callback, "loss_weight")


class TestBatchNorm:
    def make(self) -> nn.Module:
        return vectors(lambda: nn.BatchNorm1d(16))

    def test_is_approximate(self):
        callback = only(3)
        batch = {k: v[:6] for k, v in regression().items()}
        with pytest.warns(ExactnessWarning, match="batch normalisation"):
            train(self.make(), [batch], mse, callback)
        assert row(callback).exactness == "approximate"

    def test_is_refused_or_left_out_where_rounding_is_the_limit(self):
        with pytest.raises(IncompatibleError, match=r"approximate.*`exactness='rounding'`"):
            train(self.make(), [regression()], mse, only(3, exactness="rounding"))
        callback = only("auto", exactness="rounding")
        train(self.make(), [regression()], mse, callback)
        assert row(callback).status == "off"
        assert "batch normalisation" in row(callback).details[0]

    def test_of_a_model_that_is_built_late(self):
        with pytest.raises(IncompatibleError, match="exactness='rounding'"):
            fit(late(make_lit(model=self.make())), only(3, exactness="rounding"))
