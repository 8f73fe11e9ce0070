"""The fits that are attacked: small models, presets and techniques, accumulation and clipping."""

import contextlib
import hashlib
import inspect
import itertools
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memsave import ChunkedCrossEntropy, LowBitOptimizer, MemSaveCallback, Offloading
from lightning_memsave.callbacks.settings import setting
from lightning_memsave.core import checkpoints

BATCH_SIZE, NUM_TOKENS, NUM_WORDS = 4, 8, 50
LOGS = "logs"
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB (injected by benchmarks.faults)."
_ALONE: dict[str, Any] = {"preset": "off", "micro_batch_size": "halve"}
# Those of one technique have the names that they have in `_modules`.
PRESETS: dict[str, dict[str, Any]] = {
    "bare": {},
    **{preset: {"preset": preset} for preset in ("classic", "bitwise", "single_gpu", "offload")},
    "micro-batches": _ALONE,
    "checkpointed": {**_ALONE, "activation_checkpointing": "all"},
    "8-bit": {**_ALONE, "optimizer": LowBitOptimizer(min_8bit_size=1, min_saved_bytes=0)},
    "in backward": {**_ALONE, "optimizer_in_backward": True},
    "offload optimizer": {**_ALONE, "offload": "optimizer"},
    "offload parameters": {**_ALONE, "offload": "parameters"},
    "offload parameters, early updates": {
        **_ALONE,
        "offload": Offloading("parameters", early_updates="100%"),
    },
    "offload parameters, checkpointed, in backward": {
        **_ALONE,
        "activation_checkpointing": "all",
        "offload": "parameters",
        "optimizer_in_backward": True,
    },
    "offload activations": {**_ALONE, "offload": "activations"},
    "offload embeddings": {
        **_ALONE,
        "chunked_cross_entropy": ChunkedCrossEntropy(heads="re:.*head"),
        "offload": Offloading("embeddings", min_table_bytes=4),
    },
}
# What is refused before training: a norm that is known after the updates, and no blocks or tables.
_NOT_CLIPPED = ("offload parameters, checkpointed, in backward",)
_NOT_OF_CONVOLUTIONS = (
    *_NOT_CLIPPED,
    "checkpointed",
    "offload activations",
    "offload embeddings",
)
FORWARD, BACKWARD, OPTIMIZER, ELSEWHERE = "forward", "backward", "optimizer", "elsewhere"


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return x + added


class _Words(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(3)))
        self.head = nn.Linear(width, NUM_WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class _GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=NUM_WORDS, n_positions=NUM_TOKENS, n_embd=16, n_layer=2, n_head=2
        )
        self.model = GPT2LMHeadModel(config)

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv1d(16, 1, 3, padding=1),
        )

    def loss(self, tokens: Tensor) -> Tensor:
        x = tokens.unsqueeze(1) / NUM_WORDS
        return nn.functional.mse_loss(self.layers(x), x)


MODELS: dict[str, type[nn.Module]] = {
    "words": _Words,
    "GPT-2": _GPT2,
    "convolutions": _Convolutions,
}


