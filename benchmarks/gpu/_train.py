"""Train one rung in this process and print what it needed, as JSON in the last line."""

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Callback

from benchmarks._models import BASE, OTHERS, TINY, masked_batch
from benchmarks._training import LanguageModel, fit
from benchmarks.gpu._rungs import MEMORY_LIMITS, MODELS, RUNGS
from lightning_memsave.measure.nvml import NvmlDevice
from lightning_memsave.measure.peak import PeakMemory

NUM_BATCHES = 4
"""Batches in all, shown again and again, so that the loss falls."""
NUM_WARMUP = 5


class Measure(Callback):
    """Measures memory and time of each step after the first ones.

    Args:
        num_warmup: Steps that do not count; the first makes the optimizer's state.
    """

    def __init__(self, num_warmup: int) -> None:
        self.num_warmup = num_warmup
        self.losses: list[torch.Tensor] = []
        self.step_times_s: list[float] = []
        self.memory: dict[str, Any] = {}
        self._stack = ExitStack()
        self._peak: PeakMemory | None = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin to measure memory with the first step that counts, and time with each."""
        if batch_idx == self.num_warmup:
            self._peak = self._stack.enter_context(PeakMemory(pl_module, trainer.optimizers))
        if self._peak is not None:
            self._peak.track_input(batch)
        self._start_s = _now_s()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step."""
        if batch_idx >= self.num_warmup:
            self.step_times_s.append(_now_s() - self._start_s)
        self.losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read everything."""
        assert self._peak is not None
        self.memory["peak_allocated_bytes"] = self._peak.allocated_bytes
        self.memory["peak_reserved_bytes"] = self._peak.reserved_bytes
        self._stack.close()
        if trainer.strategy.root_device.type == "cuda":
            with NvmlDevice(trainer.strategy.root_device) as gpu:
                reading = gpu.read(torch.cuda.memory_reserved())
            self.memory["nvml_used_bytes"] = reading.used_bytes
            self.memory["nvml_process_bytes"] = reading.process_bytes
            self.memory["nvml_reason"] = reading.reason
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            self.memory["driver_used_bytes"] = total_bytes - free_bytes


def train(name: str, num_steps: int, *, is_dry: bool) -> dict[str, Any]:
    """Train one rung.

    Args:
        name: Of the rung.
        num_steps: Steps that count.
        is_dry: On the CPU, with a tiny model.

    Returns:
        Memory, time and losses.
    """
    sizes, batch_size, num_tokens = (TINY, 4, 16) if is_dry else (BASE, 64, 128)
    # The callback's own monitor counts in the first two steps: not both at once.
    num_warmup = 2 if is_dry else NUM_WARMUP
    other = OTHERS[MODELS[name][0]] if name in MODELS and not is_dry else None
    batches = [
        masked_batch(sizes.vocab_size, batch_size, num_tokens, seed=seed)
        if other is None
        else other.make_batch(seed=seed)
        for seed in range(NUM_BATCHES)
    ]
    model = sizes.build() if other is None else other.build()
    measure = Measure(num_warmup)
    callbacks: list[Callback] = [measure]
    settings = RUNGS[name]
    memsave = None
    if settings is not None:
        from lightning_memsave import MemSaveCallback  # noqa: PLC0415 - "nothing" is without it

        memsave = MemSaveCallback(**settings, report=False)
        callbacks.append(memsave)
    if name in MEMORY_LIMITS and not is_dry:
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(MEMORY_LIMITS[name] / total_bytes)
    fit(
        LanguageModel(model),
        (batches * (num_warmup + num_steps))[: num_warmup + num_steps],
        callbacks,
        accelerator="cpu" if is_dry else "cuda",
    )
    return {
        **measure.memory,
        "settings": [] if memsave is None else [asdict(row) for row in memsave.rows],
        "predicted": predicted_of(memsave),
        "median_step_s": statistics.median(measure.step_times_s),
        "num_steps": num_steps,
        "losses": [loss.item() for loss in measure.losses],
    }


def predicted_of(memsave: Any) -> dict[str, Any] | None:
    """Read what the callback predicted before the first step.

    Args:
        memsave: A `MemSaveCallback` after its fit; ``None`` without one.

    Returns:
        Bytes, and the seconds that it took; ``None`` without a prediction.
    """
    prediction = None if memsave is None else memsave.prediction
    if prediction is None:
        return None
    return {
        "peak_allocated_bytes": prediction.peak_bytes,
        "peak_reserved_bytes": prediction.reserved_bytes,
        "device_bytes": prediction.device_bytes,
        "by_category": prediction.peak.by_category(),
        "seconds": prediction.seconds,
    }


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Train the rung named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu._train", description=__doc__)
    parser.add_argument("rung", choices=RUNGS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    print(json.dumps(train(options.rung, options.steps, is_dry=options.dry_run)))


if __name__ == "__main__":
    main()
