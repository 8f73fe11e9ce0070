"""Use another optimizer, by its name, for the groups of the configured one."""

import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.core.blocks import BlockSelector, as_selectors
from lightning_memsave.core.names import did_you_mean
from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.core.technique import Exactness, Handle, Technique
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.techniques.muon import (
    matrices_of,
    problems_of_strategy,
    problems_without_matrices,
)
from lightning_memsave.techniques.named_optimizer.optimizers import OWN, _MuonWithAdamW
from lightning_memsave.techniques.optimizer_kinds import (
    EACH_ALONE,
    STATE_KEYS,
    is_of_torch,
    wrapper_problems,
)
from lightning_memsave.techniques.optimizer_step import (
    double_of,
    initialize_state,
    show_steps,
    step_without_hooks,
    take_hooks,
    updates_each_alone,
)
from lightning_memsave.techniques.tried import (
    is_each_alone,
    state_bytes_of_matrix,
)
from lightning_memsave.units import format_bytes

_OF_ADAM = ("betas", "eps", "fused", "foreach")
_REFUSED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")
_EXAMPLE = 'Write for example `optimizer="torch.optim:NAdam"`.'


@dataclass(frozen=True, repr=False)
class NamedOptimizer(Technique[Optimizer]):
    """Use another optimizer for the parameters of the given one.

    Groups keep learning rates, weight decay and keys of their own, and schedulers go on with the
    new optimizer; all else is a default of the new class, unless it is in ``optimizer_kwargs``.

    ``"muon"`` is one optimizer: torch's Muon for the matrices of blocks, its AdamW for the rest,
    with one learning rate and weight decay for both (``adjust_lr_fn="match_rms_adamw"``).
    ``"adamw_bf16_state"`` is torch's AdamW, fused on a CPU and on CUDA, that keeps its moments in
    bfloat16: 4 bytes per parameter. Both keep ``betas`` and ``eps`` of an Adam.

    Args:
        optimizer: ``"muon"``, ``"adamw_bf16_state"``, or ``"package:Class"`` for any subclass of
            torch's ``Optimizer``.
        optimizer_kwargs: Arguments of the class, without ``lr``. ``weight_decay`` applies to groups
            without a value of their own.
        blocks: The repeated blocks whose matrices Muon updates, as for `ActivationCheckpointing`;
            ``None`` finds them.
        module: Owner of the parameters, in which ``"muon"`` finds blocks.

    Raises:
        ConfigurationError: If arguments are invalid; the message lists all of them.

    Note:
        Exactness is *approximate*: it is another optimizer. With it, training is bit for bit that
        of a project whose ``configure_optimizers`` returns this optimizer; with ``"muon"``, of
        torch's two optimizers that make their steps one after the other. Offloaded on CUDA, this
        holds for every class that updates each parameter alone, which is found by trying it on
        small ones. Others, which depend on all gradients or on random numbers, the host updates
        with its own rounding, as it finds the norm for clipping. The groups are shared
        with the given optimizer: use ``Handle.target`` from now on, and pass it to learning rate
        schedulers. Not for an optimizer that has made steps already.

    Example:
        >>> model = nn.Linear(512, 512)
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> handle = NamedOptimizer("torch.optim:RMSprop").apply(adamw)
        >>> print(*handle.changes)
        AdamW -> RMSprop: optimizer state 2.00 MiB -> 1.00 MiB

    References:
        Liu et al. (2025), Muon is Scalable for LLM Training, arXiv:2502.16982.
    """

    name: ClassVar[str] = "named_optimizer"
    argument: ClassVar[str] = "optimizer"
    examples: ClassVar[str] = ""
    exactness: ClassVar[Exactness] = Exactness.APPROXIMATE

    optimizer: str
    _: KW_ONLY
    optimizer_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)
    blocks: BlockSelector | Sequence[BlockSelector] | None = None
    module: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigurationError.from_problems(type(self).__name__, problems)
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_selectors(self.blocks))

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Convert a name or ``"package:Class"``; ``None`` for what is another technique's."""
        is_own = isinstance(value, str) and (value in OWN or ":" in value)
        return cls(value) if is_own else value if isinstance(value, cls) else None

    @functools.cached_property
    def state_bytes(self) -> int | None:
        """Bytes of state of a class for an element of a float32 matrix; ``None`` if unknown."""
        if self.optimizer in OWN:
            return None
        made: Any = find_class(self.optimizer)
        return state_bytes_of_matrix(functools.partial(made, **(self.optimizer_kwargs or {})))

    def _problems(self) -> list[Problem]:
        kwargs, made = self.optimizer_kwargs, find_class(self.optimizer)
        if isinstance(made, Problem):
            return [made]
        if kwargs is not None and not isinstance(kwargs, Mapping):
            what, why = f"`optimizer_kwargs={kwargs!r}`", "it must be a dict of settings"  # type: ignore[unreachable]
            fix = 'Write for example `optimizer_kwargs={"weight_decay": 0.1}`.'
            return [Problem(what, why, fix)]
        # A copy; YAML gives betas as a list.
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in (kwargs or {}).items()}
        if kwargs is not None:
            object.__setattr__(self, "optimizer_kwargs", settings)
        return _problems_of_settings(made, settings)

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse Muon where processes have parts of matrices, or of the model."""
        return problems_of_strategy(facts, written) if self.optimizer == "muon" else []

    def check(self, target: Optimizer) -> list[Problem]:
        """Find every reason why the optimizer cannot be replaced; changes nothing."""
        if wrapped := wrapper_problems(target):
            return wrapped
        problems, name = [], type(target).__name__
        if any(target.state.values()):
            why = "it has made steps already, and its state would be lost"
            fix = "Name the optimizer before the first step, or resume from a checkpoint."
            problems.append(Problem(f"`{name}` with state", why, fix))
        if self.optimizer not in OWN:
            return problems
        given = [f for f in _REFUSED_FLAGS if any(group.get(f) for group in target.param_groups)]
        if given:
            what = f"`{name}({', '.join(f'{flag}=True' for flag in given)})`"
            why = f'`optimizer="{self.optimizer}"` has no such setting'
            problems.append(Problem(what, why, "Leave it out of `configure_optimizers`."))
        if self.optimizer == "muon":
            problems += problems_without_matrices(target, self._matrices())
        return problems

    def _matrices(self) -> set[torch.Tensor]:
        return matrices_of(self.module, self.blocks)

    def _apply(self, target: Optimizer) -> Handle[Optimizer]:
        made = find_class(self.optimizer)
        assert not isinstance(made, Problem), "the constructor has found it"
        if type(target) is made and not self.optimizer_kwargs:
            return Handle(target, (), (f"the optimizer is a `{made.__name__}` already",))
        kwargs, old_name = dict(self.optimizer_kwargs or {}), type(target).__name__
        settings = _defaults_of(made, kwargs)
        before = _bytes_of(_state_before(target))
        decays = any(group.get("weight_decay") for group in target.param_groups)
        is_lost = decays and "weight_decay" not in settings
        is_similar = self.optimizer in OWN and isinstance(target, torch.optim.Adam)
        kept = {"lr", "weight_decay"} & settings.keys() | {*(_OF_ADAM if is_similar else ())}
        kept -= kwargs.keys()
        restore = _prepare_groups(target, settings, kept)
        own = {name: value for name, value in target.defaults.items() if name in kept}
        make: Any = functools.partial(made, **_known(made, own), **kwargs)
        try:
            new: Optimizer = make(target.param_groups)
        except Exception as error:
            restore()
            fix = "Use an optimizer that takes these parameters, or set `optimizer=None`."
            problem = Problem(f"`optimizer={self.optimizer!r}`", _said(error), fix)
            raise IncompatibleError(self.name, [problem]) from error
        if isinstance(new, _MuonWithAdamW):
            new.muon_matrices = self._matrices()
        take_hooks(new, target)
        state = _state_after_a_step(make, new)
        vars(new)[STATE_KEYS] = {frozenset(own) for own in (state or {}).values()}
        vars(new)[EACH_ALONE] = updates_each_alone(new) or is_each_alone(make, new)
        after = _bytes_of(state)
        if after == 0 and self.state_bytes:  # it has seen that there are no values
            after = None
        sizes = [format_bytes(size) for size in (before, after) if size is not None]
        change = f"{old_name} -> {self._describe(new)}"
        if after is not None:
            change += f": optimizer state {' -> '.join(sizes)}"
        lost = f"`{made.__name__}` has no weight decay" if is_lost else ""

        def undo() -> None:
            # It may still be saved after this, with the settings that it trained with.
            new.param_groups = [dict(group) for group in new.param_groups]
            restore()

        return Handle(new, (change,), filter(None, (lost,)), [undo, show_steps(new)])

    def _describe(self, new: Optimizer) -> str:
        if not isinstance(new, _MuonWithAdamW):
            return type(new).__name__
        params = [param for param in parameters_of(new) if param.requires_grad]
        num = len(new.muon_matrices.intersection(params))
        return f"Muon for {num} matrices of blocks, AdamW for {len(params) - num} other tensors"


def find_class(path: object) -> type[Optimizer] | Problem:
    """Find a class by its name, or by ``"package:Class"``; give what is wrong with that."""
    if own := OWN.get(path if isinstance(path, str) else ""):
        return own
    what = f"`optimizer={path!r}`"
    where, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not (where and name):
        return Problem(what, "it is not the name of a package and a class in it", _EXAMPLE)
    try:
        module = importlib.import_module(where)
    except Exception as error:  # the package may do anything
        fix = "Check its name; modules of the current folder are found with `PYTHONPATH=.`."
        return Problem(what, f"`{where}` cannot be imported ({_said(error)})", fix)
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, Optimizer):
        return found
    if found is not None:
        return Problem(what, "it is not a subclass of `torch.optim.Optimizer`", _EXAMPLE)
    known = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Optimizer)]
    fix = did_you_mean(name, known, prefix=f"{where}:") or _EXAMPLE
    return Problem(what, f"`{where}` has no `{name}`", fix.strip())


def _problems_of_settings(made: type[Optimizer], settings: Mapping[str, Any]) -> list[Problem]:
    own = inspect.signature(made).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in own.values())
    known = [name for name in own if name not in ("self", "params", "lr")]
    problems = []
    for key, value in settings.items():
        what = f"`optimizer_kwargs[{key!r}]={value!r}`"
        if key == "lr":
            why = "the learning rates are those of your own optimizer"
            problems.append(Problem(what, why, "Set them in `configure_optimizers`."))
        elif key not in known and not takes_any:
            fix = f"{did_you_mean(str(key), known)}Its settings are {', '.join(known)}."
            problems.append(Problem(what, f"{made.__name__} has no such setting", fix))
    if problems:
        return problems
    try:
        _defaults_of(made, settings)
    except Exception as error:  # the class may raise anything
        fix = "Check `optimizer_kwargs`; they are the arguments of the class."
        return [Problem(f"`{made.__name__}`", f"it cannot be made: {_said(error)}", fix)]
    return []


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _known(made: type[Optimizer], settings: Mapping[str, Any]) -> dict[str, Any]:
    names = inspect.signature(made).parameters
    return {name: value for name, value in settings.items() if name in names}


def _defaults_of(made: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Make the optimizer for one parameter, to see its settings."""
    with _disable_current_modes():
        param = nn.Parameter(torch.zeros(2, 2, device="cpu", dtype=torch.float32))
        found: dict[str, Any] = made([param], **_known(made, {"lr": 1e-3}), **kwargs).defaults
    return found


