"""Predictions to draw: a GPT-2 counted by hand, and a step of a small model that really ran."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.result import (
    MemoryPrediction,
    ModuleMemory,
    TensorMemory,
    Timeline,
)

PARTS = {  # of one block: parameters and what it saves for backward, in units of the hidden size
    "ln_1": ("LayerNorm", 0, 1),
    "attn": ("GPT2Attention", 0, 0),
    "attn.c_attn": ("Conv1D", 3, 3),
    "attn.c_proj": ("Conv1D", 1, 1),
    "attn.resid_dropout": ("Dropout", 0, 1),
    "ln_2": ("LayerNorm", 0, 1),
    "mlp": ("GPT2MLP", 0, 0),
    "mlp.c_fc": ("Conv1D", 4, 4),
    "mlp.act": ("NewGELUActivation", 0, 12),
    "mlp.c_proj": ("Conv1D", 4, 1),
    "mlp.dropout": ("Dropout", 0, 1),
}


@dataclass
class Gpt2:
    """A GPT-2 with figures of the right size; enough to see a page as users will."""

    num_blocks: int = 48
    hidden: int = 1600
    vocabulary: int = 50257
    tokens: int = 2 * 1024
    state_bytes: int = 8
    is_checkpointed: bool = False
    is_chunked: bool = False

    def __post_init__(self) -> None:
        self.unit = self.tokens * self.hidden * 4
        self.logits = self.tokens * self.vocabulary * 4 // (16 if self.is_chunked else 1)
        self.live: Counter[str] = Counter()
        self.phases: list[str] = []
        self.points: list[Counter[str]] = []
        self.where: list[tuple[str, str]] = []
        self.activations: Counter[str] = Counter()
        self.at_peak: tuple[int, Counter[str]] = (0, Counter())
        self._weights: dict[str, tuple[str, int]] = {"": ("GPT2LMHeadModel", 0)}
        self._weights["transformer"] = ("GPT2Model", 0)
        self._weights["transformer.wte"] = ("Embedding", self.vocabulary * self.hidden)
        self._weights["transformer.wpe"] = ("Embedding", 1024 * self.hidden)
        self._weights["transformer.h"] = ("ModuleList", 0)
        for i in range(self.num_blocks):
            self._weights[f"transformer.h.{i}"] = ("GPT2Block", 0)
            for name, (class_name, share, _) in PARTS.items():
                self._weights[f"transformer.h.{i}.{name}"] = (
                    class_name,
                    share * self.hidden**2 + (2 * self.hidden if "ln" in name else 0),
                )
        self._weights["transformer.ln_f"] = ("LayerNorm", 2 * self.hidden)
        self._weights["lm_head"] = ("Linear", 0)
        self._forward()
        self._backward()
        self._optimizer()
        self._close()

    def _point(self, phase: str, module: str, op: str) -> None:
        self.phases.append(phase)
        self.points.append(+self.live)
        self.where.append((module, op))
        total = sum(self.live.values())
        if total > self.at_peak[0]:
            self.at_peak = (total, +self.activations)

    def _change(self, num_bytes: int, category: str, module: str) -> None:
        self.live[category] += num_bytes
        if category in {"activation", "temporary"}:
            self.activations[module] += num_bytes

    def _block(self, i: int, phase: str, sign: int) -> None:
        names = list(PARTS)
        for name in names if sign > 0 else reversed(names):
            module, saved = f"transformer.h.{i}.{name}", PARTS[name][2] * self.unit
            if saved:
                scratch = 0 if sign > 0 else saved
                self._change(scratch, "temporary", module)
                self._change(sign * saved, "activation", module)
                self._point(phase, module, "aten.addmm" if PARTS[name][1] else "aten.mul")
                self._change(-scratch, "temporary", module)
            if sign < 0:
                self._change(self._weights[module][1] * 4, "gradient", module)

    def _forward(self) -> None:
        count = sum(num for _, num in self._weights.values())
        self.live.update(
            parameter=4 * count, optimizer_state=self.state_bytes * count, buffer=self.num_blocks
        )
        self.live["input"] = self.tokens * 16
        for i in range(self.num_blocks):
            self._block(i, "forward", 1)
            if self.is_checkpointed:
                for name, (_, _, saved) in PARTS.items():
                    self._change(-saved * self.unit, "activation", f"transformer.h.{i}.{name}")
                self._change(self.unit, "activation", f"transformer.h.{i}")
        for op in ("aten.mm", "aten._log_softmax", "aten.nll_loss_forward"):
            self._change(self.logits, "activation", "lm_head")
            self._point("forward", "lm_head", op)

    def _backward(self) -> None:
        self._change(self.logits, "temporary", "lm_head")
        self._point("backward", "lm_head", "aten._log_softmax_backward_data")
        self._change(-3 * self.logits, "activation", "lm_head")
        self._point("backward", "lm_head", "aten.mm")
        self._change(-self.logits, "temporary", "lm_head")
        for i in reversed(range(self.num_blocks)):
            if self.is_checkpointed:
                self._block(i, "backward", 1)
                self._change(-self.unit, "activation", f"transformer.h.{i}")
            self._block(i, "backward", -1)
        for name, (_, num) in self._weights.items():
            if num and not name.startswith("transformer.h."):
                self._change(4 * num, "gradient", name)
                self._point("backward", name, "aten.embedding_dense_backward")

    def _optimizer(self) -> None:
        for name, (_, num) in self._weights.items():
            if num:
                self._change(4 * num, "temporary", name)
                self._point("optimizer", name, "aten._foreach_addcdiv_")
                self._change(-4 * num, "temporary", name)

    def _close(self) -> None:
        totals = [sum(point.values()) for point in self.points]
        self.peak_index = totals.index(max(totals))
        peak = self.points[self.peak_index]
        left = dict(peak)
        self._modules = []
        gradient_from = peak["gradient"]
        for name, (class_name, num) in reversed(self._weights.items()):
            gradient = min(4 * num, gradient_from)
            gradient_from -= gradient
            own = {
                "parameter": 4 * num,
                "gradient": gradient,
                "optimizer_state": self.state_bytes * num,
                "activation": min(self.at_peak[1][name], left.get("activation", 0)),
            }
            left["activation"] = left.get("activation", 0) - own["activation"]
            self._modules.append(
                ModuleMemory(name, class_name, num, MemoryBreakdown.from_categories(own))
            )
        self._modules.reverse()

    def prediction(self, name: str) -> MemoryPrediction:
        peak = MemoryBreakdown.from_categories(dict(self.points[self.peak_index]))
        module, op = self.where[self.peak_index]
        by_phase = {}
        for phase in dict.fromkeys(self.phases):
            inside = [p for p, q in zip(self.points, self.phases, strict=True) if q == phase]
            most = max(inside, key=lambda point: sum(point.values()))
            by_phase[phase] = MemoryBreakdown.from_categories(dict(most))
        largest = sorted(self._tensors(), key=lambda t: -t.num_bytes)[:20]
        return MemoryPrediction(
            device="cuda",
            model="GPT2LMHeadModel",
            peak=peak,
            by_phase=by_phase,
            modules=tuple(self._modules),
            largest_tensors=tuple(largest),
            peak_phase=self.phases[self.peak_index],
            peak_module=module,
            peak_op=op,
            timeline=Timeline(
                tuple(self.phases),
                {k: tuple(p[k] for p in self.points) for k in peak.by_category()},
                self.peak_index,
            ),
            reserved_bytes=round(peak.total_bytes * 1.043) // 2**21 * 2**21,
            context_bytes=450 * 2**20,
            settings={
                "activation_checkpointing": "all" if self.is_checkpointed else "off",
                "optimizer": "AdamW, 8-bit" if self.state_bytes < 8 else "AdamW",
                "micro_batch_size": str(self.tokens // 1024),
                "precision": "32-true",
            },
            assumptions=(
                "Attention runs in the fused kernel of scaled_dot_product_attention.",
                "The CUDA context takes 450 MiB; it differs between drivers and cards.",
                "No other process uses the card.",
            ),
            guesses=(f"{name}: the loss is a finite number.",),
            seconds=4.2,
        )

    def _tensors(self) -> list[TensorMemory]:
        found = []
        for module in self._modules:
            for category, num_bytes in module.memory.by_category().items():
                if num_bytes:
                    made = category == "activation"
                    found.append(
                        TensorMemory(
                            category,
                            num_bytes,
                            module.name,
                            "aten.addmm" if made else "",
                            "forward" if made else "",
                            (self.tokens, num_bytes // 4 // self.tokens)
                            if made
                            else (num_bytes // 4 // self.hidden, self.hidden),
                            "float32",
                        )
                    )
        return found


def ladder(num_blocks: int = 48) -> list[tuple[str, MemoryPrediction]]:
    """The settings that someone with a 12 GiB card tries one after another."""
    rungs: dict[str, dict[str, Any]] = {
        "plain": {},
        "+ checkpointing": {"is_checkpointed": True},
        "+ chunked loss": {"is_checkpointed": True, "is_chunked": True},
        "+ 8-bit optimizer": {"is_checkpointed": True, "is_chunked": True, "state_bytes": 2},
        "+ micro-batches of 1": {
            "is_checkpointed": True,
            "is_chunked": True,
            "state_bytes": 2,
            "tokens": 1024,
        },
    }
    return [
        (name, Gpt2(num_blocks=num_blocks, **setting).prediction(name))
        for name, setting in rungs.items()
    ]


class Recorder(LiveTensors):
    """Keeps the bytes after each operation of a step that really runs."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, [optimizer])
        self.points: list[tuple[str, dict[str, int]]] = []

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        in_backward = torch._C._current_graph_task_id() != -1
        phase = "optimizer" if self._num_running_steps else "forward"
        found = self.breakdown.by_category()
        self.points.append(("backward" if in_backward else phase, found))
        return result


def measured_step() -> MemoryPrediction:
    """One real step of a small network, as the engine would tell it."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 64)
    for _ in range(2):
        optimizer.zero_grad()
        with Recorder(model, optimizer) as live:
            live.track_input(batch)
            model(batch).square().mean().backward()
            optimizer.step()
    totals = [sum(found.values()) for _, found in live.points]
    index = totals.index(max(totals))
    peak = MemoryBreakdown.from_categories(live.points[index][1])
    phases = tuple(phase for phase, _ in live.points)
    return MemoryPrediction(
        "cpu",
        type(model).__name__,
        peak,
        by_phase={phases[index]: peak},
        modules=tuple(
            ModuleMemory(
                name,
                type(module).__name__,
                sum(p.numel() for p in module.parameters(recurse=False)),
                MemoryBreakdown(
                    parameter_bytes=sum(p.nbytes for p in module.parameters(recurse=False))
                ),
            )
            for name, module in model.named_modules()
        ),
        peak_phase=phases[index],
        timeline=Timeline(
            phases,
            {k: tuple(found[k] for _, found in live.points) for k in peak.by_category()},
            index,
        ),
    )
