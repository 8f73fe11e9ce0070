"""Wrap a plain module in a LightningModule that trains it."""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.nested import items_of
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.trainer.trainer import PACKAGES

_WRAPPER = "wrapped"
_LOSS = (
    "The loss is the `loss` of the module's output, or the mean of its first tensor: pass `loss=` "
    "in Python, or a LightningModule, for another one."
)


class _Wrapper:
    wrapped: nn.Module


def inner_of(module: nn.Module) -> nn.Module:
    """Return the user's own module: what `wrap` wrapped, or the module itself."""
    return module.wrapped if isinstance(module, _Wrapper) else module


def is_lightning(module: nn.Module) -> bool:
    starts = tuple(f"{package}." for package in PACKAGES)
    return any(cls.__module__.startswith(starts) for cls in type(module).__mro__)


def installed_package() -> Any:
    installed = (name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]))
    return importlib.import_module(next(installed))


def wrap(module: nn.Module, optimizer: Any, loss: Any) -> Any:
    package: Any = installed_package()

    class Wrapped(_Wrapper, package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = module

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = _call(self.wrapped, batch)
            return _loss_of(output) if loss is None else _checked_loss(loss(output, batch))

        def configure_optimizers(self) -> Any:
            parameters = [p for p in self.wrapped.parameters() if p.requires_grad]
            made = (optimizer or torch.optim.AdamW)(parameters)
            if made is None:
                raise ConfigurationError(
                    "`optimizer=` returned `None`. Return the optimizer, or pass its class: "
                    "`optimizer=torch.optim.AdamW`."
                )
            return made

    return Wrapped()


def _checked_loss(found: Any) -> Any:
    is_tensor = isinstance(found, Tensor)
    if is_tensor and tuple(found.shape) in ((), (1,)):
        return found
    what = f"a tensor of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
    raise ConfigurationError(
        f"`loss=` returned {what}, not a scalar tensor. Reduce it: "
        "for example `loss=lambda output, batch: (output - batch[1]).square().mean()`."
    )


def unwrap(prediction: MemoryPrediction, module: nn.Module, has_loss: bool) -> MemoryPrediction:
    """Remove the wrapper from the sentences of a prediction."""
    if not isinstance(module, _Wrapper):
        return prediction
    return replace(
        prediction,
        assumptions=(*(() if has_loss else (_LOSS,)), *prediction.assumptions),
        ineffective={
            name: why.replace("`Wrapped`", f"`{prediction.model}`")
            .replace(f" at `{_WRAPPER}`", "")
            .replace(f"`{_WRAPPER}.", "`")
            for name, why in prediction.ineffective.items()
        },
    )


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, list | tuple):
        return module(*batch)
    return module(batch)


def _loss_of(output: Any) -> Tensor:
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if isinstance(found, Tensor):
        return found
    if isinstance(output, Tensor):
        return output.float().mean()
    tensors = [item for _, item in items_of(output) if isinstance(item, Tensor)]
    if tensors and tensors[0].is_floating_point():
        return tensors[0].float().mean()
    raise ConfigurationError(
        f"The module returns {type(output).__name__}, which has no loss. Pass `loss=`, a function "
        "of output and batch."
    )
