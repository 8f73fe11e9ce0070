"""Parameters, gradients and optimizer state of one stage, and their exchange with the others."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_memsave.core.patching import own
from lightning_memsave.trainer.pipeline_chain import Chain, from_owner, modules_outside

OUTSIDE = "_memsave_outside"


class StageState:
    """Who has which tensors of a module, and which parameters of each optimizer."""

    def __init__(self, module: nn.Module, chain: Chain) -> None:
        self._module, self._chain = module, chain
        stages: dict[Tensor, set[int | None]] = {}
        for part in modules_outside(module, chain.blocks):
            for tensor in _tensors_of(part, recurse=False):
                stages.setdefault(tensor, set()).add(None)
        for index, block in enumerate(chain.blocks):
            for tensor in _tensors_of(block.module):
                stages.setdefault(tensor, set()).add(chain.owner_of(index))
        only = {t: next(iter(found)) for t, found in stages.items() if len(found) == 1}
        self.stage_of = {tensor: stage for tensor, stage in only.items() if stage is not None}
        """Of the parameters and buffers of blocks that no other stage has."""
        self.outside = [p for p in module.parameters() if p not in self.stage_of]
        """Parameters that all stages hold."""
        self._order: dict[Any, list[list[Tensor]]] = {}

    def is_here(self, tensor: Tensor) -> bool:
        return self.stage_of.get(tensor, self._chain.rank) == self._chain.rank

    def free_others(self) -> None:
        """Free the tensors of other stages; they keep their shapes."""
        for tensor in self.stage_of:
            if not self.is_here(tensor):
                tensor.data = torch.empty_like(tensor, device=self._chain.device)
                tensor.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Give all processes all tensors, on the host."""
        for stage in range(self._chain.size):
            tensors = [t for t, owner in self.stage_of.items() if owner == stage]
            for tensor in tensors:
                (found,) = from_owner([tensor], stage, self._chain.device, on_host=True)
                tensor.data = found

    def state_dict(self) -> dict[str, Any]:
        """Give the whole state dict on the first process, and an empty one on the others."""
        chain, state = self._chain, self._module.state_dict()
        here = {t.untyped_storage()._cdata for t in self.stage_of if self.is_here(t)}
        mine = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.untyped_storage()._cdata in here
        }
        for stage in range(1, chain.size):
            tree = mine if stage == chain.rank else {}
            found = from_owner(tree, stage, chain.device, on_host=True)
            state.update(found if chain.rank == 0 else {})
        return state if chain.rank == 0 else {}

    def keep_own(self, optimizer: Any) -> None:
        """Take parameters of other stages out of the groups of an optimizer."""
        groups = optimizer.param_groups
        self._order[optimizer] = [[*group["params"]] for group in groups]
        for group in groups:
            group["params"][:] = [p for p in group["params"] if self.is_here(p)]

    def _indices(self, optimizer: Any) -> list[tuple[int, Tensor]]:
        return [*enumerate(p for params in self._order[optimizer] for p in params)]

    def optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Give the state of all parameters on the first process, as one process would."""
        chain, groups = self._chain, state["param_groups"]
        indices = iter([i for i, p in self._indices(optimizer) if self.is_here(p)])
        local = {key: next(indices) for group in groups for key in group["params"]}
        mine = {local[key]: value for key, value in state["state"].items()}
        whole = dict(mine)
        for stage in range(1, chain.size):
            tree = mine if stage == chain.rank else {}
            whole |= from_owner(tree, stage, chain.device, on_host=True)
        numbers = iter(range(len(self._indices(optimizer))))
        groups = [
            {**group, "params": [next(numbers) for _ in params]}
            for group, params in zip(groups, self._order[optimizer], strict=True)
        ]
        return {**state, "state": dict(sorted(whole.items())), "param_groups": groups}

    def local_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Give what belongs to this stage of a whole state; the inverse of `optimizer_state`."""
        saved = [key for group in state["param_groups"] for key in group["params"]]
        pairs = self._indices(optimizer)
        if len(saved) != len(pairs):
            return state  # torch says what does not fit
        kept = {saved[index] for index, param in pairs if self.is_here(param)}
        groups = [
            {**group, "params": [key for key in group["params"] if key in kept]}
            for group in state["param_groups"]
        ]
        states = {key: value for key, value in state["state"].items() if key in kept}
        return {**state, "state": states, "param_groups": groups}


def _tensors_of(module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def clip_grad_by_norm(self: Any, optimizer: Any, clip_val: float) -> None:
    """Clip by the norm over all stages, in which what they all hold counts once."""
    outside, device = own(self, OUTSIDE)
    params = [param for param in self.main_params(optimizer) if param.grad is not None]
    shared = _square_of_norm(p for p in params if p in outside)
    blocks = _square_of_norm(p for p in params if p not in outside)
    total = blocks.to(device)
    dist.all_reduce(total)
    norm = (shared.to(device) + total).sqrt()
    nn.utils.clip_grads_with_norm_(params, clip_val, norm.to(params[0].dtype if params else None))


def _square_of_norm(params: Iterable[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]).double().square()
