"""DeepSpeed's ZeRO on two processes with gloo, where it is installed: nothing of ours needs it."""

import functools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed")

from lightning.pytorch.strategies import DeepSpeedStrategy  # noqa: E402

from lightning_memsave import MemSaveCallback  # noqa: E402
from tests.callbacks.lit import loader_of, make_lit, rows_of, summary_of  # noqa: E402
from tests.callbacks.ranks import RANKS, Notes, rank_of_this_process  # noqa: E402
from tests.callbacks.test_ddp import Language  # noqa: E402
from tests.callbacks.test_strategies import train  # noqa: E402
from tests.trainer.test_fsdp2 import NUM_WORDS  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_prediction", "any_saving_counts")]

BUCKET_BYTES = 4 * 200_000_000
STAGES = ("1", "2", "3", "2 offloaded", "3 offloaded")
SETTINGS: dict[str, dict[str, Any]] = {
    "activation_checkpointing": {"activation_checkpointing": "all"},
    "early_release": {"preset": None, "optimizer": None, "activation_checkpointing": None},
}


class OnCpu(DeepSpeedStrategy):
    """Lightning asks for a GPU and an index of it; DeepSpeed itself does not."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        # It would be compiled, for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)


def make_strategy(stage: str) -> OnCpu:
    number, _, is_offloaded = stage.partition(" ")
    if stage in {"1", "2"}:
        return OnCpu(stage=int(stage), process_group_backend="gloo", logging_batch_size_per_gpu=3)
    config: dict[str, Any] = {
        "zero_optimization": {
            "stage": int(number),
            # Otherwise small parameters stay whole.
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": BUCKET_BYTES // 4,
            **({"offload_optimizer": {"device": "cpu"}} if is_offloaded else {}),
        },
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own optimizer of the host would be compiled, for minutes.
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": 3,
    }
    return OnCpu(config=config, process_group_backend="gloo")


def module() -> Any:
    torch.manual_seed(1)
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)]

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()

    data = torch.randn(RANKS, 4, 3, 4, 32, generator=torch.Generator().manual_seed(2))
    batches = [batch.clone() for batch in data[rank_of_this_process()]]
    own = {"training_step": training_step, "train_dataloader": lambda self: loader_of(batches)}
    return make_lit(model=nn.Sequential(*layers), **own)


def run(stage: str) -> Notes:
    def fit(*callbacks: Any) -> Notes:
        strategy = make_strategy(stage)
        return train(module(), *callbacks, strategy=strategy, limit_val_batches=0)

    notes: Notes = {"plain": fit()}
    for name, settings in SETTINGS.items():
        callback = MemSaveCallback(**({"preset": "off"} | settings), report=False)
        notes[name] = fit(callback)
        notes[f"{name} is"] = rows_of(callback)[name].status
        notes["counted"] = summary_of(callback).by_category["gradient"]
    return notes


OF_TRAINER: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}


def run_of_trainer(stage: str) -> Notes:
    """What a Trainer may have, written to it and to the callback."""
    notes: Notes = {}
    for name, value in OF_TRAINER.items():
        callback = MemSaveCallback(preset="off", report=False, **{name: value})
        how: dict[str, Any] = {"strategy": make_strategy(stage), "limit_val_batches": 0}
        notes[f"{name} ours"] = train(module(), callback, **how)
        how["strategy"] = make_strategy(stage)
        notes[f"{name} theirs"] = train(module(), **how | {name: value})
    return notes


def run_attention(stage: str) -> Notes:
    def fit(attention: str, *callbacks: Any) -> Notes:
        torch.manual_seed(1)
        words = torch.randint(
            NUM_WORDS, (RANKS, 4, 3, 8), generator=torch.Generator().manual_seed(2)
        )
        batches = [batch.clone() for batch in words[rank_of_this_process()]]
        own = make_lit(
            model=Language(attention),
            training_step=lambda self, batch, batch_idx: self.model(batch),
            train_dataloader=lambda self: loader_of(batches),
        )
        strategy = make_strategy(stage)
        return train(own, *callbacks, strategy=strategy, limit_val_batches=0)

    callback = MemSaveCallback(preset="off", attention="sdpa", report=False)
    return {
        "plain": fit("sdpa"),
        "other": fit("eager"),
        "ours": fit("eager", callback),
        "is": rows_of(callback)["attention"].status,
    }


KINDS = {"stage": run, "attention, stage": run_attention, "of the Trainer, stage": run_of_trainer}
SCENARIOS = {
    f"{kind} {stage}": functools.partial(function, stage)
    for kind, function in KINDS.items()
    for stage in STAGES
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SETTINGS)
def test_techniques_change_nothing(report, stage, name):
    for notes in report(f"stage {stage}"):
        assert notes[f"{name} is"] == "on"
        assert notes[name] == notes["plain"]
        assert notes["counted"] == BUCKET_BYTES  # Lightning's default is as large


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OF_TRAINER)
def test_what_a_trainer_may_have_is_as_written_to_it(report, stage, name):
    found = report(f"of the Trainer, stage {stage}")
    for notes in found:
        assert notes[f"{name} ours"] == notes[f"{name} theirs"]
        assert notes[f"{name} ours"] != report(f"stage {stage}")[0]["plain"]


@pytest.mark.parametrize("stage", STAGES)
def test_attention_is_as_hugging_face_sets_it(report, stage):
    found = report(f"attention, stage {stage}")
    for notes in found:
        assert notes["is"] == "on"
        assert notes["ours"] == notes["plain"]
    assert any(notes["plain"] != notes["other"] for notes in found)
