"""A LightningModule for transformers, with or without a subclass."""

import inspect
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.modules.hugging_face import TASKS, Recipe, only_plain, read_recipe
from lightning_memsave.modules.mixins import MemSaveMixin, everything_off
from lightning_memsave.modules.steps import SCHEDULES, TransformerSteps, make_metrics

_FIXES = {
    "learning_rate": "Use a number above 0 such as `learning_rate=5e-5`.",
    "weight_decay": "Use 0.0 for none, or for example `weight_decay=0.01`.",
    "betas": "Use two numbers from 0 up to 1, such as `betas=(0.9, 0.999)`.",
    "eps": "Use a number above 0 such as `eps=1e-8`.",
    "lr_schedule": f"Use {' or '.join(map(repr, SCHEDULES))}.",
    "warmup": "Use a whole number of optimizer steps, or a share such as `warmup=0.1`.",
    "max_steps": "Use a whole number of optimizer steps, or `None` for that of the Trainer.",
    "num_labels": "Use the number of classes, at least 2, or `None` for that of the config. One "
    "label is regression in transformers: subclass and write your own `training_step` for it.",
    "task": f"Use {' or '.join(map(repr, TASKS))}, or `None` to infer it from the config.",
}


def check_arguments(owner: str, arguments: Mapping[str, Any]) -> Recipe | None:
    """Check all arguments; returns how to make the model, or ``None`` if a subclass makes it."""
    wrong = set(_wrong(arguments))
    problems: list[Problem | str] = [
        Problem(f"`{name}={arguments[name]!r}`", "it is not a valid value", _FIXES[name])
        for name in arguments
        if name in wrong
    ]
    recipe = None
    if arguments["model"] is not None:
        names = ("task", "num_labels")
        task, num_labels = (None if n in wrong else arguments[n] for n in names)
        recipe, found = read_recipe(arguments["model"], task, num_labels)
        # Problems that follow from a wrong task or number of labels are not listed.
        problems += [] if wrong.intersection(names) else found
    elif arguments["num_labels"] is not None:
        problems.append(
            Problem(
                "`num_labels` without `model`",
                "it configures the model, but a subclass makes its own",
                "Remove it, or pass `model`.",
            )
        )
    problems += _memsave_problems(arguments["memsave"])
    if problems:
        raise ConfigurationError.from_problems(owner, problems)
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
    try:
        MemSaveCallback(**memsave)
    except ConfigurationError as error:
        return [f"`memsave`: {error}"]
    return []


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Task = Literal["masked_lm", "causal_lm", "sequence_classification"]


