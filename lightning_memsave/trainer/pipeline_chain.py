"""Run the blocks of a model on several processes, each of which runs the user's whole step.

A process computes its own blocks. Blocks before them return placeholders, of which anything that is
computed before the own blocks is a placeholder again; the first own block is given what the stage
before has computed for it. From there on nothing may need a placeholder.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memsave.core.blocks import Block, is_given_cache
from lightning_memsave.core.nested import map_tensors
from lightning_memsave.core.patching import own, patch_method, previous_method, set_own
from lightning_memsave.core.technique import undo_all
from lightning_memsave.errors import IncompatibleError, Problem

OWNER = "PipelineStrategy"
_CHAIN = "_memsave_chain"
_PLAIN = (Tensor, bool, int, float, str, type(None))
_OTHERS = 'Name the blocks of one chain with `blocks=`, or use `Trainer(strategy="memsave_fsdp2")`.'


class Until(Enum):
    """How far a process runs the user's step."""

    FIRST_BLOCK = auto()  # to see what comes to it
    OWN_BLOCKS = auto()  # the last stage to the loss
    END = auto()  # all processes, with the same values after the last block


class StageEnd(BaseException):
    """Ends the user's step, past its own handlers; carries what has come to the block."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Elsewhere(Tensor):
    """Stands for a tensor of another process: it has shape, type and device, and no values."""

    source: str
    chain: "weakref.ref[Chain]"
    received: Tensor | None = None
    """What has taken its place in the first block of a stage."""

    @staticmethod
    def __new__(cls, like: Tensor, dtype: torch.dtype, source: str, chain: "Chain") -> "Elsewhere":
        """Make one of the shape of a tensor, which may be on the meta device."""
        make: Any = Tensor._make_wrapper_subclass
        made: Elsewhere = make(cls, like.shape, dtype=dtype, device=chain.device)
        made.source, made.chain = source, weakref.ref(chain)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before autograd: `hidden + block(hidden)` at the start of a stage has two gradients. Not
        # in a function with its own backward, which would lose one.
        if torch.is_grad_enabled() or not _is_in_training(args):
            args, kwargs = tree_map_only(Elsewhere, _known, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        first = next(leaf for leaf in leaves if isinstance(leaf, Elsewhere))
        chain = first.chain()
        if chain is None or chain.needs_values:
            raise _missing(first.source)
        if func._schema.is_mutable:
            if not isinstance(args[0], Elsewhere):
                raise _missing(first.source)
            return args[0]
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        args, kwargs = tree_map_only(Tensor, _without_values, (args, kwargs))
        try:
            found = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise _missing(first.source) from error
        return tree_map_only(Tensor, lambda t: cls(t, t.dtype, first.source, chain), found)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere(size={tuple(self.shape)}, source={self.source!r})"


def _known(tensor: Elsewhere) -> Tensor:
    return tensor if tensor.received is None else tensor.received


def _is_in_training(args: Any) -> bool:
    found = (a.chain() for a in tree_leaves(args) if isinstance(a, Elsewhere))
    return any(chain is not None and chain.is_in_training for chain in found)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _missing(source: str) -> IncompatibleError:
    why = (
        "the step uses it after blocks of another stage, which do not have it: only what one block "
        "gives to the next passes from process to process, no skip connections, states of other "
        "blocks or `output_hidden_states`"
    )
    return IncompatibleError(OWNER, [Problem(f"an output of `{source}`", why, _OTHERS)])


@dataclass
class _Run:
    """One run of the user's step."""

    until: Until
    is_live: bool
    received: Tensor | None = None
    before_own: Callable[[], object] | None = None
    is_checked: bool = False
    num_called: int = 0
    num_chains: int = 0
    versions: dict[str, int] | None = None


