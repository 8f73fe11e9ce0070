"""Layers split by a plan of Hugging Face, on two processes, and on two times two with FSDP2."""

import functools
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_memsave import (
    ActivationCheckpointing,
    FSDP2Strategy,
    LowBitOptimizer,
    MemSaveCallback,
)
from lightning_memsave.errors import IncompatibleError, NoEffectWarning
from lightning_memsave.trainer.tensor_parallel import split_by_plan
from tests.callbacks import ranks
from tests.callbacks.lit import loader_of, make_trainer, summary_of
from tests.callbacks.ranks import Notes
from tests.trainer.test_fsdp2 import NUM_WORDS, WIDTH, lit, loss_of, off, weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_prediction", "any_saving_counts")]

LAYERS = 2
"""Processes that share a layer."""
NUMBER = int(os.environ.get("WORLD_SIZE", LAYERS))


def starcoder(dropout: float = 0.0, *, is_tied: bool = True) -> Any:
    """Biases, dropout, and no part that computes in float32."""
    config = transformers.Starcoder2Config(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=2 * WIDTH, vocab_size=NUM_WORDS, tie_word_embeddings=is_tied,
        residual_dropout=dropout, embedding_dropout=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.Starcoder2ForCausalLM(config).double()


def module_of(**methods: Any) -> Any:
    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.model(input_ids=batch, use_cache=False).logits, batch)
        self.losses.append(loss.item())
        return loss

    make = methods.pop("make", starcoder)
    return lit(make=make, training_step=training_step, **methods)


def batches(part: int, parts: int) -> list[Tensor]:
    """Give the batches of a part of the processes, of two samples for all of them."""
    generator = torch.Generator().manual_seed(3)
    samples = torch.randint(NUM_WORDS, (12, 1, 8), generator=generator)
    return [sample.clone() for sample in samples[part::parts]]


