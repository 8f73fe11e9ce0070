"""Each way in which DDP shares gradients, with all techniques at once, on two processes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_memsave import ChunkedCrossEntropy, LowBitOptimizer, MemSaveCallback
from lightning_memsave.errors import IncompatibleError
from tests.callbacks.lit import callback_with, loader_of, make_lit, rows_of, without_dropout
from tests.callbacks.ranks import RANKS, Notes, rank_of_this_process
from tests.callbacks.test_strategies import SGD, assert_near, raised_by, train
from tests.trainer.test_fsdp2 import NUM_WORDS, WIDTH, Tied

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_prediction", "any_saving_counts")]


class OnOneRank(Tied):
    """A layer that only the first rank uses, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        if rank_of_this_process() == 0:
            loss = loss + self.sometimes(self.embedding(tokens)).square().mean()
        return loss


class Language(nn.Module):
    """Hugging Face's GPT-2."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        config: Any = transformers.GPT2Config(
            vocab_size=NUM_WORDS,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            n_positions=8,
            bos_token_id=0,
            eos_token_id=0,
        )
        config._attn_implementation = attention
        self.model: Any = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class OnCpu(DDPStrategy):
    """Lightning registers communication hooks on a GPU only; with gloo they work on a CPU too."""

    def _register_ddp_hooks(self) -> None:
        self.model: Any
        _register_ddp_comm_hook(
            self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
        )


def power_sgd(**settings: Any) -> DDPStrategy:
    """Compress the matrices of a bucket, from the third step on."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    return OnCpu(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook.powerSGD_hook, **settings)


STRATEGIES: dict[str, Callable[[], DDPStrategy]] = {
    "plain": DDPStrategy,
    "static graph": functools.partial(DDPStrategy, static_graph=True),
    "unused": functools.partial(DDPStrategy, find_unused_parameters=True),
    "views": functools.partial(DDPStrategy, gradient_as_bucket_view=True),
    "small buckets": functools.partial(DDPStrategy, bucket_cap_mb=0.05),
    "fp16": functools.partial(OnCpu, ddp_comm_hook=default_hooks.fp16_compress_hook),
    "powerSGD": power_sgd,
    "powerSGD in fp16": functools.partial(
        power_sgd, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper
    ),
}
EXACT = ("plain", "static graph", "unused", "views", "small buckets")
"""Those that reduce what they are given: others round it, and rounding differs from rounding."""


def module(name: str, model: nn.Module | None = None, **methods: Any) -> Any:
    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch)
        self.log("loss", loss)
        return loss

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(NUM_WORDS, (RANKS, 5, 3, 8), generator=generator)
    rank = rank_of_this_process()
    batches = [batch.clone() for batch in tokens[rank]]
    torch.manual_seed(1)
    model = model or (OnOneRank() if name == "unused" else Tied())
    own = {"training_step": training_step, "train_dataloader": lambda self: loader_of(batches)}
    return make_lit(model=model, **(own | methods))


CHUNKED = ChunkedCrossEntropy(chunk_size=5, heads="model.head")
LOW_BIT = LowBitOptimizer("8bit", min_8bit_size=64)


def in_8_bits(self: Any) -> Any:
    return (
        LowBitOptimizer("8bit", min_8bit_size=64, module=self)
        .apply(torch.optim.AdamW(self.parameters(), lr=1e-3))
        .target
    )


def run(name: str) -> Notes:
    def fit(made: Any, *callbacks: Any, **settings: Any) -> Notes:
        settings |= {"limit_val_batches": 0}
        return train(made, *callbacks, strategy=STRATEGIES[name](), **settings)

    callback = MemSaveCallback(
        activation_checkpointing="all",
        optimizer=LOW_BIT,
        precision="bf16-mixed",
        offload="activations",
        report=False,
    )
    notes: Notes = {
        "plain": fit(module(name, configure_optimizers=in_8_bits), precision="bf16-mixed"),
        "ours": fit(module(name), callback),
        "rows": {key: [row.status, *row.details] for key, row in rows_of(callback).items()},
    }
    bare = MemSaveCallback(preset="bitwise", report=False)
    notes |= {"bitwise": fit(module(name), bare), "bare": fit(module(name))}
    notes["bitwise rows"] = {key: row.status for key, row in rows_of(bare).items()}
    if name in EXACT:
        exact = lambda: without_dropout(module(name, **SGD)).double()  # noqa: E731
        chunked = MemSaveCallback(preset="off", chunked_cross_entropy=CHUNKED, report=False)
        notes |= {"chunked": fit(exact(), chunked), "logits": fit(exact())}
    return notes


