"""Kernels of the virtual GPU that compute: each operator runs on the CPU too, over the same bytes.

The operator's own CUDA code runs first and allocates, launches and copies as ever; then its CPU
kernel computes the values into the memory that the CUDA code returned. Random numbers depend on
the seed and the offset of the CUDA generator: a recomputation that restores them draws the same.
"""

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from tests.virtual_gpu import counters
from tests.virtual_gpu.attention import ATTENTION, Random
from tests.virtual_gpu.sync_batch_norm import SYNC_BATCH_NORM

failed: Counter[str] = Counter()
"""Operators of which only the CUDA code ran, with the reason; VGPU_STRICT=1 raises instead."""
IS_LATE = os.environ.get("VGPU_LATE", "0") != "0"
ONLY_INTEGERS = os.environ.get("VGPU_COMPUTE") == "int"
IS_STRICT = os.environ.get("VGPU_STRICT", "0") != "0"
_libraries: list[Library] = []  # a library that is collected takes its kernels away
_Compute = Callable[..., Any]

# They return nothing that could be computed, or change only what a tensor is.
_SKIPPED = {
    *("record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense", "resize_", "set_"),
    *("is_set_to", "_resize_output_", "_nested_tensor_from_mask"),
}
# The shape of their result depends on values: the CUDA code would read a number that no kernel
# wrote.
_SHAPED_BY_VALUES = {
    *("aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2"),
    *("aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive"),
}
# They launch kernels of their own without having one of the CUDA key.
_KEYLESS = {"aten::copy_", "aten::ldexp.Tensor", "aten::ldexp.out", "aten::ldexp_"}


