"""FSDP2 on the blocks that are found, on two processes."""

import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

from lightning_memsave import (
    ActivationCheckpointing,
    FSDP2Strategy,
    LowBitOptimizer,
    MemoryPrediction,
    MemSaveCallback,
    predict_memory,
)
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from lightning_memsave.prediction.processes import first_of
from lightning_memsave.trainer.fsdp2 import _Table, materialize, shard
from tests.callbacks.lit import loader_of, make_trainer, summary_of
from tests.callbacks.ranks import RANKS, Notes, rank_of_this_process

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_prediction", "any_saving_counts")]

WIDTH, NUM_WORDS = 64, 96


class Tied(nn.Module):
    """Blocks between an embedding and a head of one weight."""

    is_tied = True

    def __init__(self, dropout: float = 0.1, num_words: int = NUM_WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)
            for _ in range(3)
        ]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, num_words, bias=False)
        if self.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(self.logits(self.blocks(self.embedding(tokens))), tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


class Untied(Tied):
    is_tied = False


class Also(Tied):
    """Uses the weight of its embedding beside the modules that have it, detached too."""

    def logits(self, hidden: Tensor) -> Tensor:
        weight = self.embedding.weight
        other = functional.linear(hidden, weight) + functional.linear(hidden, weight.detach())
        return super().logits(hidden) + 0.1 * other


class Frozen(Tied):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.embedding.weight.requires_grad = False


LARGE: dict[str, Any] = {
    cls.__name__: functools.partial(cls, num_words=300) for cls in (Tied, Untied, Also, Frozen)
}


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), (7 * tokens.flatten() + 3) % NUM_WORDS)


class Steps:
    """What a project has."""

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.model(batch), sync_dist=True)

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def lit(package: Any = pl, make: Callable[[], nn.Module] = Tied, **methods: Any) -> Any:
    torch.manual_seed(1)
    made = type("Lit", (Steps, package.LightningModule), methods)()
    made.losses, made.model = [], make()
    return made


def by_hand(self: Any) -> None:
    """Shard as Lightning's documentation does."""
    mesh = self.device_mesh["data_parallel"]
    if not isinstance(self.model, FSDPModule):
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def by_hand_strategy() -> Any:
    return ModelParallelStrategy(data_parallel_size=world_size(), tensor_parallel_size=1)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", RANKS))


def batches(rank: int, length: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(NUM_WORDS, (length, 8), generator=generator)
    return [batch.clone() for batch in tokens[rank :: world_size()].split(2)]  # memory of its own


def train(
    module: Any,
    *callbacks: Any,
    strategy: Any = "memsave_fsdp2",
    package: Any = pl,
    ckpt_path: Any = None,
    **settings: Any,
) -> tuple[Notes, Any]:
    how = {"devices": world_size(), "strategy": strategy, "use_distributed_sampler": False}
    trainer = make_trainer(package, *callbacks, num_sanity_val_steps=0, **(how | settings))
    rank = rank_of_this_process()
    torch.manual_seed(100 + rank)  # other dropout on each rank
    loaders = loader_of(batches(rank)), loader_of(batches(rank, 4))
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return {"losses": module.losses, "logged": logged, "weights": weights(module)}, trainer


def weights(module: nn.Module) -> dict[str, list[float]]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in module.named_parameters()}
    return {name: tensor.flatten().tolist() for name, tensor in full.items()}


def off(**settings: Any) -> MemSaveCallback:
    return MemSaveCallback(preset="off", report=False, **settings)


# --- what runs on each rank ---

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
AT_ONCE: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}


