"""Fit in a process of its own, and print what it keeps resident in each moment of the run."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback

WIDTH, NUM_BLOCKS = 1024, 8  # 16.8 million parameters
FORMS: dict[str, dict[str, Any]] = {
    "checkpointed": {"activation_checkpointing": "all"},
    "parameters": {"offload": "parameters"},
    "split": {
        "offload": "parameters+activations",
        "low_precision_weights": "split",
        "optimizer": "8bit",
        "optimizer_in_backward": True,
    },
}


def tell(found: Any) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.relu(self.first(x)))
        return y


class Lit(pl.LightningModule):
    def __init__(self, width: int = WIDTH, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(num_blocks)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def make_trainer(form: str, *callbacks: Any, **settings: Any) -> Any:
    own = MemSaveCallback(preset="off", predict=False, report=False, **FORMS[form])
    if form == "split":
        settings["precision"] = "bf16-mixed"
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings = {"max_epochs": 1, "accelerator": "cpu", **quiet, **settings}
    return pl.Trainer(callbacks=[own, *callbacks], **settings)


def batches(num: int, width: int = WIDTH) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randn(2, width, generator=generator) for _ in range(num)]
    return DataLoader(data, batch_size=None)


class Sampler(threading.Thread):
    """Samples resident memory that the system cannot take back, as it can pages of files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.moment, self.peaks = "setup", dict[str, int]()

    def run(self) -> None:
        while True:
            self.sample()
            time.sleep(0.001)

    def sample(self) -> None:
        fields = dict(
            line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
        )
        sizes = [int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")]
        self.peaks[self.moment] = max(self.peaks.get(self.moment, 0), sum(sizes))


class Moments(pl.Callback):
    def __init__(self, sampler: Sampler, path: str) -> None:
        self.sampler, self.path = sampler, path

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.sampler.moment = "steps"

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % 4 == 3:
            self.sampler.sample()
            self.sampler.moment = "saving"
            trainer.save_checkpoint(self.path)
            self.sampler.sample()
            self.sampler.moment = "step after"

    def on_train_end(self, *_: Any) -> None:
        self.sampler.moment = "end"


def measure(form: str, path: str) -> None:
    sampler = Sampler()
    module = Lit()
    sampler.start()
    is_resumed = Path(path).exists()
    trainer = make_trainer(form, Moments(sampler, path), max_epochs=2 if is_resumed else 1)
    trainer.fit(module, batches(4), ckpt_path=path if is_resumed else None)
    sampler.sample()
    tell(sampler.peaks)


class Killed(pl.Callback):
    """Lets forks of the process save, which the system kills when a file has so many bytes."""

    def __init__(self, path: str, sizes: list[int]) -> None:
        self.path, self.sizes = path, sizes

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        import resource

        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)
        if trainer.global_step != 2:
            return
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()  # a fork has no threads
        for size in self.sizes:
            process = os.fork()
            if not process:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                trainer.strategy.save_checkpoint(checkpoint, self.path)
                os._exit(0)
            status = os.waitpid(process, 0)[1]
            found = torch.load(self.path, weights_only=True)
            tell([size, os.WIFSIGNALED(status), found["global_step"]])
            assert found["state_dict"]["blocks.0.first.weight"].isfinite().all()


def kill(form: str, path: str, *sizes: str) -> None:
    small = 64
    callback = Killed(path, [int(size) for size in sizes])
    make_trainer(form, callback).fit(Lit(small, 2), batches(3, small))


if __name__ == "__main__":
    {"measure": measure, "kill": kill}[sys.argv[1]](*sys.argv[2:])
