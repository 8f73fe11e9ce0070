"""Train one model with one setting, beside what was predicted."""

import argparse
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.profiler import ProfilerActivity

from benchmarks._models import BASE, OTHERS, TINY, Other, masked_batch
from benchmarks._settings import CHECKPOINTING, LOW_BIT_OPTIMIZER, MIXED_PRECISION, NOTHING
from benchmarks._training import Batch, LanguageModel, fit
from benchmarks.gpu._lines import Found, import_slow_packages, wait_for_turn, write_line
from benchmarks.gpu._measure import MIB, limit_to, synchronize
from lightning_memsave import MemSaveCallback, Offloading
from lightning_memsave.measure.nvml import read_nvml

PLAIN: dict[str, Any] = {**NOTHING, **MIXED_PRECISION}


@dataclass(frozen=True)
class Fit:
    """One fit.

    Args:
        model: ``"roberta"`` (84M), or a name in `MODELS`.
        settings: Of `MemSaveCallback`.
        trainer: More arguments of the Trainer.
        is_fused: AdamW with ``fused=True``, as Hugging Face's Trainer has it.
        limit_mib: What the allocator may have.
        num_steps: That are timed on a GPU.
        num_warmup: Others before them.
    """

    model: str
    settings: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    is_fused: bool = False
    limit_mib: int | None = None
    num_steps: int = 20
    num_warmup: int = 4


def _gpt2(width: int, num_layers: int, num_heads: int) -> Other:
    sizes = {"n_embd": width, "n_layer": num_layers, "n_head": num_heads, "vocab_size": 50_257}
    no_words = {"bos_token_id": None, "eos_token_id": None}
    return Other("GPT2", {**sizes, **no_words}, "LMHeadModel", {"input_ids": (8, 1024)})


