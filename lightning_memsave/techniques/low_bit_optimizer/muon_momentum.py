"""torch's Muon for matrices of blocks, with its momentum in 8 bits."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.techniques.low_bit_optimizer.package import in_order
from lightning_memsave.techniques.low_bit_optimizer.state_checks import flat_state
from lightning_memsave.techniques.muon import check_loaded, is_of_muon, step_with_momentum
from lightning_memsave.techniques.optimizer_kinds import BLOCKSIZE

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


class MatricesByMuon(_Base):
    """Mixin for bitsandbytes' AdamW, which updates what is not a matrix of a block."""

    muon_matrices: set[Tensor]

    def init_state(self, group: Any, p: Tensor, group_index: int, param_index: int) -> None:
        if not is_of_muon(self, p):
            super().init_state(group, p, group_index, param_index)  # type: ignore[misc]
            return
        from bitsandbytes.optim.optimizer import Optimizer1State  # noqa: PLC0415

        p.data = p.data.contiguous()
        one_state: Any = Optimizer1State
        one_state.init_state(self, group, p, group_index, param_index)

    def update_step(self, group: Any, p: Tensor, group_index: int, param_index: int) -> None:
        if not is_of_muon(self, p):
            super().update_step(group, p, group_index, param_index)  # type: ignore[misc]
            return
        state, grad = self.state[p], p.grad
        assert grad is not None, "bitsandbytes only comes here with a gradient"
        state["step"] += 1
        momentum = _whole(state, grad.dtype)
        step_with_momentum(group, p, momentum)
        _keep(state, momentum)

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        check_loaded(self, state_dict, flat_state)
        super().load_state_dict(state_dict, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Own parameters only: a copy of this optimizer must not copy a frozen model.
        own = {*parameters_of(self)}
        return {**super().__getstate__(), "muon_matrices": self.muon_matrices & own}


def _whole(state: dict[str, Any], dtype: torch.dtype) -> Tensor:
    import bitsandbytes.functional as F  # noqa: N812, PLC0415

    values: Tensor = state["state1"]
    if "qmap1" not in state:  # of a small matrix
        return values.to(dtype)
    how: Any = {"code": state["qmap1"], "blocksize": BLOCKSIZE, "dtype": dtype}
    whole: Tensor = F.dequantize_blockwise(values, F.QuantState(state["absmax1"], **how))
    return whole


def _keep(state: dict[str, Any], momentum: Tensor) -> None:
    import bitsandbytes.functional as F  # noqa: N812, PLC0415

    if "qmap1" not in state:
        state["state1"].copy_(momentum)
        return
    with in_order(momentum.device):
        values, scales = F.quantize_blockwise(momentum, state["qmap1"], blocksize=BLOCKSIZE)
    state["state1"].copy_(values)
    state["absmax1"].copy_(scales.absmax)