class Chain:
    """The blocks of a module in the order in which they run, and the share of this process."""

    def __init__(self, module: nn.Module, blocks: Sequence[Block], device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device, self.blocks = device, list(blocks)
        bounds = [round(i * len(blocks) / self.size) for i in range(self.size + 1)]
        self.bounds = bounds
        self.templates: list[Any] = [None] * len(blocks)
        """What each block returns, with tensors of the meta device."""
        self.dtype_received = self.dtype_sent = torch.float32
        self._module = module
        self._run: _Run | None = None
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def is_in_training(self) -> bool:
        return self._run is not None and self._run.until is Until.OWN_BLOCKS

    @property
    def needs_values(self) -> bool:
        """Whether what runs now is part of the result."""
        return self._run is None or self._run.is_live

    def owner_of(self, index: int) -> int:
        return next(rank for rank in range(self.size) if index < self.bounds[rank + 1])

    def patch(self) -> None:
        """Let the blocks ask where they run."""
        for index, block in enumerate(self.blocks):
            self._undo.append(set_own(block.module, _CHAIN, (self, index)))
            self._undo.append(patch_method(block.module, forward, is_outer=True))

    def unpatch(self) -> None:
        undo_all(self._undo)

    def run(
        self,
        step: Callable[[], Any],
        until: Until,
        received: Tensor | None = None,
        before_own: Callable[[], object] | None = None,
    ) -> Any:
        """Run a step; returns its result, or what came to the block that ended it."""
        run = _Run(until, self.rank == 0, received, before_own)
        with self._running(run):
            try:
                result = step()
            except StageEnd as end:
                return end.hidden
            self._require_end(run)
            return result

    def run_checked(self, step: Callable[[], Any]) -> Any:
        """Run a step to its end on all processes, which tell each other what does not fit."""
        run = _Run(Until.END, self.rank == 0, is_checked=True)
        with self._running(run):
            try:
                result = step()
                self._require_end(run)
                self._require_buffers(run)
            except Exception as error:
                if run.is_checked:
                    run.is_checked = False
                    self._tell(run, None, problem=_problem_of(error))
                raise
            self._tell(run, None)
        return result

    @contextlib.contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        before, self._run = self._run, run
        try:
            yield
        finally:
            self._run = before

    def call(self, index: int, original: Any, args: Any, kwargs: Any) -> Any:
        """Run a block, or give what stands for its result."""
        run, hidden = self._run, _first_tensor(args, kwargs)
        if run is None:  # `checkpoint(block, ...)` of the user's own runs it again
            known = getattr(hidden, "received", None)
            args, kwargs = (args, kwargs) if known is None else _with_first(args, kwargs, known)
            return original(*args, **kwargs)
        self._require_order(run, index)
        if hidden is None:
            raise self._refused(index, "it is called without a tensor")
        if index == 0:
            self._begin(run, hidden, args, kwargs)
        if index and index in self.bounds:
            args, kwargs = self._cross(run, index, hidden, args, kwargs)
        is_own, output = self.owner_of(index) == self.rank, None
        if is_own:
            if run.before_own is not None and index == self.bounds[self.rank]:
                run.before_own()
            output = original(*args, **kwargs)
            self._require_form(run, index, hidden, output)
        if run.is_checked:
            self._learn(run, index, output if is_own else None)
        found = None
        if index == len(self.blocks) - 1 and run.until is Until.END:
            # What comes to it too: the step may use it beside the result.
            both = [_first_tensor(args, kwargs), _hidden_in(output)] if is_own else None
            received, found = from_owner(both, self.size - 1, self.device)
            run.is_live = True
            if isinstance(hidden, Elsewhere):
                hidden.received = hidden.received if is_own else received
        return output if is_own else self._filled(index, hidden, found)

    def _begin(self, run: _Run, hidden: Tensor, args: Any, kwargs: Any) -> None:
        if run.until is Until.FIRST_BLOCK:
            raise StageEnd(hidden)
        run.is_live = self.rank == 0
        run.versions = run.versions or self._versions()
        if is_given_cache(args, kwargs):
            caches = [v for v in (*args, *kwargs.values()) if is_given_cache((v,), {})]
            if any(cache in self._caches for cache in caches):
                raise self._refused(
                    0,
                    "it is given a cache of keys and values from an earlier pass, of which each "
                    "process has a part only",
                    "Pass `use_cache=False`, to `generate` too.",
                )
            self._caches.update(caches)

    def _cross(
        self, run: _Run, index: int, hidden: Tensor, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Pass on what comes to the first block of a stage, and give its arguments."""
        owner = self.owner_of(index)
        if run.is_checked:
            self._tell(run, index)
        if self.rank == owner - 1:
            run.is_live = False
            self.dtype_sent = hidden.dtype
            if run.until is Until.OWN_BLOCKS:
                raise StageEnd(hidden)
            _send(hidden, owner)
        if self.rank != owner:
            return args, kwargs
        run.is_live, received = True, run.received
        if run.until is Until.END:
            received = _receive(owner - 1, self.device)
            self.dtype_received = received.dtype
        elif not torch.is_grad_enabled():
            raise self._refused(index, "it runs without gradients, as in reentrant checkpointing")
        if isinstance(hidden, Elsewhere):
            hidden.received = received
        return _with_first(args, kwargs, received)

    def _filled(self, index: int, hidden: Tensor, found: Tensor | None = None) -> Any:
        """Give the form of a block's result, of placeholders but for what is known."""
        first = [hidden]

        def fill(leaf: Tensor) -> Tensor:
            if first and found is not None:
                first.clear()
                return found
            like = first.pop() if first else leaf
            return Elsewhere(like, leaf.dtype, self.blocks[index].name, self)

        return map_tensors(self.templates[index], fill)

    def _require_order(self, run: _Run, index: int) -> None:
        if run.num_called == len(self.blocks) and index == 0 and run.until is Until.END:
            run.num_called = 0  # another pass through the model
        if index != run.num_called:
            expected = self.blocks[run.num_called % len(self.blocks)].name
            why = f"it runs where `{expected}` was expected: each block must run once, in order"
            raise self._refused(index, why)
        run.num_called += 1
        run.num_chains += index == 0

    def _require_form(self, run: _Run, index: int, hidden: Tensor, output: Any) -> None:
        others = {type(a).__name__ for a in tree_leaves(output) if not isinstance(a, _PLAIN)}
        if others:
            raise self._refused(index, f"it returns an object of class `{min(others)}`")
        tensors = _tensors_in(output)
        if not tensors or tensors[0].shape != hidden.shape:
            shape = tuple(tensors[0].shape) if tensors else None
            why = f"it makes {shape} of a tensor of shape {tuple(hidden.shape)}, not the same shape"
            raise self._refused(index, why)

    def _require_end(self, run: _Run) -> None:
        if run.num_called != len(self.blocks):
            why = "the step ended before it ran: each block must run once in each step, in order"
            raise self._refused(run.num_called, why)

    def _require_buffers(self, run: _Run) -> None:
        if run.num_chains > 1 and self._module.training:
            raise self._refused(0, "it runs more than once in a training step")
        before = run.versions or {}
        if changed := [name for name, now in self._versions().items() if before.get(name) != now]:
            why = "it is outside of blocks, and changes after the first block, on one process only"
            fix = "Use what keeps no such state, such as `nn.GroupNorm`."
            raise IncompatibleError(OWNER, [Problem(f"buffer `{changed[0]}`", why, fix)])

    def _versions(self) -> dict[str, int]:
        names = {module: name for name, module in self._module.named_modules()}
        return {
            f"{names[part]}.{name}".lstrip("."): buffer._version
            for part in modules_outside(self._module, self.blocks)
            for name, buffer in part.named_buffers(recurse=False)
            if not buffer.is_inference()
        }

    def _learn(self, run: _Run, index: int, output: Any) -> None:
        template = map_tensors(output, _without_values)
        self.templates[index] = self._tell(run, index, template)[self.owner_of(index)]

    def _tell(
        self, run: _Run, index: int | None, template: Any = None, problem: Problem | None = None
    ) -> list[Any]:
        found: list[Any] = [None] * self.size
        with _disable_current_modes():
            dist.all_gather_object(found, (index, template, problem))
        problems = [told for *_, told in found if told is not None]
        if not problems and len({where for where, *_ in found}) > 1:
            why = "processes run other blocks, as if they had other batches or random numbers"
            problems = [Problem("the step", why, "Let it do the same on all processes.")]
        if problems:
            run.is_checked = False
            raise IncompatibleError(OWNER, list(dict.fromkeys(problems)))
        return [there for _, there, _ in found]

    def _refused(self, index: int, why: str, fix: str = _OTHERS) -> IncompatibleError:
        name = self.blocks[index % len(self.blocks)].name
        return IncompatibleError(OWNER, [Problem(f"block `{name}`", why, fix)])


def modules_outside(module: nn.Module, blocks: Sequence[Block]) -> list[nn.Module]:
    """List the modules to which a name leads that does not lead through a block."""
    inside, found, waiting = {block.module for block in blocks}, dict[nn.Module, None](), [module]
    while waiting:
        part = waiting.pop()
        if part not in inside and part not in found:
            found[part] = None
            waiting += part.children()
    return [*found]


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block where it belongs."""
    original = previous_method(self, "forward", is_outer=True)
    chain, index = own(self, _CHAIN) or (None, 0)
    return original(*args, **kwargs) if chain is None else chain.call(index, original, args, kwargs)


def _tensors_in(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(tree, found.append)
    return found


def _hidden_in(output: Any) -> Tensor:
    return _tensors_in(output)[0]


def _first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)


def _with_first(args: Any, kwargs: Any, hidden: Any) -> tuple[Any, Any]:
    """Give arguments with another first tensor."""
    first = _first_tensor(args, kwargs)
    found = tuple(hidden if a is first else a for a in args)
    return found, {name: hidden if a is first else a for name, a in kwargs.items()}


def _problem_of(error: Exception) -> Problem:
    if isinstance(error, IncompatibleError):
        return error.problems[0]
    first = (str(error).strip().splitlines() or [""])[0]
    return Problem("the step", f"{type(error).__name__}: {first}", "Its process shows where.")


def _send(tensor: Tensor, there: int) -> None:
    with _disable_current_modes():
        dist.send_object_list([(tensor.shape, tensor.dtype)], there)
        dist.send(tensor.detach().contiguous(), there)


def _receive(source: int, device: torch.device) -> Tensor:
    with _disable_current_modes():
        box: list[Any] = [None]
        dist.recv_object_list(box, source)
        tensor = torch.empty(box[0][0], dtype=box[0][1], device=device)
        dist.recv(tensor, source)
    return tensor


def from_owner(tree: Any, owner: int, device: torch.device, *, on_host: bool = False) -> Any:
    """Give all processes the tensors that one has, in any nesting, one after the other."""
    mine = iter(_tensors_in(tree))
    is_owner = dist.get_rank() == owner

    def fetch(leaf: Tensor) -> Tensor:
        if is_owner:
            there = next(mine).detach().to(device).contiguous()
        else:
            there = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        dist.broadcast(there, owner)
        return there.cpu() if on_host else there

    with _disable_current_modes():
        box = [map_tensors(tree, _without_values) if is_owner else None]
        dist.broadcast_object_list(box, owner)
        return map_tensors(box[0], fetch)
