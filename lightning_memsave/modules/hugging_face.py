"""Find the task of a Hugging Face config, name or folder, and create the model."""

import contextlib
import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_memsave.core.versions import require_transformers
from lightning_memsave.errors import ConfigurationError, Problem


def only_plain(memsave: Mapping[str, Any] | str | None) -> Any:
    """Leave out values that ``weights_only=True`` cannot load, such as technique objects."""
    if not isinstance(memsave, Mapping):
        return memsave
    return {name: value for name, value in memsave.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str)


_MAPPINGS = {
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
_CLASSES = {
    "masked_lm": "AutoModelForMaskedLM",
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}
TASKS = tuple(_MAPPINGS)
"""Tasks of `CheckpointedTransformer` without a subclass."""

_HOW = (
    "Use a config of transformers, a dictionary such as `config.to_dict()`, a name or a local "
    "folder, or subclass and set `self.model`."
)


@dataclass(frozen=True, slots=True)
class Recipe:
    config: Any
    task: str
    weights: str | None = None
    model: Any = None

    def build(self) -> nn.Module:
        if self.model is not None:
            model = self.model
        elif self.weights is None:
            with _explained(f"no model can be created from `{type(self.config).__name__}`"):
                model = _auto(_CLASSES[self.task]).from_config(self.config, dtype=torch.float32)
        else:
            model = self._load(self.weights)
        return model.train()  # type: ignore[no-any-return] # transformers says nothing

    def plain_config(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        attention = getattr(self.config, "_attn_implementation", None)
        if attention is not None:  # changes results by rounding; `to_json_string` drops it
            plain["attn_implementation"] = attention
        # A folder of this machine means nothing elsewhere.
        plain.pop("_name_or_path", None)
        return plain

    def _load(self, weights: str) -> Any:
        cls = _class_for(self.task, self.config)
        with _explained(f"`model={weights!r}` cannot be loaded as `{cls.__name__}`"):
            return cls.from_pretrained(weights, config=self.config, dtype=torch.float32)


def read_recipe(
    model: object, task: str | None, num_labels: int | None
) -> tuple[Recipe | None, list[Problem]]:
    """Read the arguments that describe a model; loads nothing but the config."""
    try:
        config = _read_config(model)
    except ConfigurationError as error:
        return None, [Problem("`model`", str(error), _HOW)]
    given: Any = model if isinstance(model, nn.Module) else None
    if num_labels is not None and given is None:
        config.num_labels = num_labels
    architectures = [type(given).__name__] if given is not None else config.architectures or []
    chosen = task or _infer_task(architectures)
    if chosen is None:
        return None, [_no_task(config, architectures)]
    problems = _task_problems(config, chosen)
    if given is not None and not problems:
        problems = _model_problems(given, chosen, num_labels)
    weights = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    return Recipe(config, chosen, weights, given), problems


def _read_config(model: object) -> Any:
    require_transformers("`model`")
    from transformers import AutoConfig, PretrainedConfig, PreTrainedModel  # noqa: PLC0415

    if isinstance(model, PreTrainedModel):
        return model.config
    if isinstance(model, PretrainedConfig):
        return copy.deepcopy(model)
    if isinstance(model, str | os.PathLike):
        with _explained(f"the config of {os.fspath(model)!r} cannot be loaded"):
            return AutoConfig.from_pretrained(model)
    if isinstance(model, Mapping):
        if "model_type" not in model:
            raise ConfigurationError("the dictionary has no `model_type`")
        with _explained("the dictionary is not a valid config"):
            return AutoConfig.for_model(**copy.deepcopy(dict(model)))
    raise ConfigurationError(f"it is a `{type(model).__name__}`")


def _infer_task(architectures: list[str]) -> str | None:
    for task, mapping in _MAPPINGS.items():
        classes = _auto(f"{mapping}_NAMES").values()
        names = {n for c in classes for n in ([c] if isinstance(c, str) else c)}
        if names.intersection(architectures):
            return task
    return None


def _no_task(config: Any, architectures: list[str]) -> Problem:
    possible = [task for task in TASKS if not _task_problems(config, task)]
    said = f"its architectures are {architectures}" if architectures else "it names no architecture"
    options = " or ".join(f'`task="{task}"`' for task in possible)
    return Problem(
        f"the task of `{type(config).__name__}`",
        f"{said}, so it cannot be inferred ({', '.join(TASKS)})",
        f"Use {options}." if options else "Subclass and set `self.model`.",
    )


def _task_problems(config: Any, task: str) -> list[Problem]:
    if type(config) not in _auto(_MAPPINGS[task]):
        why = f"transformers has no such model for `{type(config).__name__}`"
        fix = "Use another task, or subclass and set `self.model`."
        return [Problem(f"`task={task!r}`", why, fix)]
    if task != "sequence_classification":
        return []
    is_single_label = config.problem_type in (None, "single_label_classification")
    if config.num_labels > 1 and is_single_label:
        return []
    what = f"`num_labels={config.num_labels}` with `problem_type={config.problem_type!r}`"
    why = "without a subclass only single-label classification with two or more classes works"
    fix = "Use `num_labels=2` or more, or subclass and write your own `training_step`."
    return [Problem(what, why, fix)]


def _model_problems(model: Any, task: str, num_labels: int | None) -> list[Problem]:
    cls, expected, problems = type(model), _class_for(task, model.config), []
    if cls is not expected:
        why = f"for {task} a checkpoint is loaded as `{expected.__name__}`"
        fix = "Use a model of that class, or subclass and set `self.model`."
        problems.append(Problem(f"`model` is a `{cls.__name__}`", why, fix))
    if num_labels is not None:
        what = f"`num_labels={num_labels}`"
        fix = "Use a config as `model`, or remove `num_labels`."
        problems.append(Problem(what, "the model already has a number of labels", fix))
    return problems


def _class_for(task: str, config: Any) -> Any:
    cls = _auto(_MAPPINGS[task])[type(config)]
    # Some configs have several classes; the first is the default.
    return cls[0] if isinstance(cls, tuple) else cls


def _auto(name: str) -> Any:
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    return getattr(modeling_auto, name)


@contextlib.contextmanager
def _explained(what: str) -> Any:
    try:
        yield
    except ConfigurationError:
        raise
    # transformers and its hub client raise many classes, down to plain `TypeError`.
    except Exception as error:
        raise ConfigurationError(f"{what} ({type(error).__name__}: {error})") from error