def train(
    module: Any, *callbacks: Any, strategy: Any = None, ckpt_path: Any = None, **settings: Any
) -> tuple[Notes, Any]:
    strategy = strategy or FSDP2Strategy(tensor_parallel_size=LAYERS)
    how: dict[str, Any] = {"devices": NUMBER, "strategy": strategy, "limit_val_batches": 0}
    rank = ranks.rank_of_this_process()
    torch.manual_seed(100 + rank)
    trainer = make_trainer(pl, *callbacks, use_distributed_sampler=False, **(how | settings))
    loader = loader_of(batches(rank // LAYERS, NUMBER // LAYERS))
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return {"losses": module.losses, "weights": weights(module)}, trainer


def by_hand(self: Any) -> None:
    """Split as transformers does, and shard as Lightning's documentation does."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model, mesh = self.model, self.device_mesh["data_parallel"]
    plan = model._expand_parallel_plan(model.tp_plan)
    plan.pop("lm_head.weight")  # tied
    apply_tensor_parallelism(model, self.device_mesh["tensor_parallel"], plan)
    model.tie_weights()
    torch.manual_seed(100 + ranks.rank_of_this_process() // LAYERS * LAYERS)
    if mesh.size() > 1:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


# --- what runs on each rank ---

AT_ONCE: dict[str, Any] = {"accumulate_grad_batches": 2}


def noisy() -> Any:
    return module_of(make=lambda: starcoder(dropout=0.1))


def of_training() -> Notes:
    plain = ModelParallelStrategy(NUMBER // LAYERS, LAYERS)
    hand = module_of(make=lambda: starcoder(dropout=0.1), configure_model=by_hand)
    notes = {"by hand": train(hand, strategy=plain, **AT_ONCE)[0]}
    notes["ours"] = train(noisy(), **AT_ONCE)[0]
    callback = off(activation_checkpointing="all")
    notes["checkpointing"] = train(noisy(), callback, **AT_ONCE)[0]
    notes["samples"] = summary_of(callback).num_samples
    for name, make in CLIPPED.items():
        notes[name], trainer = train(module_of(make=make), gradient_clip_val=0.3, **AT_ONCE)
        split = [p for p in trainer.lightning_module.parameters() if isinstance(p, DTensor)]
        notes[name]["shares"] = [p.to_local().numel() / p.numel() for p in split]
    in_tiles = off(activation_checkpointing=ActivationCheckpointing("tiled", tile=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)  # where feed-forward stays whole
        module = module_of(make=CLIPPED["tied"])
        notes["tiled"], _ = train(module, in_tiles, gradient_clip_val=0.3, **AT_ONCE)
    return notes


CLIPPED = {"tied": starcoder, "untied": functools.partial(starcoder, is_tied=False)}


def low_bit() -> MemSaveCallback:
    return off(optimizer=LowBitOptimizer("8bit", force_8bit=("*.c_fc.weight", "*.lm_head.weight")))


def of_checkpoints(name: str, *make_callbacks: Any) -> Notes:
    """Train two epochs; train one, save, and train the other in a new Trainer."""

    def run(**settings: Any) -> tuple[Notes, Any]:
        module = module_of().float() if make_callbacks else module_of()
        return train(module, *(make() for make in make_callbacks), **settings)

    path = Path(f"{name}.ckpt").resolve()
    whole, _ = run(max_epochs=2)
    first, trainer = run()
    trainer.save_checkpoint(path)
    torch.distributed.barrier()
    resumed, _ = run(max_epochs=2, ckpt_path=path)
    kinds = {}
    if make_callbacks:
        names = {param: name for name, param in trainer.lightning_module.named_parameters()}
        states = trainer.optimizers[0].state.items()
        kinds = {names[p]: [str(s["state1"].dtype), s["state1"].numel()] for p, s in states}
    return {
        "whole": whole, "first": first, "resumed": resumed, "path": str(path), "kinds": kinds
    }  # fmt: skip


def of_meta_start() -> Notes:
    def configure_model(self: Any) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = starcoder()

    made = module_of(make=nn.Identity, configure_model=configure_model)
    made.model = None
    return train(made, max_epochs=4)[0]


SCENARIOS = {
    "training": of_training,
    "32bit": lambda: of_checkpoints("32bit"),
    "8bit": lambda: of_checkpoints("8bit", low_bit),
    "meta": of_meta_start,
}


# --- what they saw ---


def test_trains_bit_for_bit_as_split_by_hand(seen):
    for notes in seen("training"):
        assert notes["ours"] == notes["by hand"]
        assert notes["checkpointing"] == notes["ours"]
        assert notes["samples"] == 12  # once, for processes that have the same


def test_processes_that_share_layers_agree(seen):
    all_notes = seen("training")
    for first, second in zip(all_notes[::LAYERS], all_notes[1::LAYERS], strict=True):
        assert first == second
    assert all(notes["ours"]["weights"] == all_notes[0]["ours"]["weights"] for notes in all_notes)


def test_feed_forward_runs_in_tiles(seen):
    for notes in seen("training"):
        close(notes["tiled"]["losses"], notes["tied"]["losses"], rtol=1e-10)
        for key, values in notes["tied"]["weights"].items():
            close(notes["tiled"]["weights"][key], values, rtol=1e-10)


@pytest.mark.parametrize("name", CLIPPED)
def test_trains_as_one_process(seen, name, tmp_path):
    all_notes = seen("training")
    parts = len(all_notes) // LAYERS
    module = module_of(make=CLIPPED[name])
    settings: dict[str, Any] = {"accumulate_grad_batches": 2 * parts, "gradient_clip_val": 0.3}
    trainer = make_trainer(pl, default_root_dir=tmp_path, limit_val_batches=0, **settings)
    trainer.fit(module, loader_of(batches(0, 1)), loader_of(batches(0, 6)))
    assert trainer.global_step >= 3
    alone = weights(module)
    for part, notes in enumerate(all_notes[::LAYERS]):
        assert set(notes[name]["shares"]) <= {1 / len(all_notes), 1 / parts}
        assert 1 / len(all_notes) in notes[name]["shares"]
        close(notes[name]["losses"], module.losses[part::parts], rtol=1e-10)
        assert notes[name]["weights"].keys() == alone.keys()
        for key, values in alone.items():
            close(notes[name]["weights"][key], values, rtol=1e-10)


def close(found: list[float], expected: list[float], rtol: float) -> None:
    here, there = (torch.tensor(values, dtype=torch.float64) for values in (found, expected))
    torch.testing.assert_close(here, there, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", ["32bit", "8bit"])
def test_a_resumed_fit_goes_on_bit_for_bit(seen, name):
    for notes in seen(name):
        number = len(notes["first"]["losses"])
        assert notes["whole"]["losses"][:number] == notes["first"]["losses"]
        assert notes["resumed"]["losses"] == notes["whole"]["losses"][number:]
        assert notes["resumed"]["weights"] == notes["whole"]["weights"]


@pytest.mark.parametrize("name", ["32bit", "8bit"])
def test_a_checkpoint_is_a_plain_one(seen, name):
    notes = seen(name)[0]
    checkpoint = torch.load(notes["path"], weights_only=True)
    module = module_of().float() if name == "8bit" else module_of()
    module.load_state_dict(checkpoint["state_dict"])
    assert weights(module) == notes["first"]["weights"]
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for param in module.parameters():
        assert optimizer.state[param]["exp_avg"].shape == param.shape


def test_one_process_goes_on_from_a_checkpoint(seen, tmp_path):
    all_notes = seen("32bit")
    parts = len(all_notes) // LAYERS
    module = module_of()
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": parts}
    trainer = make_trainer(pl, default_root_dir=tmp_path, limit_val_batches=0, **settings)
    trainer.fit(
        module, loader_of(batches(0, 1)), loader_of(batches(0, 6)), ckpt_path=all_notes[0]["path"]
    )
    for part, notes in enumerate(all_notes[::LAYERS]):
        close(notes["resumed"]["losses"], module.losses[part::parts], rtol=1e-8)
    for key, values in weights(module).items():
        close(all_notes[0]["resumed"]["weights"][key], values, rtol=1e-8)


def test_8bit_state_is_chosen_by_whole_sizes_and_close(seen):
    of_32_bits = seen("32bit")
    module = module_of().float()
    own = LowBitOptimizer("8bit", module=module, force_8bit=("*.c_fc.weight", "*.lm_head.weight"))
    optimizer = own.apply(module.configure_optimizers()).target
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    alone = {n: str(optimizer.state[p]["state1"].dtype) for n, p in module.named_parameters()}
    for notes, expected in zip(seen("8bit"), of_32_bits, strict=True):
        assert {name: kind for name, (kind, _) in notes["kinds"].items()} == alone
        assert {*alone.values()} == {"torch.uint8", "torch.float32"}
        split = "model.model.layers.0.mlp.c_fc.weight"
        assert notes["kinds"][split][1] == 2 * WIDTH * WIDTH // len(of_32_bits)
        close(notes["whole"]["losses"], expected["whole"]["losses"], rtol=0.05)
        assert notes["whole"] != expected["whole"]


def test_a_model_of_the_meta_device_is_initialized(seen):
    first, *others = seen("meta")
    assert all(notes["weights"] == first["weights"] for notes in others)
    assert first["losses"][-1] < first["losses"][0] < 8
    rows = torch.tensor(first["weights"]["model.model.layers.0.mlp.c_fc.weight"]).view(2, -1)
    assert not torch.equal(rows[0], rows[1])


# --- what is refused, in this process ---


class Mesh:
    def __init__(self, size: int) -> None:
        self.size = lambda: size


def qwen() -> nn.Module:
    config = transformers.Qwen3Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=8, vocab_size=8, head_dim=4,
    )  # fmt: skip
    model: nn.Module = transformers.Qwen3ForCausalLM(config)
    return model


@pytest.mark.parametrize(
    ("model", "size", "why"),
    [
        (lambda: nn.Linear(2, 2), 2, "no part of it has a plan"),
        (starcoder, 4, "2 heads cannot be shared by 4 processes"),
        (qwen, 2, "which sums accumulated gradients twice"),
    ],
)
def test_what_cannot_be_split_is_refused(model, size, why):
    with pytest.raises(IncompatibleError, match=why):
        split_by_plan(nn.Sequential(model()), Mesh(size))