def through_forward(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    loss: Tensor = self(batch)
    self.losses.append(loss.item())
    self.log("loss", loss, sync_dist=True)
    return loss


def as_by_hand() -> Notes:
    notes: Notes = {}
    for precision in PRECISIONS:
        settings = AT_ONCE | {"precision": precision}
        notes[f"{precision} by hand"], _ = train(
            lit(configure_model=by_hand), strategy=by_hand_strategy(), **settings
        )
        notes[f"{precision} ours"], _ = train(lit(), **settings)
    for name, make in LARGE.items():
        notes[f"{name} by hand"], _ = train(
            lit(configure_model=by_hand, make=make), strategy=by_hand_strategy(), **AT_ONCE
        )
        notes[f"{name} ours"], _ = train(lit(make=make), **AT_ONCE)
    notes["other package"], _ = train(lit(pytorch_lightning), package=pytorch_lightning, **AT_ONCE)
    notes["forward"], _ = train(
        lit(forward=lambda self, batch: self.model(batch), training_step=through_forward),
        **AT_ONCE,
    )
    return notes


def sgd(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=0.1)


def with_own_parameter() -> Notes:
    """A parameter of the LightningModule itself, and parts of the model that steps call alone."""

    def make() -> Any:
        def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
            hidden = self.model.blocks(self.scale * self.model.embedding(batch))
            loss = loss_of(self.model.head(hidden), batch)
            self.losses.append(loss.item())
            return loss

        made = lit(make=functools.partial(Tied, dropout=0.0), training_step=training_step)
        if rank_of_this_process():  # the values of the first process count
            torch.nn.init.zeros_(made.model.blocks[0].linear1.weight)
        made.scale = nn.Parameter(torch.ones(WIDTH))
        type(made).configure_optimizers = sgd  # sees scales
        return made.double()

    settings = {"precision": "64-true"}
    return {
        "ddp": train(make(), strategy="ddp", **settings)[0],
        "ours": train(make())[0],
    }


TECHNIQUES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "activation_checkpointing": ({"activation_checkpointing": "all"}, {}),
    "offload": ({"activation_checkpointing": "all", "offload": "activations"}, {}),
    "optimizer_in_backward": ({"optimizer_in_backward": True}, {}),
    "updates of a window": ({"optimizer_in_backward": True}, {"accumulate_grad_batches": 2}),
    "offload with DDP": (
        {"activation_checkpointing": "all", "offload": "activations"},
        {"strategy": "ddp"},
    ),
}


def with_techniques() -> Notes:
    notes: Notes = {}
    for name, (arguments, settings) in TECHNIQUES.items():
        notes[name] = train(lit(), off(**arguments), **settings)[0]
        notes[f"{name}, without"] = train(lit(), **settings)[0]
    return notes


def steady() -> Any:
    """Without dropout: what is drawn after a checkpoint depends on what was drawn before."""
    return lit(make=functools.partial(Tied, dropout=0.0))


def of_checkpoints(is_sharded: bool, make_callbacks: Any = list) -> Notes:
    """Train two epochs; train one, save, and train the other in a new Trainer."""

    def run(**settings: Any) -> tuple[Notes, Any]:
        strategy = FSDP2Strategy(save_distributed_checkpoint=is_sharded)
        return train(steady(), *make_callbacks(), strategy=strategy, **settings)

    path = Path(f"{'sharded' if is_sharded else 'full'}-{len(make_callbacks())}.ckpt").resolve()
    whole, _ = run(max_epochs=2)
    first, trainer = run()
    trainer.save_checkpoint(path)
    trainer.validate(trainer.lightning_module, loader_of(batches(rank_of_this_process(), 4)))
    torch.distributed.barrier()
    resumed, _ = run(max_epochs=2, ckpt_path=path)
    patched = [name for name in vars(trainer.lightning_module) if "configure_model" in name]
    notes = {"whole": whole, "first": first, "resumed": resumed}
    return notes | {"path": str(path), "patched": patched}


EPOCHS = {4: 1, 2: 2, 1: 3}
"""How many epochs have ended when so many processes stop."""


def exact() -> Any:
    return lit(make=functools.partial(Tied, dropout=0.0, num_words=300)).double()


