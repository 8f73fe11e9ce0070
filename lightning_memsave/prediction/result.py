"""The result of a prediction: peak memory by category, phase, module and tensor."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.plain_text import as_plain_text, figure_table
from lightning_memsave.core.plot import memory_axes
from lightning_memsave.prediction.cuda.allocator import AllocatorSettings
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.snapshot import StepTrace
from lightning_memsave.prediction.work import Work
from lightning_memsave.units import format_bytes

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    name: str
    class_name: str
    num_parameters: int
    memory: MemoryBreakdown = field(default_factory=MemoryBreakdown)


@dataclass(frozen=True, slots=True)
class TensorMemory:
    category: str
    num_bytes: int
    module: str = ""
    op: str = ""
    phase: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    phases: tuple[str, ...] = ()
    by_category: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    peak_index: int = 0


# Predictions for CUDA may be off by this share; see their assumptions.
_TIGHT = 0.05
_EXPANDABLE = ": try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True)
class GpuFit:
    gpu: Gpu
    needed_bytes: int
    tensor_bytes: int
    used_bytes: int = 0
    pageable_bytes: int = 0

    def __bool__(self) -> bool:
        return self.fits

    @property
    def fits(self) -> bool:
        return self.spare_bytes + self.pageable_bytes >= 0

    @property
    def spare_bytes(self) -> int:
        """Bytes left on the GPU; negative if the step does not fit, or not without paging."""
        return self.gpu.total_bytes - self.needed_bytes

    @property
    def is_tight(self) -> bool:
        return self.fits and self.spare_bytes < _TIGHT * self.gpu.total_bytes

    @property
    def note(self) -> str:
        if self.fits and self.spare_bytes < 0:
            return (
                f"with {format_bytes(-self.spare_bytes)} of its optimizer state in host memory, of "
                f"{format_bytes(self.pageable_bytes)} that may be paged: it moves in each step"
            )
        if self.is_tight:
            return "barely: the rest is smaller than the error of the prediction may be"
        advice = "" if AllocatorSettings.of_environment().expandable_segments else _EXPANDABLE
        if self.fits and self.used_bytes > self.gpu.total_bytes:
            return (
                f"torch would reserve {format_bytes(self.used_bytes)} with more memory; here it "
                "has to return cached memory to the driver, which costs time" + advice
            )
        if not self.fits and self.tensor_bytes <= self.gpu.total_bytes and advice:
            return f"its tensors would fit{advice}, which leaves fewer gaps between allocations"
        return ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.gpu.name,
            "total_bytes": self.gpu.total_bytes,
            "needed_bytes": self.needed_bytes,
            "spare_bytes": self.spare_bytes,
            "pageable_bytes": self.pageable_bytes,
            "fits": self.fits,
            "note": self.note,
        }

    def __str__(self) -> str:
        verb = "fits" if self.fits else "does not fit"
        over = f"{format_bytes(abs(self.spare_bytes))} {'left' if self.fits else 'too much'}"
        if self.fits and self.spare_bytes < 0:
            over = f"{format_bytes(-self.spare_bytes)} paged to the host"
        return (
            f"{verb} {self.gpu.name} ({format_bytes(self.gpu.total_bytes)}): it needs "
            f"{format_bytes(self.needed_bytes)}, {over}"
        )


_SIZES = (
    *("allocated_bytes", "reserved_bytes", "least_reserved_bytes", "context_bytes"),
    *("workspace_bytes", "kept_gradient_bytes", "pageable_bytes"),
)


@dataclass(frozen=True, slots=True, repr=False)
class MemoryPrediction(JupyterMixin):
    """Predicted memory of a training step, by category, phase, module and tensor.

    ``print``, and the last line of a notebook cell, show the peak by category and phase.

    Args:
        device: Device whose kernels were assumed, ``"cuda"`` or ``"cpu"``.
        model: Class name of the module.
        peak: Bytes by category at the peak.
        by_phase: Bytes by category at the peak of each of `PHASES`.
        modules: Memory of each module at the peak, in the order of ``named_modules()``.
        largest_tensors: Storages alive at the peak, largest first.
        peak_phase: Phase of the peak.
        peak_module: Name of the module that runs at the peak.
        peak_op: The operator that runs at the peak, such as ``"aten.mm"``.
        timeline: Live bytes through the step with the peak.
        allocated_bytes: The peak in blocks of CUDA's caching allocator, as
            ``torch.cuda.max_memory_allocated`` reports it; ``None`` on a CPU.
        reserved_bytes: Bytes that this allocator reserves on a GPU with enough memory; ``None`` on
            a CPU.
        least_reserved_bytes: The least that this allocator needs for the step: when memory runs
            out, it returns cached blocks to the driver and retries. ``None`` on a CPU.
        context_bytes: Bytes of the CUDA context, and of NCCL in a run of several processes; 0 on a
            CPU.
        kept_gradient_bytes: Bytes of gradients that can stay on the device without a higher peak,
            where `OptimizerInBackward` would else hold them on the host until the end of backward.
        workspace_bytes: Bytes of cuBLAS workspaces, a part of ``other``; 0 on a CPU.
        pageable_bytes: Bytes of a paged optimizer's state, a part of the peak, which CUDA moves to
            the host when memory is short; all else must stay.
        settings: Active settings, name and value as in the table at the start of fit.
        ineffective: Requested settings that are off or change nothing: name, and value with the
            reason.
        assumptions: Assumptions of the prediction, one line each.
        guesses: Guessed values of tensors, where memory depends on data, one line each.
        seconds: Time that the prediction needed, in seconds.
        work: The kernels of a step; empty if the prediction was read from JSON.
        trace: Events for `to_snapshot`; empty if the prediction was read from JSON.

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
    kept_gradient_bytes: int = 0
    pageable_bytes: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    ineffective: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()
    seconds: float = 0.0
    work: Work = field(default_factory=Work, compare=False)
    trace: StepTrace = field(default_factory=StepTrace, compare=False)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of live tensors."""
        return self.peak.total_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes that the device must have: allocator and context on CUDA, else the peak."""
        least_bytes = self.least_reserved_bytes or self.reserved_bytes or self.peak_bytes
        return least_bytes + self.context_bytes

    def fits(self, gpu: Gpu) -> GpuFit:
        """Compare the predicted memory with that of a GPU.

        Args:
            gpu: The GPU.

        Returns:
            The comparison; true if the step fits.

        Example:
            >>> from lightning_memsave.prediction.cuda.gpus import parse_gpu
            >>> prediction = MemoryPrediction("cuda", "Net", MemoryBreakdown(2**30), {})
            >>> bool(prediction.fits(parse_gpu("2GiB")))
            True
        """
        tensor_bytes = self.measurable_bytes + self.context_bytes
        used_bytes = (self.reserved_bytes or 0) + self.context_bytes
        return GpuFit(gpu, self.device_bytes, tensor_bytes, used_bytes, self.pageable_bytes)

    @property
    def measurable_bytes(self) -> int:
        """The peak as a run measures it: in allocator blocks on CUDA, else in tensors."""
        return self.allocated_bytes or self.peak_bytes

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(module.num_parameters for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON.

        Returns:
            The fields by name; breakdowns as ``peak_bytes`` and ``by_category``.
        """

        def fields(*names: str) -> dict[str, Any]:
            return {name: getattr(self, name) for name in names}

        return {
            **fields("device", "model", "num_parameters", "peak_bytes"),
            "by_category": self.peak.by_category(),
            "host_bytes": self.peak.host_bytes,
            "device_bytes": self.device_bytes,
            **fields(*_SIZES),
            "by_phase": {
                phase: {"peak_bytes": memory.total_bytes, "by_category": memory.by_category()}
                for phase, memory in self.by_phase.items()
            },
            "peak": {"phase": self.peak_phase, "module": self.peak_module, "op": self.peak_op},
            "modules": [
                {
                    "name": module.name,
                    "class_name": module.class_name,
                    "num_parameters": module.num_parameters,
                    "by_category": {n: v for n, v in module.memory.by_category().items() if v},
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
            **{name: dict(value) for name, value in fields("settings", "ineffective").items()},
            **{name: list(value) for name, value in fields("assumptions", "guesses").items()},
            "seconds": self.seconds,
        }

    def to_snapshot(self) -> dict[str, Any]:
        """Convert the step to the format of torch's memory viewer, https://pytorch.org/memory_viz.

        Each allocation shows its category, operator, module and phase. Sizes are those of tensors,
        so that the peak is ``peak_bytes``; memory from before the step comes first.

        Returns:
            The format of ``torch.cuda.memory._snapshot``. The viewer reads pickles up to protocol
            4: ``pickle.dump(prediction.to_snapshot(), file, protocol=4)``.

        Raises:
            ConfigurationError: If the prediction was read from JSON.
        """
        return self.trace.to_snapshot()

    def plot(self, ax: Any = None) -> tuple[Any, Any]:
        """Plot live bytes by category over the step with the peak; needs matplotlib.

        Args:
            ax: Axes of matplotlib to plot on; ``None`` for a new figure.

        Returns:
            The figure and its axes.

        Raises:
            ConfigurationError: If ``ax`` is something else.
            MissingDependencyError: If matplotlib is not installed.
        """
        fig, ax = memory_axes(type(self).__name__, ax)
        shown = {name: sizes for name, sizes in self.timeline.by_category.items() if any(sizes)}
        phases = self.timeline.phases
        labels = [name.replace("_", " ") for name in shown]
        ax.stackplot(range(len(phases)), *shown.values(), labels=labels)
        starts = [phases.index(phase) for phase in PHASES if phase in phases]
        ax.set_xticks(starts, [phases[start] for start in starts])
        ax.set_title(f"{self.model}: peak {format_bytes(self.peak_bytes)} in {self.peak_phase}")
        ax.legend()
        return fig, ax

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Restore a prediction from the result of ``to_dict``.

        Args:
            found: The mapping, for example from a JSON file.

        Returns:
            The prediction.

        Raises:
            KeyError: If a key is missing.
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
            **{name: found[name] for name in _SIZES if name in found},
            settings=found["settings"],
            ineffective=found.get("ineffective", {}),
            assumptions=tuple(found["assumptions"]),
            guesses=tuple(found["guesses"]),
            seconds=found["seconds"],
        )

    def __rich__(self) -> Group:
        parts: list[RenderableType] = headline(self)
        if self.reserved_bytes is not None:
            parts += [Text(""), needed_memory(self)]
        parts += [Text(""), categories(self)]
        parts += [Text(f"guessed: {line}") for line in self.guesses]
        return Group(*parts)

    def __str__(self) -> str:
        return as_plain_text(self)

    def __repr__(self) -> str:
        size = format_bytes(self.device_bytes)
        return f"<MemoryPrediction of {self.model}: {size} on {self.device}>"


def headline(prediction: MemoryPrediction) -> list[RenderableType]:
    count = prediction.num_parameters
    parameters = f", {count:,} parameters" if count else ""
    title = (
        f"{prediction.model}{parameters}: {format_bytes(prediction.device_bytes)} for a training "
        f"step on {prediction.device}"
    )
    lines = [Text(title, style="bold")]
    if prediction.settings:
        values = (f"{name} {value}" for name, value in prediction.settings.items())
        lines.append(Text(f"with {', '.join(values)}"))
    lines += [Text(f"without {name} {why}") for name, why in prediction.ineffective.items()]
    if prediction.peak_phase:
        where = f" in `{prediction.peak_module}`" if prediction.peak_module else ""
        running = f" ({prediction.peak_op}{where})" if prediction.peak_op else ""
        lines.append(Text(f"peak in {prediction.peak_phase}{running}"))
    if prediction.pageable_bytes:
        paged, least = prediction.pageable_bytes, prediction.device_bytes
        lines.append(
            Text(
                f"of which {format_bytes(paged)} of optimizer state may be paged to the host, and "
                f"{format_bytes(least - paged)} must stay"
            )
        )
    if prediction.peak.host_bytes:
        host = format_bytes(prediction.peak.host_bytes)
        what = "gradients, kept to repeat a batch after an OOM"
        if "offload" in prediction.settings:
            what = "what is offloaded, and what is kept to repeat a batch after an OOM"
        lines.append(Text(f"and {host} on the host: {what}"))
    return list(lines)


def needed_memory(prediction: MemoryPrediction) -> Table:
    context = prediction.context_bytes
    table = figure_table("device memory needed", "", numbers=("",))
    for name, num_bytes in (
        ("tensors at the peak", prediction.peak_bytes),
        ("gaps in torch's allocator", prediction.device_bytes - context - prediction.peak_bytes),
        ("CUDA context", context),
        ("total", prediction.device_bytes),
        ("used if there is room", (prediction.reserved_bytes or 0) + context),
    ):
        table.add_row(Text(name), Text(format_bytes(num_bytes)))
    return table


def categories(prediction: MemoryPrediction) -> Table:
    phases = [phase for phase in PHASES if phase in prediction.by_phase]
    numbers = ("at the peak", "share", *phases)
    table = figure_table("category", *numbers, numbers=numbers)
    total = prediction.peak_bytes
    peak, *by_phase = (
        _with_workspaces(memory.by_category(), prediction)
        for memory in (prediction.peak, *(prediction.by_phase[phase] for phase in phases))
    )
    for name, num_bytes in sorted(peak.items(), key=lambda item: -item[1]):
        figures = [phase[name] for phase in by_phase]
        if not num_bytes and not any(figures):
            continue
        share = f"{num_bytes / total:.1%}" if total else ""
        cells = [_size(num_bytes), share, *map(_size, figures)]
        table.add_row(name.replace("_", " "), *cells)
    sums = [_size(sum(phase.values())) for phase in by_phase]
    table.add_row("total", _size(total), "", *sums)
    return table


def _with_workspaces(sizes: dict[str, int], prediction: MemoryPrediction) -> dict[str, int]:
    workspace_bytes = min(prediction.workspace_bytes, sizes["other"])
    return sizes | {"other": sizes["other"] - workspace_bytes, "cuBLAS": workspace_bytes}


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
