"""bitsandbytes optimizers with 8 or 32 bits per parameter, imported on first use."""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.errors import IncompatibleError, MissingDependencyError, Problem
from lightning_memsave.techniques.low_bit_optimizer.muon_momentum import MatricesByMuon
from lightning_memsave.techniques.low_bit_optimizer.package import (
    INSTALL,
    find_wrong_version,
    import_bitsandbytes,
    in_order,
    unusable,
)
from lightning_memsave.techniques.low_bit_optimizer.sharded import are_sharded, local_shard
from lightning_memsave.techniques.low_bit_optimizer.state import (
    local_state_dict,
    sharded_state_dict,
)
from lightning_memsave.techniques.low_bit_optimizer.state_checks import (
    check_states,
    reading,
)
from lightning_memsave.techniques.optimizer_kinds import (
    KIND_BY_WORD,
    MIN_PAGED_NUMEL,
    PAGED_STATES,
    Kind,
)
from lightning_memsave.techniques.optimizer_step import initialize, take_hooks


def update_all(optimizer: Any) -> None:
    """Update every parameter that has a gradient.

    bitsandbytes synchronizes with the GPU after each parameter. All its kernels and page copies run
    on CUDA's default stream, so it is enough to synchronize that stream with the current one. Only
    for paged state, which the host may read at once, the host waits.
    """
    initialize(optimizer)
    paged_on = set()
    for group_index, group in enumerate(optimizer.param_groups):
        for param_index, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            is_new = not optimizer.state[param]
            with in_order(param.device), local_shard(optimizer, param) as local:
                if is_new:
                    optimizer.init_state(group, local, group_index, param_index)
                if not local.numel():  # of a parameter with fewer rows than there are processes
                    continue
                optimizer.prefetch_state(local)
                optimizer.update_step(group, local, group_index, param_index)
            if optimizer.is_paged and param.device.type == "cuda":
                paged_on.add(param.device)
                # The host writes to new pages; some systems forbid that while a kernel runs.
                if is_new:
                    torch.cuda.synchronize(param.device)
    for device in paged_on:
        torch.cuda.synchronize(device)


if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object

# Undocumented names that are used, in addition to those that `_try_step` tests.
_PRIVATE_NAMES = {
    "bitsandbytes.functional": (
        "GlobalPageManager",
        "QuantState",
        "create_dynamic_map",
        "dequantize_blockwise",
        "get_paged",
        "optimizer_update_32bit",
        "quantize_blockwise",
    ),
    "bitsandbytes.optim.optimizer": ("GlobalOptimManager", "Optimizer1State", "Optimizer2State"),
}
_PRIVATE_METHODS = (
    "check_overrides",
    "get_config",
    "get_state_buffer",
    "init_state",
    "prefetch_state",
    "to_gpu",
    "update_step",
)
_NOT_COPIED = {"mng", "page_mng", "step"}