_LLAMA_8B = Other(
    "Llama",
    {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
    "ForCausalLM",
    {"input_ids": (2, 2048)},
)
MODELS = {
    "llama_8b": _LLAMA_8B,
    "gpt2_xl": _gpt2(1600, 48, 25),
    "gpt2_xl_6": _gpt2(1600, 6, 25),
    "gpt2_medium": _gpt2(1024, 24, 16),
    **{name.lower(): other for name, other in OTHERS.items()},
}

EVERYTHING = "parameters+activations+embeddings"
IN_8_BITS: dict[str, Any] = {
    "preset": "offload",
    "optimizer": "8bit",
    "low_precision_weights": "split",
    "optimizer_in_backward": True,
}
"""6.3 bytes of host memory per parameter."""
ON_THE_DEVICE: dict[str, Any] = {**IN_8_BITS, "offload": None, "low_precision_weights": None}
PARTLY_RESIDENT: dict[str, Any] = {
    **IN_8_BITS,
    "offload": Offloading(EVERYTHING, resident="47%", host_budget="100GiB"),
}
"""15 of the 32 blocks of the 8B: as many as 24 GiB have room for, by its prediction."""
CLIP = {"gradient_clip_val": 1.0}
NEVER_CLIPS = {"gradient_clip_val": 1e6}
EARLY: dict[str, Any] = {"offload": Offloading(EVERYTHING, early_updates="100%")}
FITS = {
    "roberta plain": Fit("roberta", PLAIN),
    "roberta single_gpu": Fit("roberta", {"preset": "single_gpu"}),
    "gpt2_xl single_gpu": Fit("gpt2_xl", {"preset": "single_gpu"}),
    "roberta offload": Fit("roberta", {"preset": "offload"}),
    "gpt2_xl offload": Fit("gpt2_xl", {"preset": "offload"}),
    "roberta classic": Fit("roberta", {"preset": "classic"}),
    "roberta bitwise": Fit("roberta", {"preset": "bitwise", **MIXED_PRECISION}),
    "roberta default": Fit("roberta", {}),
    "roberta single_gpu, clipping": Fit("roberta", {"preset": "single_gpu"}, CLIP),
    "roberta bitwise, clipping": Fit("roberta", {"preset": "bitwise", **MIXED_PRECISION}, CLIP),
    "roberta fused": Fit("roberta", PLAIN, is_fused=True),
    "roberta accumulation": Fit("roberta", {}, {"accumulate_grad_batches": 4}),
    "roberta out of memory": Fit("roberta", {}, limit_mib=3 * 1024),
    "gpt2_medium plain": Fit("gpt2_medium", PLAIN),
    "gpt2_medium chunked": Fit("gpt2_medium", {**PLAIN, "chunked_cross_entropy": True}),
    "gpt2_medium in backward": Fit("gpt2_medium", {**PLAIN, "optimizer_in_backward": True}),
    "gpt2_medium bf16 weights": Fit(
        "gpt2_medium", {**PLAIN, "low_precision_weights": "stochastic"}
    ),
    "gpt2_medium single_gpu": Fit("gpt2_medium", {"preset": "single_gpu"}),
    "gpt2_medium offload": Fit("gpt2_medium", {"preset": "offload"}),
    "gpt2_xl plain": Fit("gpt2_xl", PLAIN),
    "gpt2_xl bitwise": Fit("gpt2_xl", {"preset": "bitwise", **MIXED_PRECISION}),
    "gpt2_xl classic": Fit("gpt2_xl", {"preset": "classic"}),
    "gpt2_xl_6 offload": Fit("gpt2_xl_6", {"preset": "offload"}),
    "gpt2_xl offload, 12 threads": Fit(
        "gpt2_xl",
        {"preset": "offload", "offload": Offloading(EVERYTHING, num_threads=12)},
        num_steps=8,
    ),
    **{
        f"gpt2_xl offload, {name}": Fit("gpt2_xl", {"preset": "offload", **more}, how, num_steps=8)
        for name, more, how in (
            ("clipping", {}, CLIP),
            ("early updates", EARLY, CLIP),
            ("below the bound", {}, NEVER_CLIPS),
            ("below the bound, early updates", EARLY, NEVER_CLIPS),
        )
    },
    "gpt2_xl_6 offload, 8-bit": Fit("gpt2_xl_6", IN_8_BITS),
    "gpt2_xl offload, 8-bit": Fit("gpt2_xl", IN_8_BITS, num_steps=8),
    "llama_8b offload, 8-bit, 8 GiB": Fit(
        "llama_8b",
        {**IN_8_BITS, "host_budget": "100GiB"},
        limit_mib=8 * 1024,
        num_steps=4,
        num_warmup=2,
    ),
    "llama_8b offload, 8-bit, 24 GiB": Fit(
        "llama_8b", PARTLY_RESIDENT, limit_mib=24 * 1024, num_steps=4, num_warmup=2
    ),
    "llama_8b on the device, 8-bit": Fit("llama_8b", ON_THE_DEVICE, num_steps=4, num_warmup=2),
    "roberta fp32": Fit("roberta", NOTHING),
    "roberta checkpointing": Fit("roberta", {**PLAIN, **CHECKPOINTING}),
    "roberta selective": Fit("roberta", {**PLAIN, "activation_checkpointing": "selective"}),
    "roberta 8-bit": Fit("roberta", {**PLAIN, **LOW_BIT_OPTIMIZER}),
    "roberta 16-mixed": Fit("roberta", {**PLAIN, "precision": "16-mixed"}),
    "roberta bf16-true": Fit("roberta", {**PLAIN, "precision": "bf16-true"}),
    "roberta micro-batches": Fit("roberta", {**PLAIN, "micro_batch_size": 16}),
    "llama plain": Fit("llama", PLAIN),
    "vit plain": Fit("vit", PLAIN),
    "resnet plain": Fit("resnet", PLAIN),
}
"""Fits by name; the order of `benchmarks.gpu` is in `_steps`."""


class _Clock(Callback):
    """Times the steps after the first ones together, with one wait at the end.

    On a GPU, batches after those are profiled.
    """

    def __init__(self, device: str, num_warmup: int, num_timed: int) -> None:
        self.device, self.num_warmup, self.end = device, num_warmup, num_warmup + num_timed
        self.occupancy: Found = {}
        self.thread_s: dict[str, float] = {}
        self._profiler: Any = None
        self.losses: list[torch.Tensor] = []
        self.measured: dict[str, int] = {}
        self.host_s = self.wall_s = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let others measure until it is this process' turn."""
        wait_for_turn()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin with the first step that counts."""
        if batch_idx == self.num_warmup:
            synchronize(self.device)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.thread_s = seconds_of_threads()
            self._start_s = time.perf_counter()
        elif batch_idx == self.end:
            self._stop()
            self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
            self._profiler.start()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss, without waiting for it."""
        self.losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop what is on."""
        if self._profiler is None:
            self._stop()
        else:
            synchronize(self.device)
            self._profiler.stop()
            self.occupancy = occupancy_of(self._profiler.events())

    def _stop(self) -> None:
        before, self.thread_s = self.thread_s, seconds_of_threads()
        self.thread_s = {k: v - before.get(k, 0.0) for k, v in self.thread_s.items()}
        self.host_s = time.perf_counter() - self._start_s
        synchronize(self.device)
        self.wall_s = time.perf_counter() - self._start_s
        if self.device == "cuda":
            self.measured = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
            of_process = read_nvml(torch.cuda.current_device()).process_bytes
            self.measured |= {"driver": of_process} if of_process else {}


def seconds_of_threads() -> dict[str, float]:
    """Processor time of Python's threads by name; those that libraries began are together."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for thread in psutil.Process().threads():
        name = names.get(thread.id, "others")
        found[name] = found.get(name, 0.0) + thread.user_time + thread.system_time
    return found


def occupancy_of(events: Iterable[Any]) -> Found:
    """Sum up how long a GPU computed, copied, and did either, of what torch's profiler saw.

    Args:
        events: Of the profiler, some of them of a GPU.

    Returns:
        Milliseconds.
    """
    found = sorted(
        (event.time_range.start, event.time_range.end, event.name.startswith("Mem"))
        for event in events
        if event.device_type.name == "CUDA"
    )
    busy = until = 0.0
    for start, end, _ in found:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    copies = sum(end - start for start, end, is_copy in found if is_copy)
    kernels = sum(end - start for start, end, is_copy in found if not is_copy)
    return {"gpu_busy_ms": busy / 1e3, "kernels_ms": kernels / 1e3, "copies_ms": copies / 1e3}


class _Module(LanguageModel):
    is_fused = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Give AdamW over all parameters."""
        fused = True if self.is_fused else None
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=fused)


def make_problem(model: str, device: str) -> tuple[nn.Module, list[Batch]]:
    """Make the model and four batches; tiny ones on a CPU."""
    if device == "cuda" and model in MODELS:
        other = MODELS[model]
        with torch.device(device):
            built = other.build()
        return built, [other.make_batch(seed=seed) for seed in range(4)]
    sizes, batch_size, num_tokens = (BASE, 64, 128) if device == "cuda" else (TINY, 4, 16)
    batches = [
        masked_batch(sizes.vocab_size, batch_size, num_tokens, seed=seed) for seed in range(4)
    ]
    return sizes.build(), batches


def run(name: str, device: str) -> Found:
    """Train, and put what was predicted beside what was measured."""
    chosen = FITS[name]
    is_cuda = device == "cuda"
    num_steps, num_warmup = (chosen.num_steps, chosen.num_warmup) if is_cuda else (2, 2)
    accumulated = chosen.trainer.get("accumulate_grad_batches", 1)
    model, batches = make_problem(chosen.model, device)
    module = _Module(model)
    module.is_fused = chosen.is_fused
    clock = _Clock(device, num_warmup * accumulated, num_steps * accumulated)
    memsave = MemSaveCallback(**{**chosen.settings, "report": False, "predict": 60})
    memsave.monitor = None  # the clock measures
    if chosen.limit_mib is not None and is_cuda:
        model.cpu()  # its weights were made on the GPU, which is faster
        limit_to(chosen.limit_mib)
    num_batches = (num_warmup + num_steps + is_cuda) * accumulated
    num_tokens = batches[0]["input_ids"].numel() if "input_ids" in batches[0] else 0
    start_s = time.perf_counter()
    fit(
        module,
        (batches * num_batches)[:num_batches],
        [memsave, clock],
        accelerator=device,
        **chosen.trainer,
    )
    prediction = memsave.prediction
    found: Found = {
        "fit_s": time.perf_counter() - start_s,
        "step_ms": 1e3 * clock.wall_s / num_steps,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "host_ms": 1e3 * clock.host_s / num_steps,
        "tokens_per_s": num_steps * accumulated * num_tokens / clock.wall_s,
        "thread_ms": {k: 1e3 * v / num_steps for k, v in clock.thread_s.items()},
        "losses": [loss.item() for loss in clock.losses[: clock.end]],
        "rows": [f"{row.name}={row.value} {row.status}" for row in memsave.rows],
        "predicted_mib": None if prediction is None else prediction.peak_bytes / MIB,
    }
    if is_cuda:
        measured = clock.measured
        found |= {f"{part}_mib": num_bytes / MIB for part, num_bytes in measured.items()}
        found |= clock.occupancy
        found["num_alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        if prediction is not None:
            predicted = {
                "allocated": prediction.peak_bytes,
                "reserved": prediction.reserved_bytes or 0,
                "driver": (prediction.reserved_bytes or 0) + prediction.context_bytes,
            }
            found |= {f"{k}_error": predicted[k] / measured[k] - 1 for k in measured}
            found["guesses"] = list(prediction.guesses)
    return found


def main() -> None:
    """Run the fit that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fit", choices=FITS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file to append the line to")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import_slow_packages()
    write_line(
        options.out, {"check": "fit", "case": options.fit, **run(options.fit, options.device)}
    )


if __name__ == "__main__":
    main()