def run_attention(strategy: str = "ddp") -> Notes:
    """In one fit by the callback, in the other by Hugging Face's own setting."""
    settings: Notes = {"strategy": strategy, "limit_val_batches": 0}

    def made(attention: str) -> Any:
        torch.manual_seed(1)
        return module("attention", Language(attention))

    callback = MemSaveCallback(preset="off", attention="sdpa", report=False)
    return {
        "ours": train(made("eager"), callback, **settings),
        "plain": train(made("sdpa"), **settings),
        "other": train(made("eager"), **settings),
        "status": rows_of(callback)["attention"].status,
    }


def run_fsdp2() -> Notes:
    settings: Notes = {"strategy": "memsave_fsdp2", "limit_val_batches": 0}
    callback = MemSaveCallback(preset="bitwise", report=False)
    return {
        "bitwise": train(module("plain"), callback, **settings),
        "bare": train(module("plain"), **settings),
        "rows": {key: row.status for key, row in rows_of(callback).items()},
    }


def run_refused() -> Notes:
    """What DDP cannot do."""
    return {
        argument: raised_by(
            lambda argument=argument, value=value: train(  # type: ignore[misc]
                module("plain"), MemSaveCallback(preset="off", **{argument: value}, report=False)
            )
        )
        for argument, value in (
            ("optimizer_in_backward", True),
            ("low_precision_weights", "stochastic"),
        )
    }


def run_communication() -> Notes:
    """Count what is communicated in each batch beside what DDP itself does in backward."""

    def counted(*callbacks: Any) -> list[int]:
        numbers: list[int] = []
        per_batch = callback_with(on_train_batch_start=lambda *_: numbers.append(0))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"):
                original = getattr(distributed, name)

                def count(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                    if numbers:
                        numbers[-1] += 1
                    return original(*args, **kwargs)

                patch.setattr(distributed, name, count)
            settings: Notes = {"limit_val_batches": 0, "log_every_n_steps": 50}
            made = module("plain", log=lambda *args, **kwargs: None)
            train(made, *callbacks, per_batch, **settings)
        return numbers

    return {"plain": counted(), "ours": counted(MemSaveCallback(report=False))}


SCENARIOS: dict[str, Callable[[], Notes]] = {
    **{name: functools.partial(run, name) for name in STRATEGIES},
    "attention": run_attention,
    "attention of FSDP2": functools.partial(run_attention, "memsave_fsdp2"),
    "fsdp2": run_fsdp2,
    "refused": run_refused,
    "communication": run_communication,
}


# --- what the two saw ---


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_techniques_train_as_without_them(report, name):
    """Beside a module that has bitsandbytes' optimizer, precision and attention itself."""
    first, second = report(name)
    for notes in (first, second):
        on = {key for key, (status, *_) in notes["rows"].items() if status == "on"}
        assert on >= {"activation_checkpointing", "optimizer", "precision", "offload"}
        assert notes["ours"] == notes["plain"]
    assert first["ours"]["parameters"] == second["ours"]["parameters"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_bitwise_preset_is_bitwise(report, name):
    for notes in report(name):
        assert notes["bitwise"] == notes["bare"]
        assert notes["bitwise rows"]["early_release"] == "on"


@pytest.mark.parametrize("name", ["attention", "attention of FSDP2"])
def test_attention_is_as_hugging_face_sets_it(report, name):
    for notes in report(name):
        assert notes["status"] == "on"
        assert notes["ours"] == notes["plain"] != notes["other"]


def test_early_release_is_bitwise_under_fsdp2(report):
    for notes in report("fsdp2"):
        assert notes["rows"]["early_release"] == "on"
        assert notes["bitwise"] == notes["bare"]


@pytest.mark.parametrize("name", EXACT)
def test_losses_in_chunks_round_only(report, name):
    for notes in report(name):
        assert notes["chunked"]["parameters"].keys() == notes["logits"]["parameters"].keys()
        for key, values in notes["logits"]["parameters"].items():
            assert_near(notes["chunked"]["parameters"][key], values)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("optimizer_in_backward", "keeps all gradients in its buckets"),
        ("low_precision_weights", "sums gradients of processes in their own type"),
    ],
)
def test_what_ddp_cannot_do_is_refused(report, argument, reason):
    for notes in report("refused"):
        kind, message = notes[argument]
        assert kind == IncompatibleError.__name__
        assert reason in message


def test_nothing_is_communicated_after_the_probe(report):
    for notes in report("communication"):
        assert sum(notes["ours"][:2]) > sum(notes["plain"][:2])
        assert notes["ours"][2:4] == notes["plain"][2:4]  # the fifth is the last of the fit
