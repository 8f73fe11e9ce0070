"""Hugging Face configs, names and folders: what task they are for, and how to make the model."""

import contextlib
import copy
import inspect
import json
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_memsave.errors import ConfigurationError, Problem


class PlainHyperparameters:
    """Keeps plain values in the place of arguments that are none, in front of a LightningModule."""

    _plain: dict[str, Any]

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of a subclass; those that are ours stay saved as plain values.

        Args:
            args: As for any LightningModule.
            ignore: As for any LightningModule.
            frame: As for any LightningModule.
            logger: As for any LightningModule.
        """
        ignored = [ignore] if isinstance(ignore, str) else [*(ignore or ())]
        theirs = [a for a in args if not isinstance(a, str) or a not in self._plain]
        if theirs or not args:
            save = cast(Any, super()).save_hyperparameters
            frame = frame or _caller()
            save(*theirs, ignore=[*ignored, *self._plain], frame=frame, logger=logger)
        self._save_plain({n: v for n, v in self._plain.items() if n not in ignored}, logger)

    def _save_plain(self, plain: dict[str, Any], logger: bool = True) -> None:
        self._plain = plain
        # Lightning compares the dictionary with all arguments above the frame: there are none.
        frame = cast(types.FrameType, inspect.currentframe())
        while frame.f_back is not None:
            frame = frame.f_back
        cast(Any, super()).save_hyperparameters(plain, frame=frame, logger=logger)


def _caller() -> types.FrameType | None:
    of_caller = cast(types.FrameType, inspect.currentframe()).f_back
    return cast(types.FrameType, of_caller).f_back


def only_plain(memsave: Mapping[str, Any] | str | None) -> Any:
    """Leave out what cannot be loaded with ``weights_only=True``, such as technique objects.

    Args:
        memsave: Arguments of `MemSaveCallback`, or a word for all of them.

    Returns:
        The same without values that are no numbers, strings, or lists and dictionaries of those.
    """
    if not isinstance(memsave, Mapping):
        return memsave
    return {name: value for name, value in memsave.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str)


class StableEmbedding(nn.Embedding):
    """A token embedding with Xavier uniform weights and a LayerNorm behind it.

    It keeps large gradients of rare tokens from upsetting low-bit optimizer states, for one
    activation of the size of the embedded batch. The norm stands before position embeddings are
    added.

    Args:
        embedding: The embedding whose sizes and settings it takes, not the weights.

    Note:
        The norm is part of the model: its ``weight`` and ``bias`` are in ``state_dict``.

    References:
        Dettmers et al. (2022), 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        weight = embedding.weight
        super().__init__(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            max_norm=embedding.max_norm,
            norm_type=embedding.norm_type,
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            sparse=embedding.sparse,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.norm = nn.LayerNorm(self.embedding_dim, device=weight.device, dtype=weight.dtype)
        nn.init.xavier_uniform_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].fill_(0.0)

    def forward(self, input: Tensor) -> Tensor:
        """Embed and normalise.

        Args:
            input: Tokens of any shape.

        Returns:
            One vector per token.
        """
        vectors: Tensor = self.norm(super().forward(input))
        return vectors


def install(model: Any) -> None:
    """Put a stable embedding in the place of a Hugging Face model's token embedding.

    Args:
        model: The model, for which `embedding_problems` found nothing.
    """
    model.set_input_embeddings(StableEmbedding(model.get_input_embeddings()))
    model.tie_weights()  # the head goes on sharing the weight


def has_stable_embedding(model: Any) -> bool:
    """Say whether a model's token embedding is a stable one.

    Args:
        model: A Hugging Face model.

    Returns:
        True after `install`, and in copies.
    """
    return isinstance(model.get_input_embeddings(), StableEmbedding)


def embedding_problems(model: Any) -> list[Problem]:
    """Find out why a model's token embedding cannot be a stable one.

    Args:
        model: A Hugging Face model.

    Returns:
        All problems.
    """
    embedding = model.get_input_embeddings()
    if type(embedding) is nn.Embedding:
        return []
    return [
        Problem(
            "`stable_embedding=True`",
            f"the token embedding of `{type(model).__name__}` is a "
            f"`{type(embedding).__name__}`, which does more than to look up vectors",
            "Use `stable_embedding=False`.",
        )
    ]


