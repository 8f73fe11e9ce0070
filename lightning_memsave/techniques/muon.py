"""torch's Muon for matrices of blocks: which they are, and how it updates them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Muon, Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.core.blocks import BlockSelector, find_blocks
from lightning_memsave.core.trainer_facts import SHARDED, TrainerFacts
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.optimizer_kinds import MUON
from lightning_memsave.techniques.optimizer_step import double_of, step_without_hooks

_BUFFER = "momentum_buffer"
Group = Mapping[str, Any]


def matrices_of(
    module: nn.Module | None, blocks: BlockSelector | Sequence[BlockSelector] | None
) -> set[Tensor]:
    """Find two-dimensional weights of blocks, without tables of embeddings."""
    if module is None:
        return set()
    found = find_blocks(module, blocks)
    modules: list[Any] = [child for block in found for child in block.module.modules()]
    tables = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    params = {p for m in modules for p in m.parameters(recurse=False) if not is_lazy(p)}
    return {param for param in params - tables if param.ndim == 2}


def problems_without_matrices(optimizer: Optimizer, matrices: set[Tensor]) -> list[Problem]:
    if any(param in matrices for group in optimizer.param_groups for param in group["params"]):
        return []
    why, fix = "none of its parameters is a matrix of a repeated block", "Name the blocks: "
    fix += '`blocks="MyBlock"`; in a plain loop pass `module=`, too. Or use another one.'
    return [Problem(f"`{type(optimizer).__name__}`", why, fix)]


def problems_of_strategy(facts: TrainerFacts, written: str) -> list[Problem]:
    """Refuse Muon where processes have parts of matrices, or of the model."""
    if not facts.is_strategy(*SHARDED, "PipelineStrategyMixin"):
        return []
    why = f"with `{facts.strategy}` a process has no whole matrices, or not all blocks"
    fix = 'Use `optimizer="8bit"` or `None`, or train in one process or with DDP.'
    return [Problem(written, why, fix)]


def is_of_muon(optimizer: Any, param: Tensor) -> bool:
    """Return whether Muon updates a parameter, or what stands in for one with its state."""
    matrices = getattr(optimizer, "muon_matrices", None)
    if matrices is None:
        return type(optimizer) is Muon
    state = optimizer.state.get(param)
    return has_momentum(state) if state else param in matrices


def has_momentum(state: Mapping[str, Any]) -> bool:
    """Return whether a state is that of Muon, in 32 bits or as bitsandbytes has it."""
    return _BUFFER in state or ("state1" in state and "state2" not in state)


def check_loaded(optimizer: Any, state_dict: Mapping[str, Any], flat: Callable[..., Any]) -> None:
    """Raise if a state is not Muon's, or was written with other matrices for it."""
    pairs = list(zip(state_dict["param_groups"], optimizer.param_groups, strict=False))
    is_own = all("ns_steps" in saved for saved, _ in pairs) and all(
        has_momentum(flat(state)) is (param in optimizer.muon_matrices)
        for saved, own in pairs
        for key, param in zip(saved["params"], own["params"], strict=False)
        if (state := state_dict["state"].get(key))
    )
    if not is_own:  # other sizes of groups are refused by torch
        why = "it was written by another optimizer than Muon, or with other matrices for it"
        fix = "Use the optimizer and the `blocks` of the checkpoint, or load its weights only: "
        fix += "`MyModule.load_from_checkpoint(path)`, and no `ckpt_path`."
        problem = Problem("The checkpoint's optimizer state", why, fix)
        raise IncompatibleError("optimizer", [problem])


def check_settings(settings: Mapping[str, Any]) -> None:
    """Let torch check what is of Muon in these settings; raises what it raises."""
    names = MUON.keys() | {"lr", "weight_decay"}
    given = {("eps" if k == "ns_eps" else k): v for k, v in settings.items() if k in names}
    Muon([nn.Parameter(torch.zeros(1, 1, device="cpu"))], **given)


def muon_of(group: Group, params: list[Tensor], state: Any) -> Optimizer:
    """Make torch's Muon with the settings of a group, for some of its parameters."""
    return part_of(Muon, group, state, params=params, eps=group["ns_eps"])


def step_with_momentum(group: Group, param: Tensor, momentum: Tensor) -> None:
    """Update a matrix, and its momentum, which has the type of its gradient."""
    step_without_hooks(muon_of(group, [param], {param: {_BUFFER: momentum}}))


def part_of(cls: Any, group: Group, state: Any, **settings: Any) -> Optimizer:
    """Make an optimizer of torch of what it knows of a group, and of a state."""
    plain = _plain(cls)
    known = {key: group.get(key, value) for key, value in plain.defaults.items()}
    return double_of(plain, [{**known, **settings}], state)


@functools.cache
def _plain(cls: Any) -> Optimizer:
    with _disable_current_modes():
        made: Optimizer = cls([nn.Parameter(torch.zeros(1, 1, device="cpu"))])
    return made
