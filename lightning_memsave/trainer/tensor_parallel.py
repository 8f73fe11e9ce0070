"""Tensor parallelism by the plans that Hugging Face's models have, on Lightning's mesh."""

import importlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_memsave.errors import IncompatibleError, Problem

TP = "tensor_parallel"
_SUMMED_BY_A_HOOK = "replicated_with_grad_allreduce"


def split_by_plan(module: nn.Module, mesh: Any) -> None:
    """Split the layers of each model in a module by its plan; processes have equal values."""
    if any(isinstance(param, DTensor) for param in module.parameters()):
        return  # by the module's own `configure_model`
    models: list[tuple[str, Any]] = []
    for name, part in module.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in models)
        if getattr(part, "tp_plan", None) and not is_inside:
            models.append((name, part))
    problems = [*_problems_of(module, models, mesh.size())]
    try:
        plans: Any = importlib.import_module("transformers.distributed.tensor_parallel")
        split = plans.apply_tensor_parallelism
    except (ImportError, AttributeError):
        why = "transformers is older than its present way to split layers"
        problems.append(Problem("A `tp_plan`", why, "Type `pip install 'transformers>=5.24'`."))
    if problems:
        raise IncompatibleError("FSDP2Strategy", problems)
    names: defaultdict[Any, list[str]] = defaultdict(list)
    for name, param in module.named_parameters(remove_duplicate=False):
        names[param].append(name)
    for _, model in models:
        split(model, mesh, dict(_rules_of(model)))
    for first, *others in names.values():  # one parameter is split once
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, module.get_parameter(first))


def _rules_of(model: Any) -> Iterator[tuple[str, str]]:
    """Give the style of each module and parameter that a plan names, with `*` for numbers."""
    once = {name for name, _ in model.named_parameters()}
    for name, part in model.named_modules():
        style = model.tp_plan.get(_pattern_of(name))
        for own, _ in part.named_parameters(name, recurse=False):
            if own in once and (found := model.tp_plan.get(_pattern_of(own), style)):
                yield own, found
        if style:
            yield name, style


def _pattern_of(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _problems_of(module: nn.Module, models: list[tuple[str, Any]], size: int) -> Iterator[Problem]:
    if not models:
        why = "no part of it has a plan (`tp_plan`), as models of Hugging Face have"
        fix = "Split layers in `configure_model`, with `parallelize_module` and `self.device_mesh`."
        yield Problem(f"`tensor_parallel_size={size}` for `{type(module).__name__}`", why, fix)
    for name, model in models:
        what, fix = f"`{name}` of class `{type(model).__name__}`", "Set `tensor_parallel_size=1`."
        if _SUMMED_BY_A_HOOK in model.tp_plan.values():
            why = f"its plan has `{_SUMMED_BY_A_HOOK}`, which sums accumulated gradients twice"
            yield Problem(what, why, fix)
        config = model.config.get_text_config()
        heads = [getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value")]
        if odd := [number for number in heads if number and number % size]:
            why = f"{odd[0]} heads cannot be shared by {size} processes"
            yield Problem(what, why, f"{fix[:-2]}` or another divisor of {math.gcd(*odd)}.")


@torch.no_grad()
def copy_from_first(tensors: Iterable[torch.Tensor], device: torch.device, group: Any) -> None:
    """Give all processes of a group the values of its first one."""
    first = torch.distributed.get_global_rank(group, 0)
    for tensor in tensors:
        if not (tensor.is_meta or is_lazy(tensor)):
            here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            there = here.detach().to(device).contiguous()
            torch.distributed.broadcast(there, first, group)
            here.copy_(there)


def copies(module: nn.Module) -> Iterator[torch.Tensor]:
    """Give what all processes of tensor parallelism hold alike."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            yield tensor
            continue
        names = tensor.device_mesh.mesh_dim_names or ()
        if TP not in names or tensor.placements[names.index(TP)].is_replicate():
            yield tensor


def draw_alike(device: torch.device, group: Any) -> None:
    """Give processes that hold parts of one layer the same random numbers: for dropout."""
    state = torch.get_rng_state()
    copy_from_first([state], device, group)
    torch.set_rng_state(state)
    if device.type == "cuda":  # pragma: no cover (gpu)
        state = torch.cuda.get_rng_state(device)
        copy_from_first([state], device, group)
        torch.cuda.set_rng_state(state, device)


def clip_grad_by_norm(self: Any, optimizer: Any, clip_val: float) -> None:
    """Clip, as torch does; it refuses parameters on different meshes."""
    of_meshes: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for param in self.main_params(optimizer):
        if param.grad is not None:
            of_meshes[getattr(param, "device_mesh", None)].append(param)
    norms = []
    for params in of_meshes.values():
        norm: Any = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if norms:
        total = torch.linalg.vector_norm(torch.stack(norms))
        for params in of_meshes.values():
            nn.utils.clip_grads_with_norm_(params, clip_val, total)
