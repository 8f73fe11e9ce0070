"""Arguments of `CheckpointedTransformer`, checked all at once."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.modules._hugging_face import TASKS, Recipe, read_recipe
from lightning_memsave.modules._optimization import SCHEDULES
from lightning_memsave.modules.mixins import make_callback

_FIXES = {
    "learning_rate": "Use a number above 0 such as `learning_rate=5e-5`.",
    "weight_decay": "Use 0.0 for none, or for example `weight_decay=0.01`.",
    "betas": "Use two numbers from 0 up to 1, such as `betas=(0.9, 0.999)`.",
    "eps": "Use a number above 0 such as `eps=1e-8`.",
    "lr_schedule": f"Use {' or '.join(map(repr, SCHEDULES))}.",
    "warmup": "Use a whole number of optimizer steps, or a share such as `warmup=0.1`.",
    "max_steps": "Use a whole number of optimizer steps, or `None` to ask the Trainer.",
    "num_labels": "Use the number of classes, at least 2, or `None` to ask the config. One label "
    "is regression in transformers: subclass and write your own `training_step` for it.",
    "stable_embedding": "Use `True` or `False`.",
    "task": f"Use {' or '.join(map(repr, TASKS))}, or `None` to ask the config.",
}


def check_arguments(owner: str, arguments: Mapping[str, Any]) -> Recipe | None:
    """Check every argument, and find out what model is meant.

    Args:
        owner: Name of the class whose arguments they are, for the message.
        arguments: All of them by name.

    Returns:
        How to make the model; ``None`` if a subclass makes it.

    Raises:
        ConfigurationError: If any argument is wrong; the message lists every problem.
    """
    wrong = set(_wrong(arguments))
    problems: list[Problem | str] = [
        Problem(f"`{name}={arguments[name]!r}`", "that is not possible", _FIXES[name])
        for name in arguments
        if name in wrong
    ]
    recipe = None
    if arguments["model"] is not None:
        names = ("task", "num_labels", "stable_embedding")
        known = {n: None if n in wrong else arguments[n] for n in names}
        recipe, found = read_recipe(
            arguments["model"],
            known["task"],
            known["num_labels"],
            bool(known["stable_embedding"]),
        )
        # What a wrong task or number of labels leads to is no problem of its own.
        problems += [] if wrong.intersection(names) else found
    elif arguments["stable_embedding"] is True or arguments["num_labels"] is not None:
        problems.append(
            Problem(
                "`stable_embedding` and `num_labels` without `model`",
                "they say how to make the model, and a subclass makes its own",
                "Remove them, or pass `model`.",
            )
        )
    problems += _memsave_problems(arguments["memsave"])
    if problems:
        error = ConfigurationError.from_problems(owner, problems)
        raise error
    return recipe


def _wrong(arguments: Mapping[str, Any]) -> Iterator[str]:
    allowed: dict[str, Callable[[Any], bool]] = {
        "learning_rate": lambda value: _is_number(value) and value > 0,
        "weight_decay": lambda value: _is_number(value) and value >= 0,
        "betas": _are_betas,
        "eps": lambda value: _is_number(value) and value > 0,
        "lr_schedule": lambda value: value in (*SCHEDULES,),
        "warmup": _is_warmup,
        "max_steps": lambda value: value is None or _is_count(value, 1),
        "num_labels": lambda value: value is None or _is_count(value, 2),
        "stable_embedding": lambda value: isinstance(value, bool),
        "task": lambda value: value in (None, *TASKS),
    }
    return (name for name, is_allowed in allowed.items() if not is_allowed(arguments[name]))


def _are_betas(value: Any) -> bool:
    is_pair = isinstance(value, Sequence) and len(value) == 2
    return is_pair and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


def _is_warmup(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value < 1)


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _memsave_problems(memsave: object) -> list[Problem | str]:
    if memsave in ("auto", None):
        return []
    if not isinstance(memsave, Mapping):
        fix = 'Use a dictionary such as `memsave={"optimizer": None}`, `None`, or `"auto"`.'
        return [Problem(f"`memsave={memsave!r}`", "it is not a dictionary", fix)]
    known = inspect.signature(MemSaveCallback).parameters
    unknown = [name for name in memsave if name not in known]
    if unknown:
        names = ", ".join(f"`{name}`" for name in known)
        why = f"`MemSaveCallback` has no argument {', '.join(map(repr, unknown))}"
        return [Problem("`memsave`", why, f"Its arguments are {names}.")]
    try:
        make_callback(dict(memsave))
    except ConfigurationError as error:
        return [f"`memsave`: {error}"]
    return []