class _PerParameterBits(_Base):
    """Mixin for bitsandbytes classes: number of bits per parameter, and torch's group settings.

    Groups keep the names of torch's class (``momentum``, not ``betas``, for SGD), so that
    schedulers, loggers and user code still find them.
    """

    memsave_kind: str
    memsave_class_name: str
    min_8bit_size: int
    couples_weight_decay: bool
    bits_by_param: dict[torch.Tensor, int]
    is_paged: bool
    mng: object
    page_mng: Any

    def uses_8bit(self, param: torch.Tensor) -> bool:
        if param.numel() < self.min_8bit_size:
            return False
        # Parameters from `add_param_group` are not in the table.
        return self.bits_by_param.get(param, 8 if param.ndim > 1 else 32) == 8

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Not `super().step`, which synchronizes with the GPU after each parameter.
        with torch.no_grad():
            update_all(self)
        return loss

    # Learning rate schedulers check this mark and `_opt_called`. Without the mark they would set a
    # closure on the instance, which cannot be pickled.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def check_overrides(self) -> None:
        """Ignore bitsandbytes' process-wide overrides."""

    def get_config(
        self, group_index: int, param_index: int, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        param = self.param_groups[group_index]["params"][param_index]
        family = KIND_BY_WORD[self.memsave_kind].family
        betas = {"momentum": ("momentum",), "rmsprop": ("alpha",)}.get(family)
        is_8bit = self.uses_8bit(param)
        return {
            "betas": group["betas"] if betas is None else (group[betas[0]], 0.0),
            "eps": group["eps"] if family not in {"lion", "momentum"} else 0.0,
            "weight_decay": 0.0 if self._couples(group) else group["weight_decay"],
            "lr": float(group["lr"]),
            "alpha": 0.0,
            "t_alpha": None,
            "t_beta3": None,
            "optim_bits": 8 if is_8bit else 32,
            "min_8bit_size": 0 if is_8bit else self.min_8bit_size,  # a shard may be smaller
            "max_unorm": 0.0,
            "skip_zeros": False,
        }

    def init_state(
        self, group: dict[str, Any], p: torch.Tensor, group_index: int, param_index: int
    ) -> None:
        # The kernels assume contiguous memory; the state gets the parameter's strides.
        p.data = p.data.contiguous()
        super().init_state(group, p, group_index, param_index)  # type: ignore[misc]

    def update_step(
        self, group: dict[str, Any], p: torch.Tensor, group_index: int, param_index: int
    ) -> None:
        _check_gradient(p)
        if self._lacks_kernel(p, group_index, param_index):
            self._update_in_float32(group, p, group_index, param_index)
            return
        if not self._couples(group) or group["weight_decay"] == 0:
            super().update_step(group, p, group_index, param_index)  # type: ignore[misc]
            return
        # torch's Adam adds weight decay to the gradient; bitsandbytes' Adam shrinks the parameter.
        # One parameter at a time, to avoid a second copy of all gradients.
        grad = p.grad
        assert grad is not None, "bitsandbytes only comes here with a gradient"
        try:
            p.grad = grad.add(p, alpha=group["weight_decay"])
            super().update_step(group, p, group_index, param_index)  # type: ignore[misc]
        finally:
            p.grad = grad

    def state_dict(self) -> dict[str, Any]:
        state_dict: dict[str, Any] = super().state_dict()
        state_dict["state"] = {key: {**own} for key, own in state_dict["state"].items()}
        if not are_sharded(parameters_of(self)):
            return state_dict
        return sharded_state_dict(self, state_dict)

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        with reading():
            saved, own = (
                [len(g["params"]) for g in groups]
                for groups in (state_dict["param_groups"], self.param_groups)
            )
            if saved == own:  # otherwise bitsandbytes raises torch's error
                check_states(state_dict, self.param_groups)
        if are_sharded(parameters_of(self)):
            state_dict = local_state_dict(self, state_dict)
        # A paged state may be larger than the GPU: it is copied from the host to its pages.
        super().load_state_dict(  # type: ignore[call-arg]
            state_dict, move_to_device and not self.is_paged
        )
        if self.is_paged:
            self._page_all()
        shared: dict[Any, torch.Tensor] = {}  # each loaded state has tables of 256 values
        for state in self.state.values():
            for key in state.keys() & {"qmap1", "qmap2"}:
                state[key] = shared.setdefault((key, state[key].device), state[key])

    def prefetch_state(self, p: torch.Tensor) -> None:
        """Prefetch the state, after moving state from a checkpoint back to pages."""
        if self.is_paged and p.device.type != "cpu":
            for key in PAGED_STATES:
                self._page(p, key)
        super().prefetch_state(p)  # type: ignore[misc]

    def __repr__(self) -> str:
        return super().__repr__().replace(" (", " (8-bit)(", 1)

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in vars(self).items() if k not in _NOT_COPIED}
        # Own parameters only: a copy of this optimizer must not copy a frozen model.
        own = {*parameters_of(self)}
        kept["bits_by_param"] = {p: n for p, n in self.bits_by_param.items() if p in own}
        return {k: v for k, v in kept.items() if not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        states = {param: _state_of_parameter(own) for param, own in self.state.items()}
        self.state = defaultdict(_state_of_parameter, states)
        if "mng" not in vars(self):  # a copy, not the end of `load_state_dict`
            from bitsandbytes.functional import GlobalPageManager  # noqa: PLC0415
            from bitsandbytes.optim.optimizer import GlobalOptimManager  # noqa: PLC0415

            self.mng = GlobalOptimManager.get_instance()
            self.page_mng = GlobalPageManager.get_instance()
            self._forget_pages()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is created at run time, so pickle cannot find it by name.
        args = (self.memsave_kind, self.memsave_class_name, type(self).__name__)
        return _empty, args, self.__getstate__()

    def _couples(self, group: Mapping[str, Any]) -> bool:
        return self.couples_weight_decay and not group.get("decoupled_weight_decay", False)

    def _lacks_kernel(self, p: torch.Tensor, group_index: int, param_index: int) -> bool:
        # bitsandbytes' CUDA kernels for one 32-bit state support bfloat16 for Lion only.
        return (
            p.is_cuda
            and p.dtype == torch.bfloat16
            and KIND_BY_WORD[self.memsave_kind].family in {"momentum", "rmsprop"}
            and not self.uses_8bit(self.param_groups[group_index]["params"][param_index])
        )

    def _update_in_float32(
        self, group: dict[str, Any], p: torch.Tensor, group_index: int, param_index: int
    ) -> None:
        import bitsandbytes.functional as F  # noqa: N812, PLC0415

        config, state = self.get_config(group_index, param_index, group), self.state[p]
        state["step"] += 1
        assert p.grad is not None, "bitsandbytes only comes here with a gradient"
        p_float = p.data.contiguous().float()
        F.optimizer_update_32bit(
            KIND_BY_WORD[self.memsave_kind].family,
            p.grad.contiguous().float(),
            p_float,
            state["state1"],
            config["betas"][0],
            config["eps"],
            state["step"],
            config["lr"],
            weight_decay=config["weight_decay"],
        )
        p.data.copy_(p_float)

    def _forget_pages(self) -> None:
        """Copies and files of paged state say that they are paged, but are not; CUDA ends then."""
        for state in self.state.values():
            for value in state.values():
                if getattr(value, "is_paged", False):
                    del value.is_paged

    def _page_all(self) -> None:
        self._forget_pages()
        for p in parameters_of(self):
            if p.device.type == "cpu" or p not in self.state:
                continue
            for key in PAGED_STATES:
                self._page(p, key)
            for key, value in self.state[p].items():
                if isinstance(value, torch.Tensor) and not getattr(value, "is_paged", False):
                    self.state[p][key] = value.to(p.device)

    def _page(self, p: torch.Tensor, key: str) -> None:
        import bitsandbytes.functional as F  # noqa: N812, PLC0415

        tensor = self.state[p].get(key)
        if tensor is None or p.numel() < MIN_PAGED_NUMEL or getattr(tensor, "is_paged", False):
            return
        paged = F.get_paged(*tensor.shape, dtype=tensor.dtype, device=p.device)
        paged.copy_(tensor)
        self.page_mng.paged_tensors.append(paged)
        self.state[p][key] = paged


def _state_of_parameter(own: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    return defaultdict(_refuse_other_names, own)


def _refuse_other_names() -> Any:
    what = "optimizer state under a name of torch's optimizers, such as `exp_avg`"
    why = "8-bit moments are `state1` and `state2`, with scales in `absmax1` and `absmax2`"
    fix = "Set `optimizer=None` where code reads or changes state."
    raise IncompatibleError("low_bit_optimizer", [Problem(what, why, fix)])


def find_obstacle(device: torch.device) -> tuple[str, str] | None:
    """Return why bitsandbytes cannot run on a device, and what to do about it."""
    if device.type not in ("cpu", "cuda"):
        return f"8-bit optimizers are not tested on {device.type}", "Set `optimizer=None`."
    why = find_wrong_version()
    # For a CPU the import, which needs seconds, can wait until an optimizer is made.
    if why is None and device.type == "cuda":
        try:
            import_bitsandbytes("8-bit optimizer state")
            why = _find_lost_library() or find_changed_names()
        except MissingDependencyError as error:
            why = f"bitsandbytes cannot be imported ({error.__cause__})"
    return None if why is None else (why, f"{INSTALL}, or set `optimizer=None`.")


# Kernels assume, without a check, that parameter and gradient have the same type.
def _check_gradient(param: torch.Tensor) -> None:
    grad = param.grad
    if grad is None or grad.dtype == param.dtype:
        return
    why = f"it is {param.dtype} and its gradient {grad.dtype}; bitsandbytes' kernels need the same "
    fix = "Set `low_precision_weights=None` if the forward pass replaces weights; otherwise cast "
    fix += "gradients to the type of their parameters, or apply "
    fix += "`LowPrecisionWeights().round_updates(optimizer)`."
    problem = Problem(f"a parameter of shape {tuple(param.shape)}", f"{why}type", fix)
    raise IncompatibleError("low_bit_optimizer", [problem])


# Without its library, importing bitsandbytes succeeds and the first kernel raises.
def _find_lost_library() -> str | None:
    import bitsandbytes.cextension  # noqa: PLC0415

    library = bitsandbytes.cextension.lib
    if "ErrorHandlerMock" not in type(library).__name__:
        return None
    first = str(getattr(library, "error_msg", "")).partition("\n")[0]
    return (
        f"bitsandbytes' CUDA library cannot be loaded ({first}); `python -m bitsandbytes` says more"
    )


@functools.cache
def find_changed_names() -> str | None:
    """Describe how bitsandbytes' undocumented names differ from the tested versions, if they do."""
    missing = [
        f"{module}.{name}"
        for module, names in _PRIVATE_NAMES.items()
        for name in names
        if not hasattr(importlib.import_module(module), name)
    ]
    if not missing:
        from bitsandbytes.optim.optimizer import Optimizer2State  # noqa: PLC0415

        missing = [
            f"Optimizer2State.{n}" for n in _PRIVATE_METHODS if not hasattr(Optimizer2State, n)
        ]
    error = None if missing else _try_step()
    if not missing and error is None:
        return None
    what = f"{', '.join(missing)} is missing" if missing else f"a step on the CPU fails ({error})"
    return f"version {importlib.metadata.version('bitsandbytes')} is not supported: {what}"


def _try_step() -> str | None:
    kind = KIND_BY_WORD["adamw"]
    with _disable_current_modes():
        param = torch.nn.Parameter(torch.zeros(4096, device="cpu", dtype=torch.float32))
        adamw = torch.optim.AdamW([param], lr=0.5)
        param.grad = torch.ones_like(param)
        try:
            settings: Any = {"paged": False, "shown_name": "AdamW", "min_8bit_size": 4096}
            new = build(kind, adamw, bits_by_param={param: 8}, **settings)
            new.step()
            keys = new.state[param].keys()
        except (AttributeError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
    expected = {"step", *(f"{key}{i}" for key in ("state", "absmax", "qmap") for i in (1, 2))}
    return None if keys == expected else f"its state is {', '.join(sorted(keys))}"


@functools.cache
def low_bit_class(kind_word: str, class_name: str, shown_name: str) -> type[_PerParameterBits]:
    base = getattr(import_bitsandbytes('optimizer="8bit"').optim, class_name)
    namespace = {
        "__module__": __name__,
        "__qualname__": f"low_bit_class.<locals>.{shown_name}",
        "memsave_kind": kind_word,
        "memsave_class_name": class_name,
    }
    mixins = (MatricesByMuon, _PerParameterBits) if kind_word == "muon" else (_PerParameterBits,)
    return type(shown_name, (*mixins, base), namespace)


def require_bitsandbytes(optimizer: torch.optim.Optimizer) -> None:
    import_bitsandbytes('optimizer="8bit"')
    on_gpu = any(p.is_cuda for p in parameters_of(optimizer))
    why = (on_gpu and _find_lost_library()) or find_changed_names()
    if why:
        raise unusable('optimizer="8bit"', why)


def build(
    kind: Kind,
    optimizer: torch.optim.Optimizer,
    *,
    bits_by_param: Mapping[torch.Tensor, int],
    min_8bit_size: int,
    paged: bool,
    shown_name: str,
    matrices: Set[torch.Tensor] = frozenset(),
) -> torch.optim.Optimizer:
    class_name = kind.paged_class_name if paged and kind.paged_class_name else kind.class_name
    cls: Any = low_bit_class(kind.word, class_name, shown_name)
    momentum = {"momentum": 0.9} if kind.word == "sgd" else {}
    # With a dummy parameter: the constructor would write bitsandbytes' own keys into the groups.
    new = cls([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, **momentum)
    new.state = defaultdict(_state_of_parameter)
    new.param_groups = list(optimizer.param_groups)
    new.defaults = dict(optimizer.defaults)
    new.min_8bit_size = min_8bit_size
    new.couples_weight_decay = kind.word == "adam"
    new.bits_by_param = dict(bits_by_param)
    if kind.word == "muon":
        new.muon_matrices = {*matrices}
    take_hooks(new, optimizer)
    result: torch.optim.Optimizer = new
    return result


def _empty(kind_word: str, class_name: str, shown_name: str) -> _PerParameterBits:
    cls = low_bit_class(kind_word, class_name, shown_name)
    return cls.__new__(cls)
