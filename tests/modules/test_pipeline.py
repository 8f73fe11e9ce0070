"""Stages on two and four processes, against one process without us."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_memsave import LowBitOptimizer, MemSaveCallback, PipelineStrategy
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from tests.callbacks.lit import loader_of, make_trainer
from tests.callbacks.ranks import Notes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_prediction", "any_saving_counts")]

WIDTH, NUM_WORDS, NUM_BLOCKS = 64, 96, 5
STAGES = int(os.environ.get("WORLD_SIZE", "1"))
RTOL = 1e-9
"""Of what is computed in float64: sums in another order."""


def layer(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)


class Tied(nn.Module):
    """Blocks between an embedding and a head of one weight; labels that are not there."""

    def __init__(self, make: Callable[[], nn.Module] = layer, number: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(number)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.through(self.embedding(batch["tokens"]))
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def through(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Residual(Tied):
    """Code between blocks, and the embedding beside all of them and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def through(self, hidden: Tensor) -> Tensor:
        first = hidden
        for block in self.blocks:
            hidden = torch.relu(hidden + block(src=hidden)) + self.scale * first
        return hidden + first


class Pair(nn.Module):
    """A block of the user's own, with a tuple as a result and a buffer that it sets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("width", torch.zeros(()))

    def forward(self, hidden: Tensor, shift: Tensor) -> tuple[Tensor, None, Tensor]:
        if self.training:
            self.width.fill_(hidden.shape[-1])
        return torch.tanh(self.linear(hidden)) + shift, None, hidden.detach().mean()


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        halved: Tensor = self.linear(hidden.mul_(0.5))
        return halved


class InPlace(Tied):
    """Blocks that write to what they are given."""

    def __init__(self) -> None:
        super().__init__(Halved)


class Tuples(Tied):
    """Blocks with another argument, of which all results are kept and one is used."""

    def __init__(self) -> None:
        super().__init__(Pair)
        self.shift = nn.Linear(WIDTH, WIDTH)

    def through(self, hidden: Tensor) -> Tensor:
        shift, kept = self.shift(hidden), []
        for block in self.blocks:
            kept.append(hidden)
            hidden, *_ = block(hidden, shift=shift)
        return hidden


class Recomputed(Tied):
    """Checkpoints blocks itself."""

    def through(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


class Frozen(Tied):
    """The first stage trains nothing, and nothing outside of blocks is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[3:].requires_grad_(True)


class Noisy(Tied):
    """Draws numbers that the first stage and the last one must have alike."""

    drawn: list[float]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embedding(batch["tokens"])
        noise = torch.randn_like(hidden)
        self.drawn = [*getattr(self, "drawn", []), noise.sum().item()]
        return functional.mse_loss(self.through(hidden + noise), noise)