_MAPPINGS = {
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
TASKS = tuple(_MAPPINGS)
"""What `CheckpointedTransformer` can do by itself."""

_HOW = (
    "Use a config of transformers, a dictionary such as `config.to_dict()`, a name or a local "
    "folder, or subclass and set `self.model`."
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that is needed to make a model.

    Args:
        config: Hugging Face config, a copy.
        task: One of `TASKS`.
        weights: Name or folder to take weights from; ``None`` for random ones.
        stable_embedding: Whether the token embedding is a `StableEmbedding`.
        model: The model itself, if it was given.
    """

    config: Any
    task: str
    weights: str | None = None
    stable_embedding: bool = False
    model: Any = None

    def build(self) -> nn.Module:
        """Make the model, in float32 and in training mode.

        Returns:
            A Hugging Face model.

        Raises:
            ConfigurationError: If it cannot be made or loaded.
        """
        if self.model is not None:
            model = self.model
        elif self.weights is None:
            with _explained(f"a model cannot be made from `{type(self.config).__name__}`"):
                model = _class_for(self.task, self.config)._from_config(
                    self.config, dtype=torch.float32
                )
            if self.stable_embedding:
                _refuse(embedding_problems(model))
                install(model)
        else:
            model = self._load(self.weights)
        return model.train()  # type: ignore[no-any-return] # transformers says nothing

    def plain_config(self) -> dict[str, Any]:
        """Write the config with plain values only, as checkpoints need it.

        Returns:
            What `recipe_for` reads.
        """
        plain: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        attention = getattr(self.config, "_attn_implementation", None)
        if attention is not None:  # it can move numbers by rounding, and `to_json_string` drops it
            plain["attn_implementation"] = attention
        # Names and folders of this machine, which nobody needs elsewhere.
        plain.pop("_name_or_path", None)
        return plain

    def _load(self, weights: str) -> Any:
        cls = _class_for(self.task, self.config)
        loaded_as = _with_stable_embedding(cls) if self.stable_embedding else cls
        with _explained(f"`model={weights!r}` cannot be loaded as `{cls.__name__}`"):
            model, info = loaded_as.from_pretrained(
                weights, config=self.config, dtype=torch.float32, output_loading_info=True
            )
        model.__class__ = cls
        model.config.architectures = [cls.__name__]
        _refuse(self._norm_problems(weights, model, info))
        return model

    # The LayerNorm is trained with the rest: without its weights, or with them left out, the model
    # would compute something else than it was trained for.
    def _norm_problems(self, weights: str, model: Any, info: Mapping[str, Any]) -> list[Problem]:
        embedding = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is embedding)
        norm = f"{name}.norm.weight"
        if self.stable_embedding and norm in info["missing_keys"]:
            why = f"the weights of {weights!r} were trained without its LayerNorm"
            fix = "Use `stable_embedding=False`, or a config in place of the weights."
        elif not self.stable_embedding and norm in info["unexpected_keys"]:
            why = f"the weights of {weights!r} were trained with its LayerNorm"
            fix = "Use `stable_embedding=True`."
        else:
            return []
        return [Problem(f"`stable_embedding={self.stable_embedding}`", why, fix)]


def read_recipe(
    model: object, task: str | None, num_labels: int | None, stable_embedding: bool
) -> tuple[Recipe | None, list[Problem]]:
    """Find out what model is meant; nothing is built or loaded but the config.

    Args:
        model: Config, dictionary, name, folder, or a Hugging Face model.
        task: One of `TASKS`, or ``None`` to infer it from the architectures in the config.
        num_labels: Classes, if it is not the config that says.
        stable_embedding: Whether one is wanted.

    Returns:
        The recipe, or ``None`` and all problems.
    """
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
        problems = _model_problems(given, chosen, num_labels, stable_embedding)
        stable_embedding = has_stable_embedding(given)
    weights = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    return Recipe(config, chosen, weights, stable_embedding, given), problems


def _read_config(model: object) -> Any:
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
        with _explained("the dictionary is no config"):
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
        f"{said}, which is none of {', '.join(TASKS)}",
        f"Use {options}." if options else "Subclass and set `self.model`.",
    )


def _task_problems(config: Any, task: str) -> list[Problem]:
    if type(config) not in _auto(_MAPPINGS[task]):
        return [
            Problem(
                f"`task={task!r}`",
                f"transformers has no such model for `{type(config).__name__}`",
                "Use another task, or subclass and set `self.model`.",
            )
        ]
    if task != "sequence_classification":
        return []
    is_single_label = config.problem_type in (None, "single_label_classification")
    if config.num_labels > 1 and is_single_label:
        return []
    return [
        Problem(
            f"`num_labels={config.num_labels}` with `problem_type={config.problem_type!r}`",
            "only classification with one of several labels has a loss and an accuracy here",
            "Use `num_labels=2` or more, or subclass and write your own `training_step`.",
        )
    ]


def _model_problems(
    model: Any, task: str, num_labels: int | None, stable_embedding: bool
) -> list[Problem]:
    cls, expected, problems = type(model), _class_for(task, model.config), []
    if cls is not expected:
        why = f"for {task} a checkpoint would be loaded into a `{expected.__name__}`"
        fix = "Use one of that class, or subclass and set `self.model`."
        problems.append(Problem(f"`model` is a `{cls.__name__}`", why, fix))
    if num_labels is not None:
        what = f"`num_labels={num_labels}`"
        fix = "Use a config as `model`, or remove `num_labels`."
        problems.append(Problem(what, "the model has its labels already", fix))
    if stable_embedding and not has_stable_embedding(model):
        why, fix = "the model was made without", "Use a config as `model`, or `False`."
        problems.append(Problem("`stable_embedding=True`", why, fix))
    return problems


def _class_for(task: str, config: Any) -> Any:
    cls = _auto(_MAPPINGS[task])[type(config)]
    # Some configs have several classes, first the one that is meant by default.
    return cls[0] if isinstance(cls, tuple) else cls


def _auto(name: str) -> Any:
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    return getattr(modeling_auto, name)


# Loading goes through a class with the norm, so that transformers finds a place for its weights.
def _with_stable_embedding(cls: Any) -> Any:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        cls.__init__(self, config, *args, **kwargs)
        _refuse(embedding_problems(self))
        install(self)

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigurationError.from_problems("CheckpointedTransformer", problems)


@contextlib.contextmanager
def _explained(what: str) -> Any:
    try:
        yield
    except ConfigurationError:
        raise
    # transformers and its hub client raise many classes, down to plain `TypeError`.
    except Exception as error:
        raise ConfigurationError(f"{what} ({type(error).__name__}: {error})") from error
