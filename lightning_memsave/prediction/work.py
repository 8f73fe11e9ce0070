"""What a training step asks of a device besides memory: kernels, FLOP, and bytes that move."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_memsave.core.memory import HOST, category_in_context, is_host, repeats_in_context
from lightning_memsave.measure.live_tensors import in_backward
from lightning_memsave.measure.storages import operands, storages_of
from lightning_memsave.prediction.cuda.gpus import Throughput

Kind = Literal[
    "product",
    "attention",
    "convolution",
    "elementwise",
    "to_host",
    "from_host",
    "host",
    "network",
]
Phase = Literal["forward", "recomputation", "backward", "optimizer"]

# They allocate or describe memory, or ask for a number; views are known by their schema.
NO_KERNEL = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("_local_scalar_dense", "_unsafe_view", "lift_fresh", "detach", "alias", "resize_"),
        *("record_stream", "is_pinned", "_record_function_enter_new", "_record_function_exit"),
        *("promote_types", "_reshape_alias", "set_", "sym_size", "device"),
    )
)

# Tensors that one kernel of `multi_tensor_apply` serves, at five lists (`depth_to_max_tensors` in
# ATen's MultiTensorApply.cuh).
_TENSORS_PER_LAUNCH = 30
# An 8-bit update is called from Python for each parameter: 31 ms for the 102 of RoBERTa, where all
# other operators take 43 microseconds each (H200, 16 virtual cores; benchmarks/results).
_LAUNCHES_OF_8BIT = 8


class Kernel(NamedTuple):
    phase: Phase
    kind: Kind
    dtype: str
    flop: int
    num_bytes: int
    num_launches: float = 1
    module: str = ""
    num_tensors: int = 1


def launches_of(num_tensors: float) -> float:
    """Count the launches of a kernel that serves a list of so many tensors, not rounded up."""
    return max(1.0, num_tensors / _TENSORS_PER_LAUNCH)


@dataclass(frozen=True, slots=True)
class Work:
    kernels: tuple[tuple[Kernel, float], ...] = ()
    num_samples: int = 0
    """Of all batches of the step; 0 where they cannot be counted."""
    num_tokens: int = 0
    """Of integers of shape (samples, length) in them; 0 without such."""
    throughput: Throughput | None = None
    """Of the GPU, as its data sheet has it."""

    @property
    def num_launches(self) -> float:
        return sum(kernel.num_launches * count for kernel, count in self.kernels)

    @property
    def flop(self) -> float:
        return sum(kernel.flop * count for kernel, count in self.kernels)

    def for_batches(self, factor: float) -> "Work":
        """Return the work of as many times the batches, with one update of the parameters."""
        kernels = ((k, n if k.phase == "optimizer" else n * factor) for k, n in self.kernels)
        return replace(self, kernels=tuple(kernels))

    def with_all_reduce(self, sizes: Mapping[str, int], world_size: int) -> "Work":
        """Add what DDP does with gradients, by module, once per step: in a ring."""
        share = 2 * (world_size - 1) / world_size
        found = [
            (Kernel("backward", "network", "", 0, int(share * size), 0, name), 1.0)
            for name, size in sizes.items()
        ]
        return replace(self, kernels=(*self.kernels, *found))

    def speed(
        self, seconds: Sequence[float], throughput: Throughput | None, *, in_samples: bool = True
    ) -> str:
        """Say what a step of such a time, or from the least to the most, does per second.

        The share of a GPU's dense peak is that of the FLOP of forward and backward, without
        recomputation and the optimizer's, as of Muon.
        """
        number, unit = (self.num_tokens, "tokens") if self.num_tokens else (0, "")
        if not number and in_samples:
            number, unit = self.num_samples, "samples"
        light_s = 0.0 if throughput is None else self._light_seconds(throughput)
        times = sorted(seconds, reverse=True)
        if not times[-1]:
            return ""
        if len(times) > 1:  # an estimate, and no step is faster than the peak
            times = [max(time, light_s) for time in times]
        found = [f"{_range(number / s for s in times)} {unit} per second"] if number else []
        if light_s:
            found.append(f"{_range(100 * light_s / s for s in times)} % of the GPU's dense peak")
        return ", ".join(found)

    def _light_seconds(self, throughput: Throughput) -> float:
        return sum(
            count * kernel.flop / getattr(throughput, kernel.dtype, throughput.float32)
            for kernel, count in self.kernels
            if kernel.phase in ("forward", "backward")
        )

    def __iter__(self) -> Iterator[tuple[Kernel, float]]:
        return iter(self.kernels)


# Both ends of a range are rough, while what was measured is one number.
def _range(numbers: Iterable[float]) -> str:
    found = list(numbers)
    figures = [float(f"{n:.2g}") for n in found] if len(found) > 1 else found
    return " to ".join(f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in figures)


class WorkCounter:
    def __init__(self) -> None:
        self._counts: Counter[Kernel] = Counter()
        self._flop: dict[Any, int] = {}

    def clear(self) -> None:
        self._counts.clear()

    def add(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        *,
        in_step: bool,
        module_of: Callable[[Phase], str] = lambda phase: "",
    ) -> None:
        traits = _traits_of(func)
        if not traits.has_kernel:
            return
        tensors = [*operands(args), *operands(kwargs.values())]
        # The first may be a sum in another type.
        dtype = str(tensors[:2][-1].dtype).removeprefix("torch.") if tensors else ""
        moved = [*map(_moved, tensors)]
        num_bytes = sum(size for size, _ in moved)
        if not traits.overwrites:
            changed = [args[i] for i in traits.written if i < len(args)]
            made = operands(changed if result is None else (result,))
            num_bytes += sum(_moved(tensor)[0] for tensor in made)
        kind: Kind = traits.kind
        if kind == "elementwise":
            kind = _place_of([on_host for _, on_host in moved], is_copy=traits.is_copy)
            if kind in ("to_host", "from_host"):
                num_bytes //= 2
        elif kind == "network":
            num_bytes = _sent_bytes([size for size, _ in moved])
        flop = 0 if traits.flop_of is None else self._flop_of(func, traits, args, kwargs, result)
        num_launches, num_tensors = traits.num_launches, len(args[0]) if traits.is_list else 1
        if traits.is_list:
            is_transfer = kind in ("to_host", "from_host")
            num_launches = num_tensors if is_transfer else launches_of(num_tensors)
        phase = _phase(in_step)
        module = "" if in_step else module_of(phase)
        kernel = Kernel(phase, kind, dtype, flop, num_bytes, num_launches, module, num_tensors)
        self._counts[kernel] += repeats_in_context()

    # Torch's formulas take longer than all else here, and blocks repeat.
    def _flop_of(
        self, func: Any, traits: "_Traits", args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> int:
        values = (*args, *kwargs.values(), *(result if isinstance(result, tuple) else (result,)))
        key = (func, *(v.shape if isinstance(v, Tensor) else repr(v) for v in values))
        if key not in self._flop:
            assert traits.flop_of is not None, "only such operators come here"
            if traits.kind == "attention":
                args = _with_own_heads(args)
            self._flop[key] = int(traits.flop_of(*args, **kwargs, out_val=result))
        return self._flop[key]

    def work(self) -> Work:
        return Work(tuple(self._counts.items()))


# Torch's formulas refuse heads that share keys and values before 2.13.
def _with_own_heads(args: Sequence[Any]) -> list[Any]:
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 4]
    num_heads = max((tensor.size(1) for tensor in tensors), default=0)
    return [
        arg[:, :1].expand(-1, num_heads, -1, -1) if any(arg is t for t in tensors) else arg
        for arg in args
    ]


# What is made while host copies are made is on the host, too.
def _place_of(on_host: Sequence[bool], *, is_copy: bool) -> Kind:
    targets, sources = on_host[: len(on_host) // 2], on_host[len(on_host) // 2 :]
    if is_copy and all(targets) and not any(sources):
        return "to_host"
    if is_copy and all(sources) and not any(targets):
        return "from_host"
    return "host" if any(on_host) or category_in_context() == HOST else "elementwise"


def _phase(in_step: bool) -> Phase:
    if in_step:
        return "optimizer"
    if in_backward():
        return "recomputation" if torch.is_grad_enabled() else "backward"
    return "forward"


# A ring sends all but the own shard, of what is gathered or to be summed.
def _sent_bytes(sizes: Sequence[int]) -> int:
    return abs(sizes[0] - sizes[1]) if len(sizes) == 2 else sum(sizes)


# The bytes, and whether they are on the host. Expanded and sparse tensors have fewer than elements.
def _moved(tensor: Tensor) -> tuple[int, bool]:
    num_bytes, on_host = 0, False
    for storage in storages_of(tensor):
        num_bytes += storage.nbytes()
        on_host = on_host or is_host(storage)
    return min(tensor.numel() * tensor.element_size(), num_bytes), on_host


class _Traits(NamedTuple):
    has_kernel: bool
    kind: Kind = "elementwise"
    flop_of: Callable[..., int] | None = None
    overwrites: bool = False
    is_copy: bool = False
    is_list: bool = False
    written: tuple[int, ...] = (0,)
    num_launches: float = 1


@functools.cache
def _traits_of(func: Any) -> _Traits:
    if not isinstance(func, torch._ops.OpOverload):  # such as flex attention: not known
        return _Traits(False)
    name = func._schema.name.rpartition("::")[2]
    if name in NO_KERNEL or func.is_view:
        return _Traits(False)
    count = flop_formula(func)
    kind: Kind = "elementwise" if count is None else "product"
    if func._schema.name.startswith("c10d::"):
        kind = "network"
    elif "scaled_dot_product" in name:
        kind = "attention"
    elif "convolution" in name:
        kind = "convolution"
    is_out = func._schema.overload_name.endswith("out")
    is_copy = name in ("copy_", "_foreach_copy_")
    overwrites = is_out or is_copy or name in ("fill_", "zero_")
    arguments = enumerate(func._schema.arguments)
    written = tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    launches = _LAUNCHES_OF_8BIT if "8bit" in name else 1
    is_list = name.startswith("_foreach_")
    return _Traits(True, kind, count, overwrites, is_copy, is_list, written, launches)


def flop_formula(func: Any) -> Callable[..., int] | None:
    namespace, _, name = func._schema.name.partition("::")
    operators = getattr(torch.ops, namespace)
    for known in (name, name.removesuffix("_"), name.replace("_for_cpu", "")):
        formula: Callable[..., int] | None = flop_registry.get(getattr(operators, known, None))
        if formula is not None:
            return formula
    return None
