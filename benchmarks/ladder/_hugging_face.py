"""The same row through Hugging Face's Trainer and its own flags."""

import logging
import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.ladder._data import Collate, Samples
from benchmarks.ladder._observers import Observer
from benchmarks.ladder._rows import Row, Workload


class _ObservedTrainer(Trainer):
    """Keeps the loss of each micro-batch, as numbers."""

    observer: Observer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared: Any = super()._prepare_inputs(inputs)
        self.observer.track_input(prepared)
        return prepared


class _Report(TrainerCallback):
    def __init__(self, trainer: _ObservedTrainer, observer: Observer) -> None:
        self.trainer = trainer
        self.observer = observer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            # accelerate wraps the optimizer; hooks belong on the one inside.
            optimizer: Any = self.trainer.optimizer
            self.observer.begin(kwargs["model"], [optimizer.optimizer])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Each one is divided by their number already.
        self.observer.end_step(sum(self.trainer.losses))
        self.trainer.losses.clear()


def train(row: Row, workload: Workload, observer: Observer) -> None:
    """Train a row.

    Args:
        row: Which techniques are on.
        workload: What to train.
        observer: Looks on.
    """
    for package in ("transformers", "accelerate"):
        logging.getLogger(package).setLevel(logging.ERROR)
    model: Any = workload.sizes.build()
    # transformers 5.23 takes RoBERTa's **kwargs for the promise to divide the loss by the tokens of
    # the whole batch, which its forward does not: with micro-batches the gradients would be a sum.
    model.accepts_loss_kwargs = False
    chosen = row.hugging_face_arguments(workload)
    if "activation_checkpointing" not in TrainingArguments.__dataclass_fields__:
        # Its name before transformers 5.23.
        for name in [name for name in chosen if name.startswith("activation_")]:
            chosen[name.replace("activation_", "gradient_")] = chosen.pop(name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            max_steps=workload.num_steps,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **chosen,
        )
        trainer = _ObservedTrainer(
            model=model,
            args=arguments,
            train_dataset=Samples(workload),
            data_collator=Collate(observer.track_input),
        )
        trainer.observer = observer
        trainer.add_callback(_Report(trainer, observer))
        trainer.train()
