"""What a prediction of memory says."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.units import format_bytes

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """What belongs to one module at the peak, without the modules inside it.

    Args:
        name: Its name in ``module.named_modules()``; empty for the whole.
        class_name: Name of its class.
        num_parameters: Numbers in its own parameters.
        memory: Its parameters, their gradients and optimizer state, and the activations and
            temporaries that its own code made, in bytes at the peak.
    """

    name: str
    class_name: str
    num_parameters: int
    memory: MemoryBreakdown


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """One storage that was alive at the peak.

    Args:
        category: As in `MemoryBreakdown`, for example ``"activation"``.
        num_bytes: Its size.
        module: Name of the module whose code made it, or that owns it.
        op: The operator that made it, such as ``"aten.mm"``; empty if it was there before.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``: when it was made.
        shape: Of the tensor that came first.
        dtype: Of the same, such as ``"float32"``.
    """

    category: str
    num_bytes: int
    module: str = ""
    op: str = ""
    phase: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes through one training step.

    Args:
        phases: The phase at each point, in order.
        by_category: Bytes at each point, for each category.
        peak_index: The point with the largest sum.
    """

    phases: tuple[str, ...] = ()
    by_category: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    peak_index: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Memory of a training step: how much, of what, when and where.

    Args:
        device: ``"cuda"`` or ``"cpu"``: whose kernels were assumed.
        model: Class name of the module.
        peak: Bytes by category when most is alive.
        by_phase: The same at the peak of each of `PHASES`.
        modules: The share of each module, in the order of ``named_modules()``.
        largest_tensors: What is alive at the peak, largest first.
        peak_phase: Phase of the peak.
        peak_module: Name of the module that runs at the peak.
        peak_op: The operator that runs at the peak, such as ``"aten.mm"``.
        timeline: The step that was looked at.
        allocated_bytes: The peak in blocks of CUDA's caching allocator, as
            ``torch.cuda.max_memory_allocated`` gives it; ``None`` on a CPU.
        reserved_bytes: What that allocator takes from the driver where there is room; ``None`` on a
            CPU.
        least_reserved_bytes: The least that it gets through the step with: when memory runs out,
            it returns what it has cached and tries again. ``None`` on a CPU.
        context_bytes: What CUDA needs for itself; 0 on a CPU.
        workspace_bytes: What cuBLAS holds of ``other``; 0 on a CPU.
        settings: What was switched on, name and value as in the table at the start of fit.
        ineffective: What was asked for and is off or changes nothing, name and value with the
            reason.
        assumptions: What the prediction takes for granted, one line each.
        guesses: Where the model depends on data and something had to be guessed, one line each.
        is_extrapolated: Whether it comes from copies of the model with fewer blocks.
        seconds: What the prediction took.

    Example:
        >>> peak = MemoryBreakdown(parameter_bytes=2**20, activation_bytes=3 * 2**20)
        >>> prediction = MemoryPrediction("cpu", "Net", peak, {"forward": peak})
        >>> prediction.peak_bytes, MemoryPrediction.from_dict(prediction.to_dict()) == prediction
        (4194304, True)
    """

    device: str
    model: str
    peak: MemoryBreakdown
    by_phase: Mapping[str, MemoryBreakdown]
    modules: tuple[ModuleMemory, ...] = ()
    largest_tensors: tuple[TensorMemory, ...] = ()
    peak_phase: str = ""
    peak_module: str = ""
    peak_op: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    least_reserved_bytes: int | None = None
    context_bytes: int = 0
    workspace_bytes: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    ineffective: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()
    is_extrapolated: bool = False
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Most bytes in tensors at once."""
        return self.peak.total_bytes

    @property
    def device_bytes(self) -> int:
        """What the device must have: allocator and context on CUDA, else the peak."""
        least_bytes = self.least_reserved_bytes or self.reserved_bytes or self.peak_bytes
        return least_bytes + self.context_bytes

    @property
    def measurable_bytes(self) -> int:
        """The peak as a run measures it: in blocks of the allocator on CUDA, else in tensors."""
        return self.allocated_bytes or self.peak_bytes

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(module.num_parameters for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names; breakdowns as ``peak_bytes`` and ``by_category``.
        """
        return {
            "device": self.device,
            "model": self.model,
            "num_parameters": self.num_parameters,
            "peak_bytes": self.peak_bytes,
            "by_category": self.peak.by_category(),
            "host_bytes": self.peak.host_bytes,
            "device_bytes": self.device_bytes,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "least_reserved_bytes": self.least_reserved_bytes,
            "context_bytes": self.context_bytes,
            "workspace_bytes": self.workspace_bytes,
            "by_phase": {
                phase: {"peak_bytes": memory.total_bytes, "by_category": memory.by_category()}
                for phase, memory in self.by_phase.items()
            },
            "peak": {
                "phase": self.peak_phase,
                "module": self.peak_module,
                "op": self.peak_op,
            },
            "modules": [
                {
                    "name": module.name,
                    "class_name": module.class_name,
                    "num_parameters": module.num_parameters,
                    "by_category": module.memory.by_category(),
                }
                for module in self.modules
            ],
            "largest_tensors": [
                asdict(tensor) | {"shape": list(tensor.shape)} for tensor in self.largest_tensors
            ],
            "timeline": {
                "phases": list(self.timeline.phases),
                "by_category": {k: list(v) for k, v in self.timeline.by_category.items()},
                "peak_index": self.timeline.peak_index,
            },
            "settings": dict(self.settings),
            "ineffective": dict(self.ineffective),
            "assumptions": list(self.assumptions),
            "guesses": list(self.guesses),
            "is_extrapolated": self.is_extrapolated,
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Make a prediction from what ``to_dict`` gave.

        Args:
            found: Such a mapping, from a JSON file for example.

        Returns:
            The same prediction.

        Raises:
            KeyError: If something is missing in it.
        """
        make = MemoryBreakdown.from_categories
        return cls(
            device=found["device"],
            model=found["model"],
            peak=MemoryBreakdown.from_dict(found),
            by_phase={k: make(v["by_category"]) for k, v in found["by_phase"].items()},
            modules=tuple(
                ModuleMemory(
                    m["name"], m["class_name"], m["num_parameters"], make(m["by_category"])
                )
                for m in found["modules"]
            ),
            largest_tensors=tuple(
                TensorMemory(**{**t, "shape": tuple(t["shape"])}) for t in found["largest_tensors"]
            ),
            peak_phase=found["peak"]["phase"],
            peak_module=found["peak"]["module"],
            peak_op=found["peak"]["op"],
            timeline=Timeline(
                tuple(found["timeline"]["phases"]),
                {k: tuple(v) for k, v in found["timeline"]["by_category"].items()},
                found["timeline"]["peak_index"],
            ),
            allocated_bytes=found.get("allocated_bytes"),
            reserved_bytes=found["reserved_bytes"],
            least_reserved_bytes=found.get("least_reserved_bytes"),
            context_bytes=found["context_bytes"],
            workspace_bytes=found.get("workspace_bytes", 0),
            settings=found["settings"],
            ineffective=found.get("ineffective", {}),
            assumptions=tuple(found["assumptions"]),
            guesses=tuple(found["guesses"]),
            is_extrapolated=found["is_extrapolated"],
            seconds=found["seconds"],
        )

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.device_bytes)} on {self.device} for {self.model}: "
            f"{self.peak} at the peak, in {self.peak_phase}"
        )