class CheckpointedTransformerMixin(MemSaveMixin, TransformerSteps):
    """A LightningModule that trains a transformer with little memory, with or without a subclass.

    It adds its own `MemSaveCallback`, with the settings in ``memsave``: by default activations of
    all blocks are recomputed, optimizer state is 8-bit, and so on. A `MemSaveCallback` in the
    Trainer overrides it. ``CheckpointedTransformer`` is this mixin with ``LightningModule``.

    **Without a subclass**, pass a Hugging Face config, dictionary, name, local folder or model. It
    trains masked and causal language models and sequence classifiers on batches that are
    dictionaries with ``labels``. **In a subclass**, omit ``model``, set ``self.model`` after
    ``super().__init__()``, and write ``training_step``; optimizer and schedule are built in.

    | logged                           | when       | what                                        |
    |----------------------------------|------------|---------------------------------------------|
    | ``train_loss``                   | each step  | loss of the batch                           |
    | ``train_perplexity``             | each epoch | language models: exp of mean loss per token |
    | ``val_loss``, ``test_loss``      | each epoch | mean over tokens, or over samples           |
    | ``val_perplexity``, ``test_...`` | each epoch | language models: exp of that loss           |
    | ``val_accuracy``, ``test_...``   | each epoch | share of tokens or samples predicted        |

    AdamW applies weight decay to all weights except norms, biases and embeddings. A head that
    shares the embedding's weight counts as an embedding.

    Args:
        model: The model to train. A name or folder has pretrained weights, a config gets random
            ones. ``None`` if a subclass sets ``self.model``.
        task: ``None`` infers it from the config's architectures.
        num_labels: Number of classes; ``None`` uses that of the config.
        learning_rate: Highest learning rate of the schedule.
        weight_decay: Weight decay of AdamW.
        betas: Betas of AdamW.
        eps: Epsilon of AdamW.
        lr_schedule: After the warm-up, ``"linear"`` or ``"cosine"`` down to zero, or
            ``"constant"``.
        warmup: Optimizer steps in which the learning rate rises from zero; a ``float`` below 1 is
            a fraction of all steps.
        max_steps: Optimizer steps of the schedule; ``None`` uses those of the Trainer.
        memsave: Arguments of `MemSaveCallback` by name; the others have their defaults. ``"auto"``
            is all defaults, ``None`` is no callback.

    Raises:
        ConfigurationError: If arguments are wrong; the message lists all of them.

    Note:
        Hyper-parameters are saved with the config as a plain dictionary, so that checkpoints load
        with ``weights_only=True`` and ``load_from_checkpoint`` needs neither network nor folder.
        Only plain values of ``memsave`` are saved. Weights are float32 unless you pass a model; use
        ``precision`` for mixed precision. In training, logits are not kept after the loss.

    Example:
        >>> from transformers import BertConfig
        >>> from lightning_memsave import CheckpointedTransformer
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...     intermediate_size=32)
        >>> lit = CheckpointedTransformer(
        ...     config, task="masked_lm", memsave={"activation_checkpointing": 1})
        >>> type(lit.model).__name__, lit.configure_callbacks()
        ('BertForMaskedLM', [MemSaveCallback(activation_checkpointing=1)])

    References:
        Chen et al. (2016), Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
        Dettmers et al. (2022), 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """

    def __init__(
        self,
        model: "dict[str, Any] | str | os.PathLike[str] | PretrainedConfig | PreTrainedModel | None" = None,  # noqa: E501
        *,
        task: Task | None = None,
        num_labels: int | None = None,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        lr_schedule: Literal["linear", "cosine", "constant"] = "linear",
        warmup: int | float = 0.1,
        max_steps: int | None = None,
        memsave: dict[str, Any] | Literal["auto"] | None = "auto",
    ) -> None:
        arguments: dict[str, Any] = {
            "model": model,
            "task": task,
            "num_labels": num_labels,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "lr_schedule": lr_schedule,
            "warmup": warmup,
            "max_steps": max_steps,
            "memsave": memsave,
        }
        recipe = check_arguments(type(self).__name__, arguments)
        super().__init__()
        self.task = task if recipe is None else recipe.task
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = (betas[0], betas[1])
        self.eps = eps
        self.lr_schedule = lr_schedule
        self.warmup = warmup
        self.max_steps = max_steps
        self.memsave = memsave
        self.model = None if recipe is None else recipe.build()
        self._step_metrics = make_metrics()
        plain = arguments | {"betas": [*betas], "memsave": only_plain(memsave)}
        if recipe is None:  # a subclass may have arguments of these names
            for name in ("model", "num_labels"):
                del plain[name]
        else:
            plain |= {"model": recipe.plain_config(), "task": recipe.task, "num_labels": None}
        self._plain = plain
        self._save_plain()

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of a subclass, as any LightningModule, beside those of this class."""
        frame = frame or cast(types.FrameType, inspect.currentframe()).f_back
        ignored = [ignore] if isinstance(ignore, str) else [*(ignore or ())]
        theirs = [a for a in args if not isinstance(a, str) or a not in self._plain]
        if theirs or not args:
            save = cast(Any, super()).save_hyperparameters
            save(*theirs, ignore=[*ignored, *self._plain], frame=frame, logger=logger)
        self._plain = {name: v for name, v in self._plain.items() if name not in ignored}
        self._save_plain(logger)

    def _save_plain(self, logger: bool = True) -> None:
        # Lightning compares the dictionary with the arguments of every `__init__` that is running,
        # which arrays cannot be; above the frame of a generator there is none.
        nowhere: Any = (_ for _ in ())
        save = cast(Any, super()).save_hyperparameters
        save(self._plain, frame=nowhere.gi_frame, logger=logger)

    def _base_arguments(self) -> dict[str, Any]:
        if self.memsave is None:
            return everything_off()
        return {} if self.memsave == "auto" else dict(self.memsave)