def go_on(folder: Path) -> None:
    """Train what twice as many processes have begun; the first also as sharded by hand."""
    size = world_size()
    begun = folder / f"{2 * size}.ckpt"
    path = begun if begun.exists() else None
    settings: dict[str, Any] = {"accumulate_grad_batches": 4 // size, "default_root_dir": folder}
    _, trainer = train(exact(), max_epochs=EPOCHS[size], ckpt_path=path, **settings)
    trainer.save_checkpoint(folder / f"{size}.ckpt")
    if path is None:
        notes, settings = {}, settings | AT_ONCE | {"max_epochs": 2}
        notes["ours"], _ = train(lit(make=LARGE["Tied"]), **settings)
        notes["by hand"], _ = train(
            lit(configure_model=by_hand, make=LARGE["Tied"]),
            strategy=by_hand_strategy(),
            **settings,
        )
        (folder / f"{rank_of_this_process()}.json").write_text(json.dumps(notes))
    torch.distributed.barrier()  # a process that ends while another one still needs it is aborted
    torch.distributed.destroy_process_group()
    # One run of about fifty was aborted while Python ended, by a thread that torch had left.
    sys.stdout.flush()
    os._exit(0)


def low_bit() -> MemSaveCallback:
    return off(optimizer=LowBitOptimizer("8bit"))


def of_8bit_state() -> Notes:
    notes = of_checkpoints(False, lambda: [low_bit()])
    _, trainer = train(lit(), low_bit())
    optimizer = trainer.optimizers[0]
    names = {param: name for name, param in trainer.lightning_module.named_parameters()}
    weights(trainer.lightning_module)
    notes["types"] = {
        names[param]: [str(state["state1"].dtype), state["state1"].numel(), param.numel()]
        for param, state in optimizer.state.items()
    }
    # State of a run with 32 bits is taken over, and the other way round.
    full = of_checkpoints(False)["path"]
    notes["to 8 bits"] = train(steady(), low_bit(), max_epochs=2, ckpt_path=full)[0]
    notes["to 32 bits"] = train(steady(), max_epochs=2, ckpt_path=notes["path"])[0]
    return notes


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=WIDTH,
        vocab_size=NUM_WORDS, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def from_meta(make: Any) -> Any:
    def configure_model(self: Any) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = make()

    made = lit(make=nn.Identity, configure_model=configure_model)
    made.model = None
    made.register_buffer("own", torch.arange(3.0))
    return made


def of_labels(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
    loss: Tensor = self.model(input_ids=batch, labels=batch).loss
    self.losses.append(loss.item())
    return loss


# With a bound: eager attention and norms of Hugging Face's models compute in float32.
ROUNDED: dict[str, tuple[dict[str, Any], float]] = {
    "chunked_cross_entropy": ({"chunked_cross_entropy": True}, 1e-10),
    "attention": ({"attention": "sdpa"}, 1e-6),
    "tiled": ({"activation_checkpointing": ActivationCheckpointing("tiled", tile=4)}, 1e-6),
    "tiled methods": (
        {"activation_checkpointing": ActivationCheckpointing("tiled", tile=4)},
        1e-10,
    ),
}


def with_rounded_techniques() -> Notes:
    def run(name: str, *callbacks: Any) -> Notes:
        made = lit(make=functools.partial(Tied, dropout=0.0, num_words=1100))
        if name not in ("chunked_cross_entropy", "tiled methods"):
            made = lit(make=llama, training_step=of_labels)
        if name == "attention":
            made.model.set_attn_implementation("eager")
        type(made).configure_optimizers = sgd  # Adam's update of a tiny gradient is a large one
        return train(made.double(), *callbacks, limit_val_batches=0)[0]

    rows = {name: run(name, off(**arguments)) for name, (arguments, _) in ROUNDED.items()}
    return rows | {f"{name}, without": run(name) for name in ROUNDED}


def of_meta_start() -> Notes:
    notes: Notes = {}

    def validation_step(self: Any, batch: Tensor, batch_idx: int) -> None:
        made = self.model.generate(batch, max_new_tokens=2, do_sample=False)
        self.log("generated", made.double().mean(), sync_dist=True)

    torch_module = from_meta(Tied)
    notes["torch"], _ = train(torch_module)
    notes["buffer"] = torch_module.own.tolist()
    hugging_face = from_meta(llama)
    cls = type(hugging_face)
    cls.training_step, cls.validation_step = of_labels, validation_step
    notes["hugging face"], _ = train(hugging_face)
    notes["tied"] = (
        hugging_face.model.lm_head.weight is hugging_face.model.model.embed_tokens.weight
    )
    rotary = hugging_face.model.model.rotary_emb
    notes["rotary"] = [rotary.inv_freq.tolist(), llama().model.rotary_emb.inv_freq.tolist()]
    return notes


MEASURED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "8bit": {"optimizer": "8bit"},
    "activation_checkpointing": {"activation_checkpointing": "all"},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
    "optimizer_in_backward": {"optimizer_in_backward": True},
}


class ManyTokens(Tied):
    """Needs most for its logits."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.repeat(8, 1))


class Biased(Tied):
    """Needs most when gradients are summed: gloo copies them, which NCCL does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head.bias = nn.Parameter(torch.zeros(self.head.out_features))


def without_validation(make: Any = ManyTokens, num_words: int = 3000, **methods: Any) -> Any:
    made = lit(make=functools.partial(make, num_words=num_words), **methods)
    made.log = lambda *args, **kwargs: None  # its figures are what other steps leave
    return made


def wait_for_gloo(patch: pytest.MonkeyPatch) -> None:
    """Let its threads drop what they have sent, which on a busy CPU may be a moment too late."""
    names = ("all_gather_single", "all_gather_into_tensor")
    for name in (*names, "reduce_scatter_single", "reduce_scatter_tensor"):  # torch before 2.13
        if collective := getattr(torch.distributed, name, None):

            def run(*args: Any, own: Any = collective, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                time.sleep(0.02)
                return result

            patch.setattr(torch.distributed, name, run)


def of_peaks() -> Notes:
    notes: Notes = {}
    for name, settings in MEASURED.items():
        callback = off(**settings)
        gc.collect()  # what earlier fits have left
        with pytest.MonkeyPatch.context() as patch:
            wait_for_gloo(patch)
            train(without_validation(Biased), callback, limit_val_batches=0)
        notes[name] = summary_of(callback).peak_bytes
    callback = off()
    module = without_validation(Biased, configure_model=by_hand)
    train(module, callback, limit_val_batches=0, strategy=by_hand_strategy())
    return notes | {"by hand": summary_of(callback).peak_bytes}


def of_export() -> Notes:
    """Save as Hugging Face does, at first without the whole weights, then as the refusal says."""
    made = lit(make=llama, training_step=of_labels, validation_step=None)
    _, trainer = train(made, limit_val_batches=0)
    with pytest.raises(IncompatibleError) as refused:
        made.model.save_pretrained("exported")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(made.model, options=options)
    notes: Notes = {"refused": str(refused.value), "weights": weights(made.model)}
    if trainer.is_global_zero:
        made.model.save_pretrained("exported", state_dict=state)
        notes["loaded"] = weights(transformers.AutoModelForCausalLM.from_pretrained("exported"))
    return notes


SCENARIOS = {
    "peaks": of_peaks,
    "by_hand": as_by_hand,
    "own_parameter": with_own_parameter,
    "techniques": with_techniques,
    "rounded": with_rounded_techniques,
    "full": functools.partial(of_checkpoints, False),
    "sharded": functools.partial(of_checkpoints, True),
    "8bit": of_8bit_state,
    "meta": of_meta_start,
    "export": of_export,
}


# --- what the two saw ---


def test_export_to_hugging_face_says_how_to_gather_weights(report):
    first, second = report("export")
    for notes in (first, second):
        assert "`state = get_model_state_dict(model, options=StateDictOptions(" in notes["refused"]
        assert "`model.save_pretrained(path, state_dict=state)`" in notes["refused"]
    assert first["loaded"] == first["weights"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_trains_bit_for_bit_as_sharded_by_hand(report, precision):
    for notes in report("by_hand"):
        assert notes[f"{precision} ours"] == notes[f"{precision} by hand"]
        assert notes[f"{precision} ours"]["losses"][0] > 0.5


@pytest.mark.parametrize("name", LARGE)
def test_large_parameters_outside_of_blocks_train_as_sharded_by_hand(report, name):
    rtol = 1e-5 if name == "Also" else 0  # three gradients are added in another order
    for notes in report("by_hand"):
        ours, by_hand = notes[f"{name} ours"], notes[f"{name} by hand"]
        for key, values in (by_hand["weights"] | {"losses": by_hand["losses"]}).items():
            found = torch.tensor((ours["weights"] | {"losses": ours["losses"]})[key])
            torch.testing.assert_close(found, torch.tensor(values), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("way", ["other package", "forward"])
def test_other_ways_to_write_it_train_the_same(report, way):
    for notes in report("by_hand"):
        assert notes[way] == notes["32-true ours"]


def test_steps_may_use_parts_and_parameters_outside_of_blocks(report):
    first, second = report("own_parameter")
    assert first["ours"]["weights"] == second["ours"]["weights"]
    for notes in (first, second):
        torch.testing.assert_close(
            torch.tensor(notes["ours"]["losses"]), torch.tensor(notes["ddp"]["losses"])
        )
        for name, values in notes["ddp"]["weights"].items():
            torch.testing.assert_close(
                torch.tensor(notes["ours"]["weights"][name]), torch.tensor(values)
            )
        assert notes["ours"]["weights"]["scale"] != [1.0] * WIDTH


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_change_nothing(report, name):
    for notes in report("techniques"):
        assert notes[name] == notes[f"{name}, without"]


@pytest.mark.parametrize("name", ROUNDED)
def test_techniques_round(report, name):
    for notes in report("rounded"):
        found, expected = notes[name]["weights"], notes[f"{name}, without"]["weights"]
        assert found != expected
        bound = ROUNDED[name][1]
        for key, values in expected.items():
            torch.testing.assert_close(
                torch.tensor(found[key]), torch.tensor(values), rtol=bound, atol=bound
            )


@pytest.mark.parametrize("name", ["full", "sharded", "8bit"])
def test_a_resumed_fit_goes_on_bit_for_bit(report, name):
    for notes in report(name):
        number = len(notes["first"]["losses"])
        assert notes["whole"]["losses"][:number] == notes["first"]["losses"]
        assert notes["resumed"]["losses"] == notes["whole"]["losses"][number:]
        assert notes["resumed"]["weights"] == notes["whole"]["weights"]


@pytest.mark.parametrize("name", ["full", "8bit"])
def test_a_full_checkpoint_is_a_plain_one(report, name):
    notes = report(name)[0]
    checkpoint = torch.load(notes["path"], weights_only=True)
    module = lit()
    module.load_state_dict(checkpoint["state_dict"])
    assert weights(module) == notes["first"]["weights"]
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for param in module.parameters():
        assert optimizer.state[param]["exp_avg"].shape == param.shape
        assert optimizer.state[param]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("name", ["full", "8bit"])
def test_one_process_goes_on_from_a_checkpoint_of_two(report, name, tmp_path):
    notes = report(name)[0]
    module, callbacks = steady(), [low_bit()] if name == "8bit" else []
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": RANKS}
    trainer = make_trainer(pl, *callbacks, default_root_dir=tmp_path, **settings)
    # The batches of the two processes, one after the other: the same gradient.
    both = [batch for pair in zip(*map(batches, range(RANKS)), strict=True) for batch in pair]
    trainer.fit(module, loader_of(both), loader_of(batches(0, 4)), ckpt_path=notes["path"])
    number = len(notes["first"]["losses"])
    of_ranks = [seen["whole"]["losses"][number:] for seen in report(name)]
    expected = [loss for pair in zip(*of_ranks, strict=True) for loss in pair]
    rtol = 1e-5 if name == "full" else 1e-2  # blocks of quantized state begin elsewhere
    torch.testing.assert_close(
        torch.tensor(module.losses), torch.tensor(expected), rtol=rtol, atol=0
    )


@pytest.fixture(scope="module")
def folder_of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run four processes, and then two that go on from their checkpoint."""
    folder = tmp_path_factory.mktemp("four")
    for size in (4, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={size}", "-m", "tests.trainer.test_fsdp2", str(folder)]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
    return folder


def test_four_processes_train_bit_for_bit_as_sharded_by_hand(folder_of_four):
    for rank in range(4):
        notes = json.loads((folder_of_four / f"{rank}.json").read_text())
        assert notes["ours"] == notes["by hand"]


def test_a_fit_goes_on_with_fewer_and_fewer_processes(folder_of_four, tmp_path):
    both = [batch for pair in zip(*map(batches, range(RANKS)), strict=True) for batch in pair]
    found = []
    for path in (None, folder_of_four / "2.ckpt"):
        module = exact()
        settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": EPOCHS[1]}
        trainer = make_trainer(pl, default_root_dir=tmp_path, **settings)
        trainer.fit(module, loader_of(both), loader_of(batches(0, 4)), ckpt_path=path)
        found.append(module)
    whole, resumed = found
    number = len(resumed.losses)
    assert number == len(both)
    torch.testing.assert_close(
        torch.tensor(resumed.losses), torch.tensor(whole.losses[-number:]), rtol=1e-10, atol=0
    )
    for param, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-10, atol=1e-10)


def test_8bit_state_is_chosen_by_whole_sizes(report):
    for notes in report("8bit"):
        kinds = {name: kind for name, (kind, *_) in notes["types"].items()}
        module = lit()
        optimizer = (
            LowBitOptimizer("8bit", module=module).apply(module.configure_optimizers()).target
        )
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        alone = {n: str(optimizer.state[p]["state1"].dtype) for n, p in module.named_parameters()}
        assert kinds == alone
        assert {*kinds.values()} == {"torch.uint8", "torch.float32"}
        assert all(local <= -(-whole // RANKS) for _, local, whole in notes["types"].values())


def test_state_is_converted_between_widths(report):
    for notes in report("8bit"):
        number = len(notes["first"]["losses"])
        for way in ("to 8 bits", "to 32 bits"):
            torch.testing.assert_close(
                torch.tensor(notes[way]["losses"]),
                torch.tensor(notes["whole"]["losses"][number:]),
                rtol=0.05,
                atol=0,
            )


def test_a_model_of_the_meta_device_is_initialized(report):
    first, second = report("meta")
    for kind in ("torch", "hugging face"):
        assert first[kind]["weights"] == second[kind]["weights"]
        assert first[kind]["losses"][-1] < first[kind]["losses"][0] < 8
    # Processes draw different shards.
    rows = torch.tensor(first["torch"]["weights"]["model.embedding.weight"]).view(RANKS, -1)
    assert not torch.equal(rows[0], rows[1])
    assert first["tied"]
    assert first["buffer"] == [0.0, 1.0, 2.0]
    assert first["rotary"][0] == first["rotary"][1]
    assert (
        first["hugging face"]["logged"]["generated"]
        == second["hugging face"]["logged"]["generated"]
    )


def test_its_own_configure_model_is_given_back(report):
    for notes in report("full"):
        assert notes["patched"] == []


def predicted(name: str, world_size: int, make: Any = Biased) -> MemoryPrediction:
    return predict_memory(
        without_validation(make),
        batches(0)[0],
        settings={"preset": "off", **MEASURED[name]},
        device="cpu",
        strategy="fsdp2",
        world_size=world_size,
    )


@pytest.mark.parametrize("name", MEASURED)
def test_a_process_is_predicted_without_the_others(report, name):
    measured = [notes[name] for notes in report("peaks")]
    found = predicted(name, RANKS)
    assert not torch.distributed.is_initialized()
    assert measured == RANKS * [found.peak_bytes]
    assert found.settings["fsdp2"] == f"1 of {RANKS} processes"


def test_a_large_table_needs_fewer_copies_than_sharded_by_hand(report):
    table_bytes = Tied(num_words=3000).head.weight.nbytes
    for notes in report("peaks"):
        assert notes["by hand"] - notes["nothing"] > 1.4 * table_bytes


def test_a_module_that_was_validated_in_inference_mode_trains():
    module = lit(make=LARGE["Tied"])
    module.log = lambda *args, **kwargs: None
    with first_of(2, "fsdp2", pl, {}) as settings:  # Lightning leaves it out with gloo
        trainer = make_trainer(pl, use_distributed_sampler=False, **settings)
        trainer.validate(module, loader_of(batches(0)))
        assert trainer.validate_loop.inference_mode
        trainer.fit(module, loader_of(batches(0)), loader_of(batches(0)))
    assert module.losses
    del module, trainer, settings
    gc.collect()
    assert not any(isinstance(each, _Table) for each in gc.get_objects())


def test_more_processes_hold_less_each():
    sharded = [predicted("nothing", number, Tied).peak for number in (1, 2, 4, 8)]
    for kind in ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes"):
        sizes = [getattr(peak, kind) for peak in sharded]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] < sizes[0] / 7


# --- what is refused, in this process ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "fsdp"}, "`strategy='fsdp'` is not predicted. Use `strategy='fsdp2'`"),
        ({"world_size": 2}, "`world_size=2` with `strategy=None`: it must be"),
        ({"strategy": "fsdp2", "world_size": 0}, "`world_size=0` with `strategy='fsdp2'`"),
    ],
)
def test_processes_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        predict_memory(nn.Linear(2, 2), torch.ones(1, 2), **arguments)


def test_what_the_strategy_refuses_is_refused_in_a_prediction():
    with pytest.raises(IncompatibleError, match="`FSDP2Strategy` moves weights and gradients"):
        predict_memory(
            Tied(),
            batches(0)[0],
            settings={"offload": "parameters"},
            strategy="fsdp2",
            world_size=2,
        )


def test_a_parameter_in_two_parts_is_refused():
    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2)])
    model[0].linear1.weight = model[1].linear1.weight
    with pytest.raises(IncompatibleError, match=r"`0.linear1.weight` and `1.linear1.weight`: one"):
        shard(model, None)


def test_a_parameter_without_a_size_is_refused():
    with pytest.raises(IncompatibleError, match="and 1 more: it has no size yet"):
        shard(nn.Sequential(nn.LazyLinear(3)), None)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="meta"))


class Half(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("part", "why"),
    [(Bare, "nothing says what its values are. Give it a method `reset_parameters`"),
     (Half, "some tensors of it or its model are on the meta device")],
)  # fmt: skip
def test_values_that_nobody_knows_are_refused(part, why):
    with pytest.raises(IncompatibleError, match=why):
        materialize(nn.Sequential(part()), torch.device("cpu"))


if __name__ == "__main__":
    go_on(Path(sys.argv[1]))
