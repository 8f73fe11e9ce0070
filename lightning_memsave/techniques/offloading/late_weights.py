"""Join the halves of a weight when the checkpoint writes it."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_memsave.core.checkpoints import is_streaming, late_storage, reduced
from lightning_memsave.core.patching import previous_method
from lightning_memsave.core.saved_state import with_attribute
from lightning_memsave.techniques.offloading.hooks_of_users import SAY_NO_VALUES, Settled
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.residences import residence_of


class LateWeight(Tensor):
    """A weight on the host: what reads or writes it joins it, and a checkpoint joins a copy."""

    part: Part
    param: nn.Parameter
    storage_when_written: Any

    @staticmethod
    def __new__(cls, part: Part, param: nn.Parameter) -> "LateWeight":
        form = part.form_of(param)
        device = torch.device("cpu")
        made: LateWeight = Tensor._make_wrapper_subclass(
            cls, form.size(), strides=form.stride(), dtype=form.dtype, device=device
        )
        made.part, made.param = part, param
        made.storage_when_written = late_storage(form.nbytes, lambda: part.read(param))
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SAY_NO_VALUES:
            plain: Any = super().__torch_function__  # untyped in torch
            return plain(func, types, args, kwargs)
        return func(*tree_map_only(cls, _joined, args), **tree_map_only(cls, _joined, kwargs))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment] # of fewer arguments

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_streaming():
            return reduced(self.part.form_of(self.param), self.storage_when_written)
        return _joined(self).__reduce_ex__(protocol)


def _joined(late: LateWeight) -> Tensor:
    """Return the weight as a state dict has it, which shares its memory."""
    late.part.settle()
    return late.part.weight_of(late.param).detach()


class WithLateWeights(Settled):
    """Lets a state dict have weights that are not joined yet; what else uses them joins them."""

    def __init__(self, residence: Any) -> None:
        super().__init__(residence)
        self._made: dict[int, LateWeight] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = args[0] if args else None
        if func is Tensor.detach and isinstance(found, nn.Parameter):
            part = self._residence.part_of(found)
            if part is None or not (part.is_in_halves and part.is_split(found)):
                return found.detach()
            return self._made.setdefault(id(found), LateWeight(part, found))
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return self.call(caller, func, args, kwargs or {})


def lightning_module_state_dict(self: Any) -> Any:
    """Return weights that are joined when they are written; replaces that of a strategy."""
    residence = residence_of(self.lightning_module)
    method = previous_method(self, "lightning_module_state_dict")
    if residence is None:
        return method()
    residence.finish()
    with with_attribute([residence], "keeps_halves", True), WithLateWeights(residence):
        return method()
