"""What a user may write for ``LowBitOptimizer``, and what is wrong with what was written."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_memsave.errors import Problem
from lightning_memsave.techniques._optimizers.kinds import KIND_BY_WORD, Kind

SAME = ("8bit", "paged_8bit")
_NAMED = ("adamw", "adam", "lion", "sgd", "ademamix")
NAMES: tuple[str, ...] = (
    *SAME,
    *(f"{word}_8bit" for word in _NAMED),
    *(f"paged_{word}_8bit" for word in _NAMED if KIND_BY_WORD[word].paged_class_name),
)


def named_kind(optimizer: str) -> Kind | None:
    """Look up the optimizer that a setting names.

    Args:
        optimizer: One of ``NAMES``.

    Returns:
        The kind, or ``None`` for the 8-bit form of the optimizer that is there.
    """
    return KIND_BY_WORD.get(optimizer.removeprefix("paged_").removesuffix("_8bit"))


def problems_of_name(optimizer: object) -> list[Problem]:
    """Check the setting ``optimizer``.

    Args:
        optimizer: What the user wrote.

    Returns:
        At most one problem.
    """
    if isinstance(optimizer, str) and optimizer in NAMES:
        return []
    is_class = isinstance(optimizer, type)
    cls: type = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(cls, Optimizer):
        what = "an optimizer class" if is_class else "an optimizer"
        why = f"it is {what}, and the one that is changed is what `configure_optimizers` returns"
        fix = 'Return it there, and use `optimizer="8bit"` for its 8-bit form, or `optimizer=None`.'
        return [Problem(f"`optimizer={cls.__name__}{'' if is_class else '(...)'}`", why, fix)]
    what, choices = f"`optimizer={optimizer!r}`", ", ".join(f'"{name}"' for name in NAMES)
    if optimizer == "paged_sgd_8bit":
        why, fix = "bitsandbytes has no paged SGD", 'Use "sgd_8bit".'
    else:
        why, fix = "there is no such 8-bit optimizer", f"Choose one of {choices}."
        spelled = str(optimizer).lower().replace("-", "_")
        close = difflib.get_close_matches(spelled, NAMES, n=1)
        if close:
            fix = f'Did you mean "{close[0]}"? {fix}'
    return [Problem(what, why, fix)]


def problems_of_kwargs(optimizer: str, kwargs: object) -> list[Problem]:
    """Check ``optimizer_kwargs`` against the optimizer that is named.

    Args:
        optimizer: One of ``NAMES``.
        kwargs: What the user wrote.

    Returns:
        All problems.
    """
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


def problems_of_patterns(setting: str, patterns: object) -> list[Problem]:
    """Check ``keep_32bit`` or ``force_8bit``.

    Args:
        setting: Its name.
        patterns: What the user wrote.

    Returns:
        At most one problem.
    """
    if isinstance(patterns, str):
        return [
            Problem(
                f"`{setting}={patterns!r}`",
                "it must be a tuple of name patterns",
                f"Write `{setting}=({patterns!r},)`.",
            )
        ]
    if isinstance(patterns, Sequence) and all(isinstance(p, str) and p for p in patterns):
        return []
    fix = f'Write for example `{setting}=("*.lm_head.weight",)`.'
    return [Problem(f"`{setting}={patterns!r}`", "it must be a tuple of name patterns", fix)]


def _problem_of_value(kind: Kind, key: str, value: Any) -> tuple[str, str] | None:
    """Return why this setting is wrong, and what to do."""
    if key not in kind.defaults:
        return _problem_of_key(kind, key, value)
    default = kind.defaults[key]
    if isinstance(default, tuple):
        return _problem_of_betas(value, len(default))
    if value is None and default is None:
        return None
    if not _is_number(value) or value < 0:
        return "it must be a number of at least 0", f"The default is {default}."
    if key == "momentum" and not 0 < value < 1:
        return "it must lie between 0 and 1", "Use for example 0.9."
    return None


def _problem_of_key(kind: Kind, key: str, value: Any) -> tuple[str, str]:
    if key == "lr":
        why = "the learning rates are those of your own optimizer"
        return why, "Set them in `configure_optimizers`."
    if key == "min_8bit_size":
        return "it is a setting of its own", f"Write `LowBitOptimizer(..., min_8bit_size={value})`."
    close = difflib.get_close_matches(key, kind.defaults, n=1)
    hint = f"Did you mean `{close[0]}`? " if close else ""
    return f"{kind.class_name} has no such setting", f"{hint}It takes {', '.join(kind.defaults)}."


def _problem_of_betas(value: Any, length: int) -> tuple[str, str] | None:
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(numbers) == length and all(_is_number(b) and 0 <= b < 1 for b in numbers):
        return None
    example = (0.9, 0.999, 0.9999)[:length]
    return f"it must be {length} numbers from 0 to below 1", f"Use for example {example}."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