def host(tensor: Tensor) -> Tensor:
    """The same bytes as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if not tensor.numel() or not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    as_bytes = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(as_bytes, tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_host(value: Any, generator: torch.Generator | None) -> Any:
    if isinstance(value, Tensor):
        return host(value) if value.is_cuda else value
    if isinstance(value, torch.Generator):
        return generator
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list | tuple):
        return [_on_host(each, generator) for each in value]
    return value


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_on_device(each, device) for each in value)
    if not isinstance(value, Tensor):
        return value
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    host(result).copy_(value)
    return result


def _put(result: Any, computed: Any, given: set[int]) -> Any:
    """Write computed values into what the CUDA code returned, where it is new."""
    if isinstance(result, Tensor):
        if not result.is_cuda or id(result) in given or not isinstance(computed, Tensor):
            return result
        if result.shape != computed.shape:
            result = torch.empty(computed.shape, dtype=result.dtype, device=result.device)
        host(result).copy_(computed)
        return result
    if isinstance(result, list | tuple) and isinstance(computed, list | tuple):
        pairs = zip(result, computed, strict=True)
        return type(result)(_put(mine, other, given) for mine, other in pairs)
    return computed if isinstance(computed, bool | int | float) else result  # as `equal` gives one


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _as_tensor(number: Any, args: tuple[Any, ...]) -> Tensor:
    """Make a number a tensor whose type does not change the type of the result."""
    value = torch.tensor(number, device="cpu")
    others = [arg for arg in args if isinstance(arg, Tensor)]
    dtypes = [
        other.dtype
        for other in others
        if other.dtype.is_floating_point or not value.dtype.is_floating_point
    ]
    return value.to(dtypes[0]) if dtypes and all(other.ndim == 0 for other in others) else value


def _seed_of(generator: torch.Generator | None) -> int:
    generator = generator or torch.cuda.default_generators[torch.cuda.current_device()]
    mixed = generator.initial_seed() * 0x9E3779B97F4A7C15
    return (mixed + generator.get_offset() * 0xBF58476D1CE4E5B9) % 2**63


def _finish_stream() -> None:
    if IS_LATE:
        counters.finish_stream(torch.cuda.current_stream().cuda_stream)


# What has seen the operator already is left out: dispatch modes and autograd.
_no_modes, _no_functions = torch._C._DisableTorchDispatch, torch._C.DisableTorchFunction
_no_autograd = torch._C._AutoDispatchBelowAutograd


def _by_values(op: Any) -> _Compute:
    """An operator whose result's shape depends on values: nothing of its CUDA code runs."""

    def run(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with _no_modes(), _no_functions(), _no_autograd():
            torch.cuda.current_stream().synchronize()  # as the CUDA code waits for the number
            _finish_stream()
            device = next(_tensors(args)).device
            on_host = {name: _on_host(value, None) for name, value in kwargs.items()}
            return _on_device(op(*_on_host(args, None), **on_host), device)

    return run


class _Written(threading.local):
    """What the operators that run now write to, outermost first."""

    def __init__(self) -> None:
        self.of_operators: list[list[Tensor]] = []
        self.before: list[list[Tensor]] = []

    def keep(self) -> None:
        """Keep the values of before: CUDA code of operators may call others that write there."""
        for tensors, before in zip(self.of_operators, self.before, strict=True):
            if not before:
                before.extend(host(tensor).clone() for tensor in tensors)

    @contextlib.contextmanager
    def by(self, tensors: list[Tensor]) -> Iterator[None]:
        """Run CUDA code that writes to these tensors, which have the values of before then."""
        self.keep()
        before: list[Tensor] = []
        self.of_operators.append(tensors)
        self.before.append(before)
        try:
            yield
        finally:
            self.of_operators.pop()
            self.before.pop()
        if before:
            _finish_stream()
        for tensor, values in zip(tensors, before, strict=bool(before)):
            if tensor.shape == values.shape:  # not resized since
                host(tensor).copy_(values)


_written = _Written()


def _is_wanted(tensor: Tensor) -> bool:
    return not (ONLY_INTEGERS and tensor.is_floating_point())


class _Operator:
    """One operator: its CUDA code, then its values."""

    def __init__(self, op: Any, kernel: Any, compute: _Compute | None) -> None:
        arguments = op._schema.arguments
        self._op, self._kernel, self._compute = op, kernel, compute
        self._places = [i for i, a in enumerate(arguments) if str(a.type) == "Tensor"]
        self._has_generator = any(a.name == "generator" for a in arguments)
        self._is_random = torch.Tag.nondeterministic_seeded in op.tags
        self._name = op._schema.name.split("::")[1]
        is_written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self._writes = {i for i, is_it in enumerate(is_written) if is_it}
        self._writes_to = {arguments[i].name for i in self._writes}

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # Compiled regions and fake tensors never come here: this is below all of them.
        with _no_modes(), _no_functions(), _no_autograd():
            random = self._random_of(args, kwargs) if self._is_random else None
            args = self._with_tensors(args)
            with _written.by(self._written_of(args, kwargs)):
                result = self._kernel.call_boxed(keyset, *args, **kwargs)
            if self._is_done(result, args, kwargs):
                return result
            _finish_stream()
            try:
                computed = self._values(random, args, kwargs)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                if IS_STRICT:
                    raise
                failed[f"{self._op}: {str(error).splitlines()[0][:150]}"] += 1
                return result
            return _put(result, computed, {id(t) for t in _tensors((*args, *kwargs.values()))})

    def _written_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        if not self._writes or self._name in {"copy_", "zero_"} or self._calls_copies(args):
            return []
        given = [args[i] for i in self._writes if i < len(args)]
        given += [kwargs[name] for name in self._writes_to if name in kwargs]
        # Python's view of the storage of a gradient would keep autograd from adding in place.
        return [tensor for tensor in _tensors(given) if tensor.is_cuda and _is_wanted(tensor)]

    def _random_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Random:
        values = (*args, *kwargs.values())
        given = next((value for value in values if isinstance(value, torch.Generator)), None)
        return Random(_seed_of(given), is_given=given is not None)

    def _with_tensors(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Python may give a number for a tensor, a boxed kernel may not be given one."""
        if not any(
            i < len(args) and isinstance(args[i], int | float | complex) for i in self._places
        ):
            return args
        return tuple(
            _as_tensor(arg, args) if i in self._places and not isinstance(arg, Tensor) else arg
            for i, arg in enumerate(args)
        )

    def _calls_copies(self, args: tuple[Any, ...]) -> bool:
        """Whether its CUDA code is a call of `copy_` for each tensor, to or from the host."""
        pairs = zip(*args[:2], strict=True) if self._name == "_foreach_copy_" else ()
        return any(target.device != source.device for target, source in pairs)

    def _is_done(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the virtual GPU itself moves the bytes, or only integers are wanted."""
        if self._calls_copies(args):
            return True
        moved = {"copy_": args[:2], "zero_": args[:1]}.get(self._name, ())
        if moved and all(
            m.is_contiguous() and m.dtype == moved[0].dtype and m.shape == moved[0].shape
            for m in moved
        ):
            return True
        if self._compute is _no_values and _written.of_operators:
            return True  # the operator whose CUDA code calls this one computes
        tensors = _tensors((result, *args, *kwargs.values()))
        return not all(map(_is_wanted, tensors))

    def _values(self, random: Random | None, args: Any, kwargs: dict[str, Any]) -> Any:
        generator = random.generator if random else None
        args = _on_host(args, generator)
        kwargs = {name: _on_host(value, generator) for name, value in kwargs.items()}
        if self._compute:
            return self._compute(random, *args, **kwargs)
        if random is None:
            return self._op(*args, **kwargs)
        if self._has_generator:
            return self._op(*args, **kwargs | ({} if random.is_given else {"generator": generator}))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(random.seed)
            return self._op(*args, **kwargs)


# ------------------------------------------------ operators without a CPU kernel of the same form


def _wide(op: str) -> _Compute:
    """mm, bmm, addmm and baddbmm with `out_dtype`: products of widened factors."""

    def compute(_: Any, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        dtypes = [kwargs.pop("out_dtype", None), *args]
        out_dtype = next(dtype for dtype in dtypes if isinstance(dtype, torch.dtype))
        factors = [arg.to(out_dtype) for arg in args if isinstance(arg, Tensor)]
        value: Tensor = getattr(torch.ops.aten, op).default(*factors, **kwargs)
        return value if out is None else out.copy_(value)

    return compute


def _product(op: Any) -> _Compute:
    """The same without: added up in 32 bits as tensor cores do; CPUs are slow in 16 besides."""

    def compute(_: Any, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        dtype = args[-1].dtype
        if dtype in {torch.bfloat16, torch.float16}:
            args = tuple(arg.float() for arg in args)
        value: Tensor = op(*args, **kwargs)
        return value.to(dtype) if out is None else out.copy_(value)

    return compute


def _softmax(op: Any) -> _Compute:
    def compute(_: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        return op(x.float() if half_to_float else x, dim, False)

    return compute


def _softmax_backward(op: Any) -> _Compute:
    def compute(_: Any, grad: Tensor, output: Tensor, dim: int, _dtype: torch.dtype) -> Tensor:
        return op(grad, output, dim, grad.dtype)

    return compute


def _widened(op: Any) -> _Compute:
    """Norms: on CUDA their statistics have 32 bits, whatever the type of input and weight."""

    def compute(_: Any, *args: Any) -> Any:
        is_low = {torch.bfloat16, torch.float16}
        return op(*(a.float() if isinstance(a, Tensor) and a.dtype in is_low else a for a in args))

    return compute


def _rms_norm_backward(
    _: Any, grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Any, _mask: Any
) -> tuple[Tensor, Tensor | None]:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    grad, normal = grad.float(), x.float() * rstd.float()
    scaled = grad * weight.float() if weight is not None else grad
    dx = rstd.float() * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
    others = tuple(range(x.ndim - len(shape)))
    return dx, (grad * normal).sum(others) if weight is not None else None


@functools.cache
def _special() -> dict[str, _Compute]:
    aten = torch.ops.aten
    result: dict[str, _Compute] = {
        "aten::_log_softmax": _softmax(aten._log_softmax.default),
        "aten::_softmax": _softmax(aten._softmax.default),
        "aten::_log_softmax_backward_data": _softmax_backward(
            aten._log_softmax_backward_data.default
        ),
        "aten::_softmax_backward_data": _softmax_backward(aten._softmax_backward_data.default),
        "aten::_fused_rms_norm_backward": _rms_norm_backward,
        **ATTENTION,
        **SYNC_BATCH_NORM,
    }
    for name in ("native_layer_norm", "native_group_norm"):
        for each in (name, f"{name}_backward"):
            result[f"aten::{each}"] = _widened(getattr(aten, each).default)
    backward = aten.native_batch_norm_backward  # the forward pass changes what it is given
    result["aten::native_batch_norm_backward"] = _widened(backward.default)
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        product = _product(getattr(aten, name).default)
        result |= {f"aten::{name}": product, f"aten::{name}.out": product}
        result |= dict.fromkeys((f"aten::{name}.dtype", f"aten::{name}.dtype_out"), _wide(name))
    return result


def _is_ours(full_name: str) -> bool:
    """Whether an operator has a CUDA kernel that leaves values."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    base = full_name.partition("::")[2].partition(".")[0]
    if base in _SKIPPED or base.startswith(("empty", "_empty", "new_empty")):
        return False
    if full_name == "aten::pow.Tensor_Tensor_out":
        return False  # pow.Scalar calls it with a number on the GPU, which Python cannot be given
    return has(full_name, "CUDA") or full_name in _KEYLESS


def _compute_of(full_name: str) -> _Compute | None:
    """What computes its values, where the same operator on the CPU does not."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    if full_name in _special() or any(has(full_name, key) for key in keys):
        return _special().get(full_name)
    return _no_values


def _no_values(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("no CPU kernel has this form")


def _is_view(op: Any) -> bool:
    aliases = [each.alias_info for each in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def compute_operators_of(namespace: str) -> None:
    """From now on, let every operator of this namespace that has a CUDA kernel compute."""
    torch.backends.cudnn.enabled = False  # its workspaces and RNNs are not there
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not ONLY_INTEGERS:  # compiled kernels would compute nothing
        torch.compile = _do_not_compile  # type: ignore[assignment]
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, name = full_name.partition("::")
        if space != namespace or not _is_ours(full_name):
            continue
        base, _, overload = name.partition(".")
        op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        if _is_view(op):
            continue
        run = (
            _by_values(op)
            if full_name in _SHAPED_BY_VALUES
            else _Operator(op, get_kernel(full_name, "CUDA"), _compute_of(full_name))
        )
        library = Library(namespace, "IMPL")
        library.impl(name, run, "CUDA", with_keyset=True, allow_override=True)
        _libraries.append(library)


def _do_not_compile(function: Any = None, **_: Any) -> Any:
    return function or (lambda given: given)
