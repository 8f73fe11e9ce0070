"""Construct Hugging Face models from a config, without weights."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_memsave.core.names import did_you_mean
from lightning_memsave.core.versions import require_transformers
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.fake.tensors import allow_construction
from lightning_memsave.prediction.user_code import explained

# Suffix of "AutoModelFor", and the task in the name of transformers' mapping.
TASK_NAMES = {
    "masked_lm": ("MaskedLM", "MASKED_LM"),
    "causal_lm": ("CausalLM", "CAUSAL_LM"),
    "seq2seq_lm": ("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    "sequence_classification": ("SequenceClassification", "SEQUENCE_CLASSIFICATION"),
    "token_classification": ("TokenClassification", "TOKEN_CLASSIFICATION"),
    "question_answering": ("QuestionAnswering", "QUESTION_ANSWERING"),
    "multiple_choice": ("MultipleChoice", "MULTIPLE_CHOICE"),
    "image_classification": ("ImageClassification", "IMAGE_CLASSIFICATION"),
    "semantic_segmentation": ("SemanticSegmentation", "SEMANTIC_SEGMENTATION"),
}
TASKS = tuple(TASK_NAMES)
"""Tasks of Hugging Face models whose inputs are known."""

# Optional values of configs.
_NEVER_ABSENT = ("attn_implementation", "decoder_start_token_id", "pad_token_id")
_NAME_PREFIX = "hf:"


def read_config(source: str, arguments: Mapping[str, Any]) -> Any:
    require_transformers(f"The config `{source}`")
    from transformers import AutoConfig  # noqa: PLC0415

    if source.startswith(_NAME_PREFIX):
        name = source.removeprefix(_NAME_PREFIX)
        with explained(
            f"Reading the config of `{name}`",
            "Check the name and the network, or download its config.json and pass that file.",
        ):
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            found = config.to_dict()
    else:
        found = _read_json(Path(source))
        _check_model_type(source, found)
    with explained(f"Reading `{source}`", "Check that its values fit this `model_type`."):
        plain = AutoConfig.for_model(**copy.deepcopy(found))
        _check_names(source, plain, arguments)
        return AutoConfig.for_model(**copy.deepcopy(found) | dict(arguments))


def maker_of_config(source: str, config: Any, task: str | None) -> Callable[[], nn.Module]:
    cls = _class_of_task(config, task) if task else _class_of_config(source, config)

    def make() -> nn.Module:
        with explained(f"Constructing `{cls.__name__}` from `{source}`", "Check its values."):
            with allow_construction():
                model = cls._from_config(copy.deepcopy(config), dtype=torch.float32)
            result: nn.Module = model.train()
            return result

    return make


def _class_of_config(source: str, config: Any) -> Any:
    import transformers  # noqa: PLC0415

    architectures = config.architectures or []
    for name in architectures:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    said = f"names {', '.join(architectures)}, which transformers does not have"
    options = [task for task in TASKS if _classes(config, task)]
    raise ConfigurationError(
        f"`{source}` {said if architectures else 'names no architecture'}. "
        f"Use {' or '.join(f'`--task {task}`' for task in options) or '`module:Class`'}."
    )


def _class_of_task(config: Any, task: str) -> Any:
    if task not in TASK_NAMES:
        fix = did_you_mean(task, TASKS) or f"Use {' or '.join(f'`{name}`' for name in TASKS)}."
        raise ConfigurationError(f"`task={task!r}` is not a known task. {fix.strip()}")
    classes = _classes(config, task)
    if not classes:
        options = [other for other in TASKS if _classes(config, other)]
        raise ConfigurationError(
            f"transformers has no model for `task={task!r}` with `{type(config).__name__}`. Use "
            f"{' or '.join(f'`{name}`' for name in options) or 'another config'}."
        )
    return classes[0]


def _classes(config: Any, task: str) -> tuple[Any, ...]:
    import transformers  # noqa: PLC0415

    mapping = getattr(transformers, f"AutoModelFor{TASK_NAMES[task][0]}")._model_mapping
    if type(config) not in mapping:
        return ()
    found = mapping[type(config)]
    return found if isinstance(found, tuple) else (found,)


def _read_json(path: Path) -> Any:
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=_without_kernels)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigurationError(
            f"`{path}` cannot be read as JSON ({error}). Pass a config.json written by "
            "`config.save_pretrained`."
        ) from error


# With the package `kernels`, transformers would download and run them.
def _without_kernels(found: dict[str, Any]) -> dict[str, Any]:
    for key, value in found.items():
        if key.endswith("attn_implementation") and "/" in str(value):
            raise ConfigurationError(
                f"`{key}` names {value!r}, code on the Hub, which is not run. Remove it from the "
                "config, or name the code that you trust: `module:Class`."
            )
    return found


def _check_model_type(source: str, found: Any) -> None:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415

    if not isinstance(found, dict) or "model_type" not in found:
        raise ConfigurationError(
            f"`{source}` has no `model_type`, so it is not a Hugging Face config. Pass one written "
            "by `config.save_pretrained`, or name the code: `module:Class`."
        )
    kind = str(found["model_type"])
    if kind in CONFIG_MAPPING:
        return
    options = did_you_mean(kind, CONFIG_MAPPING.keys())
    own = "It has its own code, which is not run. " if "auto_map" in found else ""
    raise ConfigurationError(
        f"`{source}` has `model_type={kind!r}`, which this version of transformers does not have. "
        f"{own}{options}Otherwise name the code: `module:Class`."
    )


def _check_names(source: str, config: Any, arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        if name in _NEVER_ABSENT or hasattr(config, name):
            continue
        fix = did_you_mean(name, config.to_dict()).strip() or "Remove it."
        raise ConfigurationError(f"`{source}` has no `{name}` to change. {fix}")
