"""Keep optimizer state in 8 bits."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.blocks import BlockSelector, as_selectors
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.techniques.low_bit_optimizer.bitsandbytes_optimizers import (
    build,
    find_obstacle,
    require_bitsandbytes,
)
from lightning_memsave.techniques.low_bit_optimizer.state_precision import (
    count_tensors,
    frozen_parameters,
    low_bit_state_bytes,
    parameter_names,
    reasons_for_32bit,
    torch_state_bytes,
    trained_parameters,
    why_unsuitable,
)
from lightning_memsave.techniques.muon import (
    check_settings,
    matrices_of,
    problems_of_strategy,
    problems_without_matrices,
)
from lightning_memsave.techniques.optimizer_kinds import (
    KIND_BY_WORD,
    MUON,
    OTHER_NAMES,
    Kind,
    find_kind,
    is_low_bit,
    set_groups,
    wrapper_problems,
)
from lightning_memsave.techniques.parameter_names import (
    problems_of_patterns,
    unmatched_patterns,
)
from lightning_memsave.units import format_bytes

SAME = ("8bit", "paged_8bit")
_NAMED = ("adamw", "adam", "lion", "sgd", "muon")
NAMES: tuple[str, ...] = (
    *SAME,
    *(f"{word}_8bit" for word in _NAMED),
    *(f"paged_{word}_8bit" for word in _NAMED if KIND_BY_WORD[word].paged_class_name),
)


def named_kind(optimizer: str) -> Kind | None:
    """Return the kind of a name such as ``"lion_8bit"``; ``None`` for those in ``SAME``."""
    return KIND_BY_WORD.get(optimizer.removeprefix("paged_").removesuffix("_8bit"))


def problems_of_name(optimizer: object) -> list[Problem]:
    """Check the setting ``optimizer``; return at most one problem."""
    if isinstance(optimizer, str) and optimizer in NAMES:
        return []
    is_class = isinstance(optimizer, type)
    cls: type = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(cls, Optimizer):
        what = "an optimizer class" if is_class else "an optimizer"
        why = f"it is {what}, not a setting: the optimizer is the one of `configure_optimizers`"
        fix = 'Return it there, and use `optimizer="8bit"` for its 8-bit form, or `optimizer=None`.'
        return [Problem(f"`optimizer={cls.__name__}{'' if is_class else '(...)'}`", why, fix)]
    known = (*NAMES, *OTHER_NAMES)
    what, choices = f"`optimizer={optimizer!r}`", ", ".join(f'"{name}"' for name in known)
    if optimizer == "paged_sgd_8bit":
        why, fix = "bitsandbytes has no paged SGD", 'Use "sgd_8bit".'
    else:
        why, fix = (
            "there is no such optimizer",
            f'Choose one of {choices}, "package:Class" for any other, or `None` to keep yours.',
        )
        spelled = str(optimizer).lower().replace("-", "_")
        close = difflib.get_close_matches(spelled, known, n=1)
        if close:
            fix = f'Did you mean "{close[0]}"? {fix}'
    return [Problem(what, why, fix)]


def problems_of_kwargs(optimizer: str, kwargs: object) -> list[Problem]:
    """Check ``optimizer_kwargs`` against the named optimizer; return all problems."""
    if not isinstance(kwargs, Mapping):
        what, why = f"`optimizer_kwargs={kwargs!r}`", "it must be a dict of settings"
        return [Problem(what, why, 'Write for example `optimizer_kwargs={"weight_decay": 0.1}`.')]
    kind = named_kind(optimizer)
    if kind is None:
        if not kwargs:
            return []
        why = f'`optimizer="{optimizer}"` keeps the settings of your own optimizer'
        fix = "Set them in `configure_optimizers`, or name an optimizer such as"
        return [Problem(f"`optimizer_kwargs={dict(kwargs)}`", why, f'{fix} "adamw_8bit".')]
    problems = []
    for key, value in kwargs.items():
        problem = _problem_of_value(kind, key, value)
        if problem is not None:
            problems.append(Problem(f"`optimizer_kwargs[{key!r}]={value!r}`", *problem))
    return problems


def _problem_of_value(kind: Kind, key: str, value: Any) -> tuple[str, str] | None:
    """Return why this setting is wrong, and what to do."""
    if key not in kind.defaults:
        return _problem_of_key(kind, key, value)
    default = kind.defaults[key]
    if key in MUON and kind.word == "muon":
        return _problem_of_muon(key, value, default)
    if isinstance(default, tuple):
        return _problem_of_betas(value, len(default))
    if not _is_number(value) or value < 0:
        return "it must be a number of at least 0", f"The default is {default}."
    if key == "momentum" and not 0 < value < 1:
        return "it must lie between 0 and 1", "Use for example 0.9."
    return None


def _problem_of_muon(key: str, value: Any, default: Any) -> tuple[str, str] | None:
    try:
        check_settings({key: value})
    except Exception as error:  # torch may raise anything
        return str(error), f"The default is {default!r}."
    return None


def _problem_of_key(kind: Kind, key: str, value: Any) -> tuple[str, str]:
    if key == "lr":
        why = "the learning rates are those of your own optimizer"
        return why, "Set them in `configure_optimizers`."
    if key == "min_8bit_size":
        return "it is a setting of its own", f"Write `LowBitOptimizer(..., min_8bit_size={value})`."
    close = difflib.get_close_matches(str(key), kind.defaults, n=1)
    hint = f"Did you mean `{close[0]}`? " if close else ""
    choices = ", ".join(kind.defaults)
    return f"{kind.name} has no such setting", f"{hint}Its settings are {choices}."


def _problem_of_betas(value: Any, length: int) -> tuple[str, str] | None:
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(numbers) == length and all(_is_number(b) and 0 <= b < 1 for b in numbers):
        return None
    return f"it must be {length} numbers from 0 to below 1", "Use for example (0.9, 0.999)."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, repr=False)
class LowBitOptimizer(Technique[torch.optim.Optimizer]):
    """Keep the state of the optimizer in 8 bits instead of 32.

    AdamW's state falls from 8 bytes per parameter to 2.03. The state is dequantized block by block
    inside the step, which costs no memory on a GPU.

    Args:
        optimizer: ``"8bit"`` is the 8-bit form of the given optimizer, with the same meaning of
            every setting; ``"paged_8bit"`` also lets CUDA move the state to host memory when the
            GPU is full. A name such as ``"lion_8bit"`` uses another optimizer for the same
            parameter groups: learning rates and weight decay are kept, ``betas``, ``eps`` and
            ``momentum`` if they have the same meaning in both optimizers.
        optimizer_kwargs: Settings of a named optimizer. ``weight_decay`` applies to groups without
            a value of their own.
        keep_32bit: Shell patterns (``fnmatch``) over names of parameters whose state stays 32-bit.
        force_8bit: Patterns over names of embeddings, norms, biases and other vectors whose state
            becomes 8-bit, too. ``keep_32bit`` has priority.
        min_8bit_size: Tensors with fewer elements stay 32-bit, as they would save next to nothing.
        min_saved_bytes: The optimizer stays unchanged if its whole state shrinks by less.
        blocks: The repeated blocks whose matrices ``"muon_8bit"`` updates by Muon, as for
            `NamedOptimizer`; ``None`` finds them in ``module``.
        module: Owner of the parameters, which tells names, embeddings and norms. Without it,
            vectors stay 32-bit, but embeddings do not.

    Raises:
        ConfigurationError: If arguments are invalid; the message lists all of them.

    Note:
        Exactness is *approximate*: monitor the loss. Optimizers without an equivalent 8-bit form
        (``amsgrad``, ``nesterov``, ``maximize``, unknown classes and subclasses) stay unchanged,
        with the reason in ``Handle.skipped``. The groups are shared with the given optimizer: use
        ``Handle.target`` from now on, and pass it to learning rate schedulers. Not for DTensor
        parameters, and not for an optimizer that has made steps already.

    Example:
        >>> model = nn.Linear(512, 512)
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> handle = LowBitOptimizer(module=model).apply(adamw)
        >>> print(*handle.changes)
        AdamW -> 8-bit AdamW: 1 of 2 tensors, optimizer state 2.00 MiB -> 526.00 KiB
        (kept 32-bit: 1 bias)

    References:
        Dettmers et al. (2022), 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """

    name: ClassVar[str] = "low_bit_optimizer"
    argument: ClassVar[str] = "optimizer"
    examples: ClassVar[str] = ""
    offers: ClassVar[tuple[Offer, ...]] = (
        Offer("8-bit optimizer", "8bit", "a separate kernel on a GPU, slower steps on a CPU"),
    )
    exactness: ClassVar[Exactness] = Exactness.APPROXIMATE
    requires: ClassVar[tuple[str, ...]] = ("bitsandbytes",)

    optimizer: str = "8bit"
    _: KW_ONLY
    optimizer_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)
    keep_32bit: tuple[str, ...] = ()
    force_8bit: tuple[str, ...] = ()
    min_8bit_size: int = 4096
    min_saved_bytes: int = 0
    blocks: BlockSelector | Sequence[BlockSelector] | None = None
    module: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = problems_of_name(self.optimizer)
        if not problems and self.optimizer_kwargs is not None:
            problems += problems_of_kwargs(self.optimizer, self.optimizer_kwargs)
        if not problems and self.optimizer_kwargs is not None:
            # A copy; YAML gives betas as a list.
            kwargs = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in self.optimizer_kwargs.items()
            }
            object.__setattr__(self, "optimizer_kwargs", kwargs)
        for setting in ("keep_32bit", "force_8bit"):
            wrong = problems_of_patterns(setting, getattr(self, setting))
            if not wrong:
                object.__setattr__(self, setting, tuple(getattr(self, setting)))
            problems += wrong
        if type(self.min_8bit_size) is not int or self.min_8bit_size < 1:
            what, why = f"`min_8bit_size={self.min_8bit_size!r}`", "it must be a number of elements"
            problems.append(Problem(what, f"{why}, at least 1", "Use 4096."))
        if problems:
            raise ConfigurationError.from_problems(type(self).__name__, problems)
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_selectors(self.blocks))

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse devices without kernels, and strategies that shard parameters."""
        problems = []
        if facts.device is not None and (obstacle := find_obstacle(facts.device)):
            problems.append(Problem(written, *obstacle))
        if facts.is_strategy("FSDPStrategy", "DeepSpeedStrategy"):
            why = f"`{facts.strategy}` shards parameters, and bitsandbytes has no kernels for that"
            if facts.is_strategy("DeepSpeedStrategy"):
                why = f"`{facts.strategy}` joins parameters, and their state would stay in 32 bits"
            fix = "Set `optimizer=None`; each rank holds only its share of the state anyway."
            problems.append(Problem(written, why, fix))
        if self._is_muon and not problems:
            problems += problems_of_strategy(facts, written)
        return problems

    def check(self, target: torch.optim.Optimizer) -> list[Problem]:
        """Find every reason why the optimizer cannot be replaced; changes nothing.

        An optimizer without an 8-bit form is not a problem: it stays unchanged.
        """
        if wrapped := wrapper_problems(target):
            return wrapped
        if isinstance(self._kind_for(target), str):
            return []
        problems, name = [], type(target).__name__
        if any(target.state.values()):
            why = "it has made steps already, and its state would be lost"
            fix = "Switch to 8 bits before the first step, or resume from a checkpoint."
            problems.append(Problem(f"`{name}` with state", why, fix))
        if self._is_muon:
            problems += problems_without_matrices(target, self._matrices())
        return problems + self._unmatched_patterns(target)

    @property
    def _is_muon(self) -> bool:
        return self.optimizer == "muon_8bit"

    def _matrices(self) -> set[torch.Tensor]:
        return matrices_of(self.module, self.blocks) if self._is_muon else set()

    def _apply(self, target: torch.optim.Optimizer) -> Handle[torch.optim.Optimizer]:
        kind = self._kind_for(target)
        if isinstance(kind, str):
            return Handle(target, (), (kind,))
        reasons = reasons_for_32bit(
            target, self.module, keep_32bit=self.keep_32bit, force_8bit=self.force_8bit
        )
        trained = trained_parameters(target)
        counts = count_tensors(reasons, trained, self.min_8bit_size)
        frozen = frozen_parameters(reasons, self.module)
        num_later = count_tensors(reasons, frozen, self.min_8bit_size)[""]
        named = named_kind(self.optimizer) is not None
        old_name = type(target).__name__
        if not named and not counts[""] and not num_later:
            return Handle(target, (), (f"`{old_name}` stays 32-bit: {_kept(counts)}",))
        in_8bit = [p for p in trained if not reasons[p] and p.numel() >= self.min_8bit_size]
        matrices = self._matrices()
        after = low_bit_state_bytes(kind, trained, in_8bit, matrices)
        saved = (torch_state_bytes(target) or 0) - after
        if self.min_saved_bytes > max(saved, 0):
            why = (
                f"8 bits would save {format_bytes(max(saved, 0))}; less than "
                f"{format_bytes(self.min_saved_bytes)}, a segment of CUDA's allocator, need not "
                "change whether a run fits"
            )
            return Handle(target, (), (f"`{old_name}` stays 32-bit: {why}",))

        require_bitsandbytes(target)
        on_gpu = any(p.device.type != "cpu" for p in trained)
        new = build(
            kind,
            target,
            bits_by_param={param: 32 if why else 8 for param, why in reasons.items()},
            min_8bit_size=self.min_8bit_size,
            paged=self.optimizer.startswith("paged") and on_gpu,
            shown_name=kind.name if named else old_name,
            matrices=matrices,
        )
        undo = []
        if named:
            new.defaults, restore = set_groups(target, kind, self.optimizer_kwargs or {})
            undo.append(lambda: restore(new))
        change = self._describe(target, new, kind, counts, num_later)
        return Handle(new, (change,), undo=undo)

    def _describe(
        self,
        old: torch.optim.Optimizer,
        new: torch.optim.Optimizer,
        kind: Kind,
        counts: Mapping[str, int],
        num_later: int,
    ) -> str:
        trained = trained_parameters(new)
        in_8bit = [p for p in trained if new.uses_8bit(p)]  # type: ignore[attr-defined]
        old_name, new_name = type(old).__name__, kind.name
        matrices: set[torch.Tensor] = getattr(new, "muon_matrices", set())
        if named_kind(self.optimizer) is None:
            new_name = f"8-bit {old_name}"
        elif matrices:
            num = len(matrices.intersection(trained))
            new_name += f" for {num} matrices of blocks, {kind.class_name} for the rest"
        notes = [f"kept 32-bit: {_kept(counts)}"] if len(in_8bit) < len(trained) else []
        if num_later:
            s, verb = ("", "gets") if num_later == 1 else ("s", "get")
            notes.append(f"{num_later} frozen tensor{s} {verb} 8-bit state once trained")
        if self.optimizer.startswith("paged") and not new.is_paged:  # type: ignore[attr-defined]
            why = "the parameters are on the CPU"
            if kind.paged_class_name is None:
                why = f"bitsandbytes has no paged {old_name}"
            notes.append(f"not paged: {why}")
        before = torch_state_bytes(old)
        shrinks = "" if before is None else f"{format_bytes(before)} -> "
        after = format_bytes(low_bit_state_bytes(kind, trained, in_8bit, matrices))
        remarks = f" ({'; '.join(notes)})" if notes else ""
        return (
            f"{old_name} -> {new_name}: {len(in_8bit)} of {len(trained)} tensors, "
            f"optimizer state {shrinks}{after}{remarks}"
        )

    def _kind_for(self, target: torch.optim.Optimizer) -> Kind | str:
        found = find_kind(target)
        named = named_kind(self.optimizer)
        is_done = is_low_bit(target) or type(target).__module__.startswith("bitsandbytes.")
        if is_done or (named is None and isinstance(found, str)):
            return found
        why = why_unsuitable(target, self.module)
        if why is None and named is not None:
            why = _why_not_replaced(target)
        if why is not None:
            return f"`{type(target).__name__}` stays unchanged: {why}"
        return found if named is None else named

    def _unmatched_patterns(self, target: torch.optim.Optimizer) -> list[Problem]:
        names = sorted({n for own in parameter_names(target, self.module).values() for n in own})
        settings = ("keep_32bit", "force_8bit")
        return [
            problem
            for setting in settings
            for problem in unmatched_patterns(setting, getattr(self, setting), names)
        ]


def _why_not_replaced(optimizer: torch.optim.Optimizer) -> str | None:
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), float | int):
            return "its learning rate is not a number"
        if group.get("maximize"):
            return "it has `maximize=True`, and bitsandbytes only minimizes"
        trained = [p for p in group["params"] if p.requires_grad]
        if any(p.dtype.itemsize > 4 or p.is_complex() for p in trained):
            return "bitsandbytes computes in 32 bits"
    return None


def _kept(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {why}" for why, n in sorted(counts.items()) if why) or "no parameters"
