"""Optimizers that are made of torch's own: Muon beside AdamW, and AdamW with bfloat16 state."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.optimizer_step import (
    double_of,
    initialize_state,
    step_without_hooks,
)

_BUFFER = "momentum_buffer"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FUSED_ON = ("cpu", "cuda")
Group = Mapping[str, Any]


@functools.cache
def _plain(cls: Any) -> Optimizer:
    with _disable_current_modes():
        made: Optimizer = cls([nn.Parameter(torch.zeros(1, 1, device="cpu"))])
    return made


def _part(cls: Any, group: Group, state: Any, **settings: Any) -> Optimizer:
    """Make an optimizer of torch of what it knows of a group, and of a state."""
    plain = _plain(cls)
    known = {key: group.get(key, value) for key, value in plain.defaults.items()}
    return double_of(plain, [{**known, **settings}], state)


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
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.matrices: set[Tensor] = set()
        """What Muon updates, of the parameters that are or may come into the groups."""
        of_muon: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        dummy = nn.Parameter(torch.zeros(1, 1, device="cpu"))
        Muon([dummy], **of_muon, eps=ns_eps)  # they check what they are given
        AdamW([dummy], lr, betas, eps, weight_decay)
        super().__init__(params, {**of_muon, "ns_eps": ns_eps, "betas": betas, "eps": eps})

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
        matrices = [param for param in group["params"] if self._is_of_muon(param)]
        rest = [param for param in group["params"] if not self._is_of_muon(param)]
        parts = []
        if matrices:
            settings = {"params": matrices, "eps": group["ns_eps"]}
            parts.append(_part(Muon, group, self.state, **settings))
        if rest:
            parts.append(_part(AdamW, group, self.state, params=rest))
        return parts

    # Others may stand in for parameters, such as those on the host, with their state.
    def _is_of_muon(self, param: Tensor) -> bool:
        state = self.state.get(param)
        return _BUFFER in state if state else param in self.matrices

    def _init_group(self, group: Group) -> None:
        for part in self._parts(group):
            (own,) = part.param_groups
            initialize_state(part, own, own["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pairs = list(zip(state_dict["param_groups"], self.param_groups, strict=False))
        is_own = all("ns_steps" in saved for saved, _ in pairs) and all(
            (_BUFFER in state) is (param in self.matrices)
            for saved, own in pairs
            for key, param in zip(saved["params"], own["params"], strict=False)
            if (state := state_dict["state"].get(key))
        )
        if not is_own:  # other sizes of groups are refused by torch
            why = "it was written by another optimizer than Muon, or with other matrices for it"
            fix = "Use the optimizer and the `blocks` of the checkpoint, or load its weights only: "
            fix += "`MyModule.load_from_checkpoint(path)`, and no `ckpt_path`."
            problem = Problem("The checkpoint's optimizer state", why, fix)
            raise IncompatibleError("named_optimizer", [problem])
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Own parameters only: a copy of this optimizer must not copy a frozen model.
        own = {param for group in self.param_groups for param in group["params"]}
        return {**super().__getstate__(), "matrices": self.matrices & own}


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
        step_without_hooks(_part(AdamW, group, {param: {**state, **whole}}, **settings))
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
