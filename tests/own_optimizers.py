"""Optimizers as other packages write them: counts in groups, nested state, matrices, couplings."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class _Own(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.begin(group)
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    self.update(group, param, param.grad, self.state[param])
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        """Begin the step of a group."""

    @abstractmethod
    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        """Update a parameter."""


class CountsInGroups(_Own):
    """Adam's moments in a list, counts of steps in groups, and numbers on host and device."""

    def begin(self, group: dict[str, Any]) -> None:
        """Count the step."""
        group["step"] = group.get("step", 0) + 1
        group["rates"] = [*group.get("rates", []), group["lr"]][-2:]

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        """Update a parameter."""
        if not state:
            state["moments"] = [torch.zeros_like(param), torch.zeros_like(param)]
            state["number"] = torch.tensor(0.0)
            state["norm"] = torch.zeros((), device=param.device)
        first, second = state["moments"]
        first.lerp_(grad, 0.1)
        second.mul_(0.9).addcmul_(grad, grad, value=0.1)
        state["number"] += 1
        state["norm"] = 0.5 * state["norm"] + grad.norm()  # a new one in each step
        step, scale = group["step"], getattr(param, "own_scale", 1.0)
        size = scale * group["lr"] * sum(group["rates"]) / group["rates"][-1]
        denominator = (second / (1 - 0.9**step)).sqrt_().add_(1e-8)
        param.addcdiv_(first / (1 - 0.9**step), denominator, value=-size)
        param.div_(1 + 1e-6 * state["norm"] / state["number"].item())


class StepsInTraining(CountsInGroups):
    """One that makes steps only after ``train``, as schedule-free ones."""

    is_training = False

    def train(self) -> None:
        """Allow steps."""
        self.is_training = True

    def begin(self, group: dict[str, Any]) -> None:
        """Begin the step of a group."""
        assert self.is_training
        super().begin(group)


class Preconditions(_Own):
    """Matrices of other shapes than the parameter, whose powers come every second step."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        """Update a parameter."""
        if not state:
            state["step"] = 0
            state["squares"] = {
                str(i): torch.eye(n, device=param.device, dtype=param.dtype)
                for i, n in enumerate(param.shape)
            }
        for axis, own in enumerate(state["squares"].values()):
            flat = grad.movedim(axis, 0).reshape(len(own), -1)
            own.mul_(0.9).addmm_(flat, flat.T)
        if state["step"] % 2 == 0:
            state["powers"] = [
                (own @ own).div_(own.norm() ** 2) for own in state["squares"].values()
            ]
        state["step"] += 1
        for power in state["powers"]:
            grad = torch.tensordot(grad, power, dims=([0], [0]))
        param.sub_(grad, alpha=group["lr"])


class ClipsTogether(_Own):
    """The norm of all gradients scales each update, if it is large."""

    def begin(self, group: dict[str, Any]) -> None:
        """Find the norm."""
        norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
        self.scale = (10 / torch.stack(norms).norm()).clamp(max=1) if norms else 1.0

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        """Update a parameter."""
        param.sub_(grad * self.scale, alpha=group["lr"])


class AdaptsRate(_Own):
    """A step size that all gradients of a group change, as of D-Adaptation."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        """Update a parameter."""
        group["sum"] = group.get("sum", 0.0) + float(grad.abs().sum())
        param.sub_(grad, alpha=group["lr"] / group["sum"])


class CountsInState(_Own):
    """A count of the steps of all beside the states of parameters, as of MADGRAD."""

    def begin(self, group: dict[str, Any]) -> None:
        """Count the step."""
        state: Any = self.state
        state["step"] = state.get("step", torch.tensor(0)) + 1

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        """Update a parameter."""
        param.sub_(grad, alpha=group["lr"])


class Dithers(_Own):
    """Random numbers, which come in the order of the parameters."""

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        """Update a parameter."""
        param.sub_(grad + 1e-3 * torch.randn_like(grad), alpha=group["lr"])


class TwiceAround(Optimizer):
    """Sharpness-aware: calls its closure twice, and another optimizer makes the update."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "radius": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update at the gradient of a point nearby."""
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        before = [param.clone() for param in params]
        for param in params:
            assert param.grad is not None
            param.add_(param.grad * (0.05 / norm))
        self.zero_grad()
        closure()
        for param, old in zip(params, before, strict=True):
            param.copy_(old)
        self.inner.step()
        return loss


class Interpolates(_Own):
    """Schedule-free: weights for gradients and for evaluation, one made of the other and state."""

    is_training = True

    def update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        """Update a parameter."""
        state.setdefault("z", param.clone())
        param.lerp_(state["z"], 0.1).sub_(grad, alpha=0.1 * group["lr"])
        state["z"].sub_(grad, alpha=group["lr"])

    def train(self) -> None:
        """Let weights be those that get gradients."""
        self._mix(0.1, True)

    def eval(self) -> None:
        """Let weights be averages."""
        self._mix(1 - 1 / 0.9, False)

    @torch.no_grad()
    def _mix(self, weight: float, is_training: bool) -> None:
        for param, state in self.state.items() if self.is_training is not is_training else ():
            param.lerp_(state["z"], weight)
        self.is_training = is_training
