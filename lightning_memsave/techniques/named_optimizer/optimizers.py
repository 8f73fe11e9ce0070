"""Optimizers that are made of torch's own: Muon beside AdamW, and AdamW with bfloat16 state."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_memsave.techniques.muon import (
    Group,
    check_loaded,
    check_settings,
    is_of_muon,
    muon_of,
    part_of,
)
from lightning_memsave.techniques.optimizer_kinds import MUON
from lightning_memsave.techniques.optimizer_step import initialize_state, step_without_hooks

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FUSED_ON = ("cpu", "cuda")


class _MuonWithAdamW(Optimizer):
    """torch's Muon for some matrices and its AdamW for the rest, in the same groups.

    ``ns_eps`` is Muon's ``eps``; ``betas`` and ``eps`` are AdamW's. Learning rate and weight decay
    are one for both, for which ``adjust_lr_fn="match_rms_adamw"`` is made.
    """

    memsave_state_like_weights = True

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = MUON["momentum"],
        nesterov: bool = MUON["nesterov"],
        ns_coefficients: tuple[float, float, float] = MUON["ns_coefficients"],
        ns_steps: int = MUON["ns_steps"],
        ns_eps: float = MUON["ns_eps"],
        adjust_lr_fn: str | None = MUON["adjust_lr_fn"],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.muon_matrices: set[Tensor] = set()
        """What Muon updates, of the parameters that are or may come into the groups."""
        of_muon: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_eps": ns_eps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        check_settings(of_muon)
        AdamW([nn.Parameter(torch.zeros(1, 1, device="cpu"))], lr, betas, eps, weight_decay)
        super().__init__(params, {**of_muon, "betas": betas, "eps": eps})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for part in self._parts(group):
                step_without_hooks(part)
        return loss

    def _parts(self, group: Group) -> list[Optimizer]:
        matrices = [param for param in group["params"] if is_of_muon(self, param)]
        rest = [param for param in group["params"] if not is_of_muon(self, param)]
        parts = []
        if matrices:
            parts.append(muon_of(group, matrices, self.state))
        if rest:
            parts.append(part_of(AdamW, group, self.state, params=rest))
        return parts

    def _init_group(self, group: Group) -> None:
        for part in self._parts(group):
            (own,) = part.param_groups
            initialize_state(part, own, own["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_loaded(self, state_dict, dict)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Own parameters only: a copy of this optimizer must not copy a frozen model.
        own = {param for group in self.param_groups for param in group["params"]}
        return {**super().__getstate__(), "muon_matrices": self.muon_matrices & own}


class _AdamWBf16State(AdamW):
    """torch's AdamW, which computes with moments that are kept in bfloat16."""

    memsave_state_like_weights = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._init_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param)
        return loss

    # One parameter at a time: the moments of all would be whole at once.
    def _update(self, group: Group, param: Tensor) -> None:
        state = self.state[param]
        whole = {key: state[key].to(param.dtype) for key in _MOMENTS}
        settings = {"params": [param], "fused": _is_fused(group, param)}
        step_without_hooks(part_of(AdamW, group, {param: {**state, **whole}}, **settings))
        for key, moment in whole.items():
            state[key].copy_(moment)

    def _init_group(self, group: Group, *_: Any) -> None:
        for param in group["params"]:
            if param.grad is None or self.state.get(param):
                continue
            device = param.device if _is_fused(group, param) else "cpu"
            moments = [torch.zeros_like(param, dtype=torch.bfloat16) for _ in _MOMENTS]
            step = torch.zeros((), dtype=torch.float32, device=device)
            self.state[param] = {"step": step, **dict(zip(_MOMENTS, moments, strict=True))}

    # torch casts what it loads to the type of the parameter, and calls this with it.
    def __setstate__(self, state: dict[str, Any]) -> None:
        for own in state.get("state", {}).values():
            own.update({key: own[key].bfloat16() for key in _MOMENTS if key in own})
        super().__setstate__(state)  # type: ignore[no-untyped-call]


def _is_fused(group: Group, param: Tensor) -> bool:
    is_open = not group.get("foreach") and group.get("fused") is not False
    return is_open and param.device.type in _FUSED_ON and param.is_floating_point()


# Command lines offer every public optimizer class, and these are made of settings of ours only.
_MuonWithAdamW.__name__, _AdamWBf16State.__name__ = "MuonWithAdamW", "AdamWBf16State"
OWN: Mapping[str, type[Optimizer]] = {"muon": _MuonWithAdamW, "adamw_bf16_state": _AdamWBf16State}
