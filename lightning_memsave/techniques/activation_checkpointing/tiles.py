"""Run submodules that compute each position by itself on a few tokens at a time."""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.core.blocks import Block
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.nested import leaves_of, map_tensors
from lightning_memsave.core.out_of_memory import is_out_of_memory
from lightning_memsave.core.patching import is_of_this_package
from lightning_memsave.core.saved_state import (
    CONTAINERS,
    RandomState,
    is_same,
    refill,
    with_attribute,
)
from lightning_memsave.errors import NoEffectWarning
from lightning_memsave.techniques.activation_checkpointing.recompute import recompute

Call = Callable[..., Any]
"""The forward function of a submodule."""
_NUM_POSITIONS = 6  # of the first batch, for the proof


@dataclass
class Tiles:
    """How a submodule runs in tiles, which its first call decides."""

    name: str
    size: int
    """Tokens of a tile, those of all samples together."""
    reasons: dict[str, str] | None
    """By submodule of all blocks, why it runs on all tokens; ``None`` of one without layers."""
    num_parts: int
    # By form of the arguments: why it runs on all tokens, empty if it does not.
    _known: dict[Any, str] = field(default_factory=dict)

    def run(self, module: nn.Module, run: Call, args: Any, kwargs: Any) -> Any:
        """Call a submodule tile by tile, each recomputed in backward by itself."""
        leaves = [(path, leaf) for path, leaf in leaves_of((args, kwargs)) if _is_tensor(leaf)]
        # Not inside of a compiler, which has no use for a proof.
        before = leaves[0][1].shape[:-1] if leaves and not torch.compiler.is_compiling() else ()
        num_tokens = math.prod(before)
        if not before or num_tokens <= self.size:
            return recompute(run, [module], args, kwargs)
        dim = before.index(max(before))
        are_split = [leaf.shape[:-1] == before for _, leaf in leaves]
        tensors = [leaf for (_, leaf), is_own in zip(leaves, are_split, strict=True) if is_own]
        split = _Split(args, kwargs, tensors, dim)
        form = (module.training, dim, *(path for path, _ in leaves), *are_split)
        if form not in self._known:
            why = self._known[form] = _why_whole(module, run, split)
            self._note(module, why)
        if self._known[form]:
            return recompute(run, [module], args, kwargs)
        size = max(1, self.size * before[dim] // num_tokens)
        outputs = [recompute(run, [module], *few) for few in split.parts(size)]
        return torch.cat(outputs, dim)

    def _note(self, module: nn.Module, why: str) -> None:
        if self.reasons is None or self.name in self.reasons:
            return
        self.reasons[self.name] = f"`{type(module).__name__}` {why}" if why else ""
        if len(self.reasons) == self.num_parts and all(self.reasons.values()):
            warnings.warn(
                'activation_checkpointing="tiled" is like "nested", but for norms: no submodule '
                "with layers computes each position by itself: "
                f"{', '.join(dict.fromkeys(self.reasons.values()))}.",
                NoEffectWarning,
                stacklevel=2,
            )


def norms_of(blocks: Sequence[Block]) -> list[Block]:
    """Return the submodules of blocks that have vectors as parameters, and no layers inside."""
    return [
        Block(f"{block.name}.{name}", child)
        for block in blocks
        for name, child in block.module.named_children()
        if not any(child.children())
        and (params := [*child.parameters()])
        and all(param.ndim == 1 for param in params)
    ]


@dataclass(frozen=True)
class _Split:
    """The arguments of a call, some of whose tensors have the same positions along a dimension."""

    args: Any
    kwargs: Any
    tensors: Sequence[Tensor]
    dim: int

    def parts(self, size: int) -> Iterator[tuple[Any, Any]]:
        # Not by slices: each would get a gradient as large as the whole.
        parts = [tensor.split(size, self.dim) for tensor in self.tensors]
        for few in zip(*parts, strict=True):
            yield self.with_tensors([tensor.contiguous() for tensor in few])

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        instead = {id(a): b for a, b in zip(self.tensors, tensors, strict=True)}
        found: tuple[Any, Any] = map_tensors(
            (self.args, self.kwargs), lambda t: instead.get(id(t), t)
        )
        return found


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


# --- Whether each position is computed by itself --------------------------------------------------


class _MixesError(Exception):
    """An operator may compute a position from others."""


def _why_whole(module: nn.Module, run: Call, split: _Split) -> str:
    """Find out with a few positions why a submodule must run on all, if so.

    Operators are looked at before they run, so that nothing is changed. With real values, what a
    half of the positions gives is compared with their half of the output, with gradients.
    """
    if any(_has_hooks_of_others(inner) for inner in module.modules() if inner is not module):
        return "has hooks inside, which would be called once for each tile"
    dim, num = split.dim, min(_NUM_POSITIONS, split.tensors[0].shape[split.dim])
    few = [tensor.narrow(dim, 0, num).detach() for tensor in split.tensors]
    is_real = not any(map(is_fake, few))
    random = RandomState({t.device for t in few if t.is_cuda and is_real})
    containers = [*_containers_of(module)]
    before = [copy.copy(container) for container in containers]
    try:
        with _apart():
            why = _why_mixed(run, split, [_copy(tensor) for tensor in few])
            is_kept = all(map(_is_settled, containers, before))
            settled = [copy.copy(container) for container in containers]
            if not why and is_real:
                why = _why_different(module, run, split, few)
            elif not why:
                why = _why_mixed(run, split, [_copy(tensor) for tensor in few])
        is_kept = is_kept and all(map(is_same, containers, settled))
        return why or ("" if is_kept else "keeps something of what it computes")
    except _MixesError as mixes:
        return str(mixes)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"raises {type(error).__name__} with its first positions: {error}"
    finally:
        random.restore()
        for container, contents in zip(containers, before, strict=True):
            if not is_same(container, contents):
                refill(container, contents)


# The attributes of modules, and lists and the like among them.
def _containers_of(module: nn.Module) -> Iterator[Any]:
    for inner in module.modules():
        yield vars(inner)
        yield from (value for value in vars(inner).values() if type(value) in CONTAINERS)


def _why_mixed(run: Call, split: _Split, few: Sequence[Tensor]) -> str:
    args, kwargs = split.with_tensors(few)
    before = few[0].shape[:-1]
    with torch.no_grad(), _ByPosition(few, math.prod(before)):
        output = run(*args, **kwargs)
    if not isinstance(output, Tensor):
        return f"returns a `{type(output).__name__}`, not a tensor"
    return "" if output.shape[:-1] == before else f"returns {tuple(output.shape)} for {before}"


def _why_different(module: nn.Module, run: Call, split: _Split, few: Sequence[Tensor]) -> str:
    dim, half = split.dim, few[0].shape[split.dim] // 2

    def call(start: int, length: int) -> list[Tensor]:
        tensors = [_copy(tensor.narrow(dim, start, length)) for tensor in few]
        inputs = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
        args, kwargs = split.with_tensors(tensors)
        output = run(*args, **kwargs)
        # Another one at each position, and not zero for normalised values as that of squares is.
        shape = (*few[0].shape[:-1], output.shape[-1])
        slope = torch.linspace(-1, 1, math.prod(shape), dtype=output.dtype, device=output.device)
        slope = slope.view(shape).narrow(dim, start, length)
        return [output, *torch.autograd.grad(output, inputs, slope)]

    with torch.enable_grad(), with_attribute(module.modules(), "training", False):
        together = call(0, 2 * half)
        for start in (0, half):
            for one, alone in zip(together, call(start, half), strict=True):
                if not _is_close(one.narrow(dim, start, half), alone):
                    return "computes something else for a few positions alone"
    return ""


# As layers of 4 bits, whose first call notes in which type they compute.
def _is_settled(container: Any, before: Any) -> bool:
    if is_same(container, before):
        return True
    return isinstance(container, dict) and all(
        value is before.get(key, container) or isinstance(value, bool | torch.dtype)
        for key, value in container.items()
    )


# In another format there are other operators.
def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_close(one: Tensor, other: Tensor) -> bool:
    kind = one.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else one.dtype
    one, other = (each.detach().double().nan_to_num(0, 0, 0) for each in (one, other))
    return bool((one - other).norm() <= torch.finfo(dtype).eps ** 0.5 * one.norm())


# Recomputation counts what its hooks save, and autocast would keep weights without a graph.
@contextlib.contextmanager
def _apart() -> Iterator[None]:
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


# Not those of a state dict, which FSDP2 has on each module.
def _has_hooks_of_others(module: nn.Module) -> bool:
    own = vars(module).items()
    hooks = (v for name, v in own if name.endswith("_hooks") and "state_dict" not in name)
    return any(
        not is_of_this_package(hook)
        for each in hooks
        if isinstance(each, dict)
        for hook in each.values()
    )


class _ByPosition(TorchDispatchMode):
    """Refuses operators that may compute a position from others, or write to what stays.

    What is computed from the arguments has the positions in its first dimensions, and other
    dimensions after them: operators along those, products with weights and elementwise ones keep
    each position by itself.
    """

    def __init__(self, tensors: Sequence[Tensor], num_positions: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_positions = num_positions
        self._of_positions = {id(tensor): tensor for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        flags = [id(tensor) in self._of_positions for tensor in tensors]
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if any(flags) and not self._is_by_position(func, named, tensors, flags):
            raise _MixesError(f"computes `{func.overloadpacket.__name__}`")
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            written = _tensors(named.get(argument.name)) if is_written else []
            if any(id(tensor) not in self._of_positions for tensor in written):
                raise _MixesError("changes a tensor that it keeps")
        output = func(*args, **kwargs)
        if any(flags):
            found = _tensors(output)
            if any(self._num_leading(tensor.shape) is None for tensor in found):
                raise _MixesError(f"computes `{func.overloadpacket.__name__}`")
            self._of_positions |= {id(tensor): tensor for tensor in found}
        return output

    def _is_by_position(
        self, func: Any, named: dict[str, Any], tensors: Sequence[Tensor], flags: Sequence[bool]
    ) -> bool:
        first = next(tensor for tensor, flag in zip(tensors, flags, strict=True) if flag)
        packet = func.overloadpacket.__name__
        if packet in _PRODUCTS_OF_4_BITS:
            return flags[0] and sum(flags) == 1
        if func.namespace not in ("aten", "prim", "c10d"):
            return False
        if packet in _PRODUCTS:
            return flags[-1] is False and sum(flags) == 1
        if packet in _NORMS:
            return len(named["normalized_shape"]) == 1
        if packet in _ALONG:
            dims = named.get("dim", -1 if packet in _LAST else 0)
            dims = [dims] if isinstance(dims, int) else dims
            num_leading = self._num_leading(first.shape)
            return bool(dims) and all(dim % first.ndim >= num_leading for dim in dims)
        return torch.Tag.pointwise in func.tags or packet in _ELEMENTWISE

    # How many dimensions have the positions, if those come first.
    def _num_leading(self, shape: Sequence[int]) -> int | None:
        sizes = [math.prod(shape[:number]) for number in range(len(shape) + 1)]
        return sizes.index(self._num_positions) if self._num_positions in sizes else None


# Operators by name, such that one that torch no longer has is not missed.
_PRODUCTS = {"mm", "addmm", "linear"}
_PRODUCTS_OF_4_BITS = {"gemm_4bit", "gemv_4bit"}  # of bitsandbytes
_NORMS = {"native_layer_norm", "_fused_rms_norm"}
_LAST = {"glu"}
_ALONG = _LAST | {
    *("mean", "sum", "amax", "var", "var_mean", "linalg_vector_norm", "_softmax"),
    *("slice", "split", "split_with_sizes", "select", "unsqueeze", "cat"),
}
_ELEMENTWISE = {
    *("view", "_unsafe_view", "_to_copy", "clone", "detach", "alias", "device"),
    *("native_dropout", "bernoulli_", "empty_like", "zeros_like", "ones_like"),
    "allreduce_",  # of layers that processes share
}


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found
