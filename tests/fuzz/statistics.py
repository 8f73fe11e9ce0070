"""Habits of layers that keep statistics: observers of quantization, batch renormalization."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.fuzz.habit import Habit
from tests.fuzz.places import ACTIVATIONS, FORWARD
from tests.fuzz.script import Script, indented

_AO = "torch.ao.quantization"
_PER_CHANNEL = "quant_min=-128, quant_max=127, dtype=torch.qint8, ch_axis=0"


@dataclass(frozen=True, kw_only=True)
class Observer(Habit):
    """Quantization-aware training: ranges of activations or of a weight, by fused operators."""

    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "at": FORWARD,
        "form": ("fused", "fused_per_channel", "plain", "own_buffers"),
        "of": ("activations", "activations", "weight"),
        "frozen_at": ("", "", "lit:on_train_epoch_end", "cb:on_train_batch_end", "step.after"),
    }
    _MODULES: ClassVar[Mapping[str, str]] = {
        "fused": f"{_AO}.FusedMovingAvgObsFakeQuantize()",
        "fused_per_channel": f"{_AO}.FusedMovingAvgObsFakeQuantize("
        f"observer={_AO}.MovingAveragePerChannelMinMaxObserver, {_PER_CHANNEL}, "
        "qscheme=torch.per_channel_symmetric)",
        "plain": f"{_AO}.FakeQuantize(observer={_AO}.MovingAverageMinMaxObserver)",
    }
    _BUFFERS: ClassVar[Mapping[str, str]] = {
        "low": "torch.tensor(float('inf'))",
        "high": "torch.tensor(float('-inf'))",
        "scale": "torch.ones(1)",
        "zero": "torch.zeros(1, dtype=torch.int32)",
        "on": "torch.ones(1, dtype=torch.int64)",
    }

    at: str
    form: str
    of: str
    frozen_at: str

    def places(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.at, self.frozen_at)))

    def add_to(self, script: Script) -> None:
        owner, v, name = self.at.partition(".")[0], ACTIVATIONS[self.at], f"q{self.number}"
        path = f"{script.path_to('lit', owner, self.block)}.{name}"
        made, frozen = f"self.{name} = {self._MODULES.get(self.form)}", f"{_AO}.disable_observer"
        freeze = [f"L{path.removeprefix('self')}.apply({frozen})"]
        call = f"self.{name}({{}})"
        if self.form == "own_buffers":
            made = "\n".join(
                f"self.register_buffer('{name}_{buffer}', {value})"
                for buffer, value in self._BUFFERS.items()
            )
            low, high, scale, zero, on = (f"self.{name}_{each}" for each in self._BUFFERS)
            call = (
                f"torch.fused_moving_avg_obs_fake_quant({{}}, {on}, {on}, {low}, {high}, {scale}, "
                f"{zero}, 0.1, 0, 127, -1, False, False)"
            )
            freeze = [f"L{path.removeprefix('self')}_on.zero_()"]
        script.lines[f"{owner}:__init__"] += made.splitlines()
        if self.of == "activations" or owner != "sub":
            script.lines[self.at].append(f"{v} = {call.format(v)}")
        else:
            weight = call.format("self.up.weight")
            script.lines[self.at].append(f"{v} = {v} + 0.1 * {weight}.mean()")
        if self.frozen_at:
            self.put(script, self.frozen_at, freeze)


@dataclass(frozen=True, kw_only=True)
class Renormalization(Habit):
    """Batch normalization whose running statistics are read where they are kept."""

    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "at": FORWARD,
        "form": ("module", "functional"),
        "read": ("before", "after", "difference"),
        "frozen_at": ("", "", "", "lit:on_train_epoch_end", "lit:on_train_batch_start"),
    }
    _MEAN_AND_VARIANCE: ClassVar[tuple[str, str]] = ("running_mean", "running_var")

    at: str
    form: str
    read: str
    frozen_at: str

    def places(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.at, self.frozen_at)))

    def add_to(self, script: Script) -> None:
        owner, v, name = self.at.partition(".")[0], ACTIVATIONS[self.at], f"b{self.number}"
        norm = f"nn.BatchNorm1d({script.model.width}, affine=False)"
        script.lines[f"{owner}:__init__"].append(f"self.{name} = {norm}")
        mean, variance = (f"self.{name}.{each}" for each in self._MEAN_AND_VARIANCE)
        call = f"self.{name}({v})"
        if self.form == "functional":
            call = f"F.batch_norm({v}, {mean}, {variance}, training=self.{name}.training)"
        factors = [
            f"std = {variance}.add(1e-3).sqrt()",
            f"r = ({v}.std(0) / std).clamp(0.5, 2.0).detach()",
            f"d = (({v}.mean(0) - {mean}) / std).clamp(-1.0, 1.0).detach()",
        ]
        lines = {
            "before": [*factors, f"{v} = {call} * r + d"],
            "after": [f"n = {call}", *factors, f"{v} = n * r + d"],
            "difference": [
                f"before = {mean}.clone()",
                f"n = {call}",
                f"{v} = n + ({mean} - before)",
            ],
        }[self.read]
        # Validation has a single sample per channel at times, and nothing to renormalize.
        script.lines[self.at] += ["if self.training:", *indented(lines)]
        if self.frozen_at:
            path = script.path_to("lit", owner, self.block).removeprefix("self")
            self.put(script, self.frozen_at, [f"L{path}.{name}.eval()"])