def llama(**settings: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2, intermediate_size=WIDTH,
        vocab_size=NUM_WORDS, tie_word_embeddings=True, pad_token_id=0, **settings,
    )  # fmt: skip
    return Family(transformers.LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=4, n_head=2, vocab_size=NUM_WORDS, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Family(transformers.GPT2LMHeadModel(config))


class Family(nn.Module):
    """A model of Hugging Face, of padded samples."""

    settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = (batch["labels"] != -100).long()
        mask[:, 0] = 1
        given = {"attention_mask": mask, "labels": batch["labels"]}
        out = self.model(batch["tokens"], **given, **self.settings)
        return self.loss_of(out)

    def loss_of(self, out: Any) -> Tensor:
        loss: Tensor = out.loss
        return loss


class WithStates(Family):
    """Asks for what all blocks have returned, and does not use it."""

    settings = {"output_hidden_states": True}  # noqa: RUF012


def sgd(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def adamw(self: Any, **settings: Any) -> Any:
    decayed = [p for p in self.parameters() if p.ndim > 1]
    others = [p for p in self.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, **settings)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Steps:
    """What a project has."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = self.model(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"most": loss, "other": 2 * loss}, reduce_fx="max")
        return {"loss": loss}

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.model(batch), sync_dist=True)
        self.metric(self.model(batch))  # twice in one step
        self.log("metric", self.metric)

    def predict_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        predicted: Tensor = self.model(batch)
        return predicted

    configure_optimizers = adamw


def lit(make: Callable[[], nn.Module] = Tied, package: Any = pl, **methods: Any) -> Any:
    torch.manual_seed(1)
    made = type("Lit", (Steps, package.LightningModule), methods)()
    made.losses, made.model = [], make()
    made.metric = MeanMetric()
    if int(os.environ.get("RANK", "0")):  # the values of the first process count
        nn.init.zeros_(next(made.model.parameters()))
    return made.double()


def batches(*sizes: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for size in sizes:
        tokens = torch.randint(NUM_WORDS, (size, 8), generator=generator)
        labels = (7 * tokens + 3) % NUM_WORDS
        length = torch.randint(2, 9, (size, 1), generator=generator)
        labels[torch.arange(8) >= length] = -100  # micro-batches have other numbers of labels
        found.append({"tokens": tokens, "labels": labels})
    return found


SIZES = 8, 8, 6, 5
"""Of the batches: not all can be split into four."""


def train(
    module: Any,
    *callbacks: Any,
    how: Any = "1f1b",
    package: Any = pl,
    ckpt_path: Any = None,
    data: Any = None,
    **settings: Any,
) -> tuple[Notes, Any]:
    """Train, in stages where several processes run."""
    given: dict[str, Any] = {}
    if STAGES > 1:
        own = how == "1f1b" or package is pytorch_lightning
        strategy = "memsave_pipeline" if own else PipelineStrategy(4, schedule=how)
        given = {"devices": STAGES, "strategy": strategy}
    given |= {"num_sanity_val_steps": 0, "precision": "32-true"} | settings
    trainer = make_trainer(package, *callbacks, **given)
    torch.manual_seed(5 + int(os.environ.get("RANK", "0")))  # what the first one draws counts
    loader = loader_of(batches(*SIZES) if data is None else data)
    trainer.fit(module, loader, loader_of(batches(4, 3)), ckpt_path=ckpt_path)
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return {"losses": module.losses, "logged": logged, "weights": values_of(module)}, trainer


def values_of(module: nn.Module) -> dict[str, list[float]]:
    state = {n: t for n, t in module.state_dict().items() if not n.startswith("metric")}
    return {name: tensor.double().flatten().tolist() for name, tensor in state.items()}


def off(**settings: Any) -> MemSaveCallback:
    return MemSaveCallback(preset="off", report=False, **settings)


# --- what runs on each rank, and alone ---


OWN = (Tied, Residual, InPlace, Tuples, Frozen)


def train_one(make: Callable[[], nn.Module]) -> Any:
    return train(lit(make))


# Models of Hugging Face compute in float32 here and there.
ROUNDED: dict[str, Callable[[], Any]] = {
    "llama": lambda: train(lit(llama, configure_optimizers=sgd)),
    "gpt2": lambda: train(lit(gpt2, configure_optimizers=sgd)),
    "states": lambda: train(lit(lambda: WithStates(llama().model), configure_optimizers=sgd)),
    "float32": lambda: train(lit(configure_optimizers=sgd).float()),
    # Adam makes a large update of a gradient that is 0 but for rounding.
    "adamw": lambda: train(lit(configure_optimizers=lambda self: adamw(self, eps=1e-4)).float()),
}
TRAINED: dict[str, Callable[[], Any]] = {
    **{c.__name__: functools.partial(train_one, c) for c in OWN},
    **ROUNDED,
    "sgd": lambda: train(lit(configure_optimizers=sgd)),
    "gpipe": lambda: train(lit(), how="gpipe"),
    "norm": lambda: train(lit(), gradient_clip_val=0.05, accumulate_grad_batches=2),
    "value": lambda: train(lit(), gradient_clip_val=1e-3, gradient_clip_algorithm="value"),
    "other package": lambda: train(lit(package=pytorch_lightning), package=pytorch_lightning),
    "checkpointing": lambda: train(lit(), off(activation_checkpointing="all")),
    "own checkpointing": lambda: train(lit(Recomputed)),
}


def of_training(*, is_rounded: bool) -> Notes:
    chosen = {name: run for name, run in TRAINED.items() if (name in ROUNDED) == is_rounded}
    return {name: run()[0] for name, run in chosen.items()}


class Held(pl.Callback):
    """Bytes of parameters and optimizer state that a process has at the end, by module."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        states = trainer.optimizers[0].state
        self.held = {
            name: [t.untyped_storage().nbytes() for t in (param, *states.get(param, {}).values())]
            for name, param in pl_module.named_parameters()
        }


def of_memory() -> Notes:
    held = Held()
    train(lit(functools.partial(Tied, number=4)), held)
    return held.held


def of_random_numbers() -> Notes:
    """What is drawn before the blocks, and dropout in them."""
    module = lit(Noisy)
    train(module, data=batches(8, 8), limit_val_batches=0)
    dropped = lit(lambda: Tied(functools.partial(layer, 0.5)))
    found, _ = train(dropped, data=batches(8, 8, 8), limit_val_batches=0)
    return {"drawn": module.model.drawn, "losses": module.losses, "dropped": found["losses"]}


def steady() -> Any:
    return lit().float()


def of_checkpoints(name: str, *make_callbacks: Any) -> Notes:
    """Train two epochs; train one, save, and train the other in a new Trainer."""

    def run(**settings: Any) -> tuple[Notes, Any]:
        return train(steady(), *(make() for make in make_callbacks), **settings)

    path = Path(f"{name}.ckpt").resolve()
    whole, _ = run(max_epochs=2)
    first, trainer = run()
    trainer.save_checkpoint(path)
    [tested] = trainer.validate(trainer.lightning_module, loader_of(batches(4)), verbose=False)
    resumed, _ = run(max_epochs=2, ckpt_path=path)
    again = {"whole": whole, "first": first, "resumed": resumed, "tested": tested}
    return again | {"path": str(path), "patched": patched(trainer.lightning_module)}


def patched(module: nn.Module) -> list[str]:
    return [n for part in module.modules() for n in vars(part) if n.startswith("_memsave")]


def low_bit() -> MemSaveCallback:
    return off(optimizer=LowBitOptimizer("8bit"))


class Generates(Family):
    """Answers in validation."""

    use_cache = False

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if not self.training:
            tokens = self.model.generate(
                batch["tokens"], max_new_tokens=3, use_cache=self.use_cache, do_sample=False
            )
            return tokens.double().mean()
        return super().forward(batch)


def of_evaluation() -> Notes:
    module = lit(lambda: Generates(llama().model))
    _, trainer = train(module)
    found: Notes = {"generated": trainer.callback_metrics["validation"].item()}
    predicted = trainer.predict(module, loader_of(batches(4, 3)))
    return found | {"predicted": [value.item() for value in predicted]}


TECHNIQUES: dict[str, dict[str, Any]] = {
    "8bit": {"optimizer": LowBitOptimizer("8bit")},
    "attention": {"attention": "sdpa"},
    "precision": {"precision": "bf16-mixed"},
}


def of_techniques() -> Notes:
    found: Notes = {}
    for name, arguments in TECHNIQUES.items():
        module = lit(llama).float()
        module.model.model.set_attn_implementation("eager")
        found[name], _ = train(module, off(**arguments), precision=None)
    return found


# --- what is refused on all processes, before anything was trained ---


class Skips(Tied):
    """A U-Net: what comes out of a block is used by a later one, too."""

    def through(self, hidden: Tensor) -> Tensor:
        first = hidden = self.blocks[0](hidden)
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden + first


class UsesStates(WithStates):
    def loss_of(self, out: Any) -> Tensor:
        loss: Tensor = out.loss + out.hidden_states[1].square().mean()
        return loss


class Twice(Tied):
    def through(self, hidden: Tensor) -> Tensor:
        return super().through(super().through(hidden))


class Backwards(Tied):
    def through(self, hidden: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return hidden


class Leaves(Tied):
    def through(self, hidden: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        return hidden


class Shorter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)[:, ::2]


class Counts(Tied):
    """Batch statistics after the last block, which one process sees."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.BatchNorm1d(WIDTH)

    def through(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.after(super().through(hidden).mT).mT
        return normed


class Contrasts(Tied):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.through(self.embedding(batch["tokens"])).mean(1)
        return functional.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


class Balanced(nn.Module):
    """Leaves a loss of its own behind, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loss = torch.zeros(())

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        self.loss = hidden.square().mean()
        return hidden


class SumsLosses(Tied):
    def __init__(self) -> None:
        super().__init__(Balanced)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().forward(batch)
        for block in self.blocks:
            loss = loss + block.loss
        return loss


class Cached(Generates):
    use_cache = True


def logs_a_metric(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.model(batch)
    self.metric(loss)
    self.log("metric", self.metric)
    return loss


def lbfgs(self: Any) -> Any:
    return torch.optim.LBFGS(self.parameters())


def with_own_checkpointing() -> nn.Module:
    made: Any = llama()
    made.model.gradient_checkpointing_enable()
    return made


def by_hand(self: Any, batch: Any, batch_idx: int) -> None:
    self.manual_backward(self.model(batch))


def of_other_batches() -> Any:
    return train(lit(), data=[batches(8, 8)[int(os.environ.get("RANK", "0")) % 2]])


def beside(**arguments: Any) -> Any:
    preset: dict[str, Any] = {} if "budget" in arguments else {"preset": "off"}
    return train(lit(), MemSaveCallback(report=False, **preset, **arguments))


def compiled() -> Any:
    module = lit()
    module.model.blocks[0].compile()
    return train(module)


def on_meta() -> Any:
    module = lit()
    module.model.head = nn.Linear(WIDTH, NUM_WORDS, device="meta")
    return train(module)


def averaged() -> Any:
    return train(lit(), pl.callbacks.StochasticWeightAveraging(1e-2))


def manual() -> Any:
    module = lit(training_step=by_hand)
    module.automatic_optimization = False
    return train(module)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "skips": (lambda: train(lit(Skips)), r"an output of `model.blocks.0`: the step uses it after"),
    "states": (lambda: train(lit(lambda: UsesStates(llama().model))), "no skip connections, st"),
    "twice": (lambda: train(lit(Twice)), "`model.blocks.0`: it runs more than once"),
    "backwards": (lambda: train(lit(Backwards)), "each block must run once, in order"),
    "leaves": (lambda: train(lit(Leaves)), "`model.blocks.4`: the step ended before it ran"),
    "shape": (lambda: train(lit(lambda: Tied(Shorter))), r"it makes \(2, 4, 64\) of a tensor of"),
    "buffer": (lambda: train(lit(Counts)), "buffer `model.after.num_batches_tracked`: it"),
    "losses": (lambda: train(lit(SumsLosses)), "from the result of the last block alone"),
    "loss": (lambda: train(lit(Contrasts)), r"Pass `PipelineStrategy\(loss_weight=...\)`"),
    "cache": (lambda: train(lit(lambda: Cached(llama().model))), "Pass `use_cache=False`"),
    "metric": (lambda: train(lit(training_step=logs_a_metric)), "Log its value"),
    "batches": (of_other_batches, "each process has another one"),
    "optimizer": (lambda: train(lit(configure_optimizers=lbfgs)), "Use an optimizer such as AdamW"),
    "blocks": (lambda: train(lit(lambda: Tied(number=1))), "1 blocks were found in it"),
    "checkpointing": (lambda: train(lit(with_own_checkpointing)), "activation_checkpointing="),
    "manual": (manual, "Train in one process"),
    "compiled": (compiled, "`model.blocks.0`: its compiled graph"),
    "meta": (on_meta, "`model.head.weight` and 1 more: it has no values yet"),
    "half": (lambda: train(lit().bfloat16()), "Keep parameters in float32"),
    "averages": (averaged, "`StochasticWeightAveraging`: it reads the weights of all blocks"),
    **{
        name: (functools.partial(beside, **{name: value}), f"Set `{name}=None`")
        for name, value in {
            "micro_batch_size": 4,
            "offload": "activations",
            "optimizer_in_backward": True,
            "low_precision_weights": "master",
            "chunked_cross_entropy": True,
            "accumulate_grad_batches": 2,
            "budget": "1GiB",
        }.items()
    },
}  # fmt: skip


def of_refusals() -> Notes:
    found: Notes = {}
    for name, (run, _) in REFUSED.items():
        try:
            run()
            found[name] = "nothing"
        except IncompatibleError as error:
            found[name] = str(error)
    return found


SCENARIOS: dict[str, Callable[[], Notes]] = {
    "training": functools.partial(of_training, is_rounded=False),
    "rounded": functools.partial(of_training, is_rounded=True),
    "memory": of_memory,
    "random": of_random_numbers,
    "32bit": lambda: of_checkpoints("32bit"),
    "8bit": lambda: of_checkpoints("8bit", low_bit),
    "evaluation": of_evaluation,
    "techniques": of_techniques,
    "refusals": of_refusals,
}


# --- what they saw ---


def close(found: Any, expected: Any, rtol: float) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            close(found[key], value, rtol)
    else:
        pair = (torch.tensor(values, dtype=torch.float64) for values in (found, expected))
        torch.testing.assert_close(*pair, rtol=rtol, atol=rtol)


@functools.cache
def alone_once(name: str) -> Notes:
    """Train in one process, for two and four."""
    found: Notes = TRAINED[name]()[0]
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_trains_and_logs_as_one_process(seen, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = alone_once(name)
    assert alone["losses"][-1] < alone["losses"][0]
    for notes in seen("rounded" if name in ROUNDED else "training"):
        close(notes[name], alone, 1e-5 if name in ROUNDED else RTOL)


def test_a_process_holds_its_blocks_and_what_is_outside(seen):
    all_notes = seen("memory")
    params = dict(lit(functools.partial(Tied, number=4)).named_parameters())
    for rank, notes in enumerate(all_notes):
        assert notes.keys() == params.keys()
        for name, param in params.items():
            block = re.match(r"model\.blocks\.(\d)", name)
            is_here = block is None or int(block[1]) * len(all_notes) // 4 == rank
            # With both moments and the number of steps; others have no state.
            expected = [param.nbytes, 4, param.nbytes, param.nbytes] if is_here else [0]
            assert notes[name] == expected


def test_stages_draw_the_same_before_blocks(seen):
    first, *others = seen("random")
    assert len({*first["drawn"]}) == len(first["drawn"]) >= 8
    assert all(notes == first for notes in others)
    assert first["losses"][1] < first["losses"][0]
    assert first["dropped"][-1] < first["dropped"][0]


@pytest.mark.parametrize("name", ["32bit", "8bit"])
def test_a_resumed_fit_goes_on_bit_for_bit(seen, name):
    for notes in seen(name):
        number = len(notes["first"]["losses"])
        assert notes["whole"]["losses"][:number] == notes["first"]["losses"]
        assert notes["resumed"]["losses"] == notes["whole"]["losses"][number:]
        assert notes["resumed"]["weights"] == notes["whole"]["weights"]
        assert notes["patched"] == []


@pytest.mark.parametrize("name", ["32bit", "8bit"])
def test_one_process_goes_on_from_a_checkpoint(seen, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notes = seen(name)[0]
    checkpoint = torch.load(notes["path"], weights_only=True)
    module = steady()
    module.load_state_dict(checkpoint["state_dict"])
    assert values_of(module) == notes["first"]["weights"]
    callbacks = [low_bit()] if name == "8bit" else []
    settings: dict[str, Any] = {"max_epochs": 2, "ckpt_path": notes["path"]}
    alone, _ = train(steady(), *callbacks, **settings)
    close(alone["losses"], notes["resumed"]["losses"], rtol=1e-5 if name == "32bit" else 1e-4)
    [optimizer] = checkpoint["optimizer_states"]
    own = adamw(module)[0][0]
    assert [len(g["params"]) for g in optimizer["param_groups"]] == [
        len(g["params"]) for g in own.param_groups
    ]
    assert {*optimizer["state"]} == {*range(len([*module.parameters()]))}


def test_evaluation_has_the_values_of_one_process(seen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = of_evaluation()
    assert len({*alone["predicted"]}) == 2
    for notes in seen("evaluation"):
        assert notes == alone


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_train_as_in_one_process(seen, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = of_techniques()[name]
    rtol = {"8bit": 1e-4, "attention": 1e-5, "precision": 1e-3}[name]
    for notes in seen("techniques"):
        close(notes[name]["losses"], alone["losses"], rtol)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_on_all_processes(seen, name):
    for notes in seen("refusals"):
        assert re.search(REFUSED[name][1], notes[name])


@pytest.mark.parametrize("arguments", [{"num_micro_batches": 0}, {"schedule": "zero bubble"}])
def test_arguments_are_refused(arguments):
    with pytest.raises(ConfigurationError, match=r"such as 4|Use `schedule='1f1b'`"):
        PipelineStrategy(**arguments)