def _prepare_groups(
    target: Optimizer, settings: Mapping[str, Any], kept: Set[str]
) -> Callable[[], None]:
    """Leave in groups what the new optimizer has, too; give what takes that back."""
    before = [(group, dict(group)) for group in target.param_groups]
    usual = target.defaults.get("weight_decay")
    for group in target.param_groups:
        is_own = "weight_decay" in settings and group.get("weight_decay") != usual
        for key in target.defaults.keys() - kept - ({"weight_decay"} if is_own else set()):
            group.pop(key, None)

    def restore() -> None:
        for group, was in before:
            group.clear()
            group.update(was)

    return restore


State = Mapping[Any, Mapping[str, Any]]


def _state_after_a_step(
    make: Callable[[list[dict[str, Any]]], Optimizer], like: Optimizer
) -> State | None:
    """Give the state that a step makes, by one of parameters without data.

    ``None`` for an optimizer that needs values, as for ``item()``.
    """
    with _disable_current_modes():
        trained = [param for param in parameters_of(like) if param.requires_grad]
        empty: dict[Any, Any] = {param: _without_data(param) for param in trained}
        groups = [
            {**group, "params": [empty[p] for p in group["params"] if p in empty], "fused": None}
            for group in like.param_groups
        ]
        try:
            double = make(groups)
            if isinstance(like, _MuonWithAdamW) and isinstance(double, _MuonWithAdamW):
                double.muon_matrices = {empty[param] for param in like.muon_matrices & empty.keys()}
            with torch.no_grad():
                _make_state(double)
        except Exception:  # whatever needs data, or a kernel for it
            return None
        found: dict[Any, Any] = double.state  # in which some keep numbers of all parameters
        return {key: own for key, own in found.items() if isinstance(key, torch.Tensor)}


def _make_state(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Adafactor):
        step_without_hooks(optimizer)
        return
    for group in optimizer.param_groups:  # its step needs values, but not for its state
        initialize_state(optimizer, group, group["params"])


def _state_before(optimizer: Optimizer) -> State | None:
    if not is_of_torch(optimizer):  # a step may change anything
        return None
    return _state_after_a_step(
        lambda groups: double_of(optimizer, groups, defaultdict(dict)), optimizer
    )


def _bytes_of(state: State | None) -> int | None:
    if state is None:
        return None
    values = [value for own in state.values() for value in own.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _without_data(param: torch.Tensor) -> nn.Parameter:
    found = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"))
    found.grad = torch.empty_like(found)
    return found