class _Lit(pl.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model.loss(batch))

    # Lightning saves no random states: dropout after a resume would be another one. Not at the
    # start of the epoch, as iterators of DataLoaders draw a number, in a resumed run before it.
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            torch.manual_seed(self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _loader(num_batches: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(NUM_WORDS, (num_batches * BATCH_SIZE, NUM_TOKENS), generator=generator)
    return DataLoader(list(tokens), batch_size=BATCH_SIZE)  # type: ignore[arg-type] # a list is a dataset


@dataclass(frozen=True)
class Case:
    """One kind of fit: names of `MODELS` and `PRESETS`, and settings of the Trainer."""

    model: str
    preset: str
    accumulate: int
    clip: float | None

    def __str__(self) -> str:
        clip = "" if self.clip is None else f", clip {self.clip}"
        return f"{self.model}, {self.preset}, accumulate {self.accumulate}{clip}"


def all_cases(preset: str | None = None) -> list[Case]:
    """List every model with every preset, accumulation and clipping that is not refused."""
    presets = [*PRESETS] if preset is None else [preset]
    return [
        case
        for case in itertools.starmap(Case, itertools.product(MODELS, presets, (1, 2), (None, 0.5)))
        if not (case.clip and case.preset in _NOT_CLIPPED)
        and not (case.model == "convolutions" and case.preset in _NOT_OF_CONVOLUTIONS)
    ]


@dataclass
class Fit:
    """Runs a case; memory runs out at the operators ``faults``, or the process dies at ``kill``."""

    case: Case
    faults: Iterable[int] = ()
    kill: int | None = None
    kill_at_byte: int | None = None
    """Die when so many bytes of all checkpoints are written."""
    smaller_from: int | None = None
    """Train with half the batch at once from this batch on, as after an out-of-memory there."""
    num_epochs: int = 1
    num_batches: int = 6
    folder: Path | None = None
    """Where checkpoints lie; a fit goes on from the last one."""
    phases: list[str] | None = None
    """The phase of each operator, if it is to be noted."""
    error: Exception | None = None
    num_ops: int = 0
    num_bytes: int = 0
    num_batches_begun: int = 0
    batch: int = -1
    """The batch that ran when memory ran out; -1 before the first."""
    phase: str = ""
    """The phase in which memory ran out."""
    watches: bool = False
    """Measure, log and write reports into `folder`, as fits of users do."""
    disturb: Callable[[], None] | None = None
    """What happens to the environment, once, at the operator ``disturbed_at``."""
    disturbed_at: int | None = None
    resume_from: Path | None = None
    """Go on from this checkpoint instead of the last one."""

    def note_failure(self) -> None:
        """Remember where memory ran out."""
        self.batch, self.phase = self.num_batches_begun - 1, _phase()

    def run(self) -> str:
        """Train; give a digest of all parameters, also where an error ended the fit."""
        memsave = MemSaveCallback(**PRESETS[self.case.preset], predict=False, report=self.watches)
        checkpoint: list[Any] = []
        last = None
        if self.folder is not None:
            checkpoint = [ModelCheckpoint(self.folder, save_last=True)]
            last = self.resume_from or self.folder / "last.ckpt"
        torch.manual_seed(0)
        lit = _Lit(MODELS[self.case.model]())
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=self.num_epochs,
            callbacks=[memsave, _Watch(self, memsave), *checkpoint],
            accumulate_grad_batches=self.case.accumulate,
            gradient_clip_val=self.case.clip,
            logger=self._logger(),
            log_every_n_steps=1,
            default_root_dir=self.folder,
            enable_checkpointing=bool(checkpoint),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loaders = _loader(self.num_batches, 1), _loader(1, 2)
        with warnings.catch_warnings(), mock.patch.object(setting, "SMALLEST_SAVING_BYTES", 0):
            warnings.simplefilter("ignore")
            try:
                with Faults(self) if self.phases is None else _Phases(self), _writing(self):
                    path = last if last is not None and last.exists() else None
                    trainer.fit(lit, *loaders, ckpt_path=path)
            except Exception as error:
                self.error = error
        return digest(lit)

    def _logger(self) -> Any:
        if not self.watches or self.folder is None:
            return False
        return CSVLogger(self.folder / LOGS, flush_logs_every_n_steps=1)


class _Watch(pl.Callback):
    def __init__(self, fit: Fit, memsave: MemSaveCallback) -> None:
        self.fit, self.memsave = fit, memsave

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.fit.num_batches_begun += 1
        if batch_idx == self.fit.smaller_from:
            # There is no public way, since no user wants it: sizes come from what memory allows.
            batches = self.memsave._micro_batches
            assert batches.runner is not None, "it is made at the start of fit"
            batches.size = batches.runner.size = BATCH_SIZE // 2


@contextlib.contextmanager
def _writing(fit: Fit) -> Iterator[None]:
    """Count the bytes of checkpoints, and die at the one that the fit names."""
    write_all = checkpoints._Pieces.write

    def write(file: Any, data: Any) -> Any:
        place = -1 if fit.kill_at_byte is None else fit.kill_at_byte - fit.num_bytes
        fit.num_bytes += len(data)
        if 0 <= place < len(data):
            write_all(file, data[:place])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return write_all(file, data)

    with mock.patch.object(checkpoints._Pieces, "write", write):
        yield


class Faults(TorchDispatchMode):
    """Counts operators; lets memory run out, the process die or something fail at some of them."""

    def __init__(self, fit: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fit, self.places = fit, set(fit.faults)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, self.fit.num_ops = self.fit.num_ops, self.fit.num_ops + 1
        if place == self.fit.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fit.disturb is not None and place == self.fit.disturbed_at:
            self.fit.disturb()
        if place in self.places:
            self.fit.note_failure()
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


class _Phases(Faults):
    """Notes the phase of each operator, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fit.phases.append(_phase())
        return super().__torch_dispatch__(func, types, args, kwargs)


# Functions of torch and Lightning, as hooks of a callback would keep updates out of backward. The
# innermost counts: Lightning runs forward and backward inside of the optimizer's step.
_PHASE_OF = {
    "_engine_run_backward": BACKWARD,
    "training_step": FORWARD,
    "_after_closure": OPTIMIZER,
    "_wrap_closure": FORWARD,
    "optimizer_step": OPTIMIZER,
}


def _phase() -> str:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name in _PHASE_OF:
            return _PHASE_OF[frame.f_code.co_name]
        frame = frame.f_back
    return ELSEWHERE


def digest(module: nn.Module) -> str:
    """Tell two states apart to the last bit."""
    whole = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        whole.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
