"""A transformer for Lightning: to subclass, or to train as it is on a Hugging Face config."""

import os
from typing import TYPE_CHECKING, Any, Literal

from lightning_memsave.modules._arguments import check_arguments
from lightning_memsave.modules._plain_hyperparameters import PlainHyperparameters, only_plain
from lightning_memsave.modules._steps import TransformerSteps, make_metrics
from lightning_memsave.modules.mixins import MemSaveMixin, everything_off

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Task = Literal["masked_lm", "causal_lm", "sequence_classification"]


class CheckpointedTransformerMixin(MemSaveMixin, TransformerSteps, PlainHyperparameters):
    """A transformer that trains with little memory: to subclass, or to use as it is.

    ``CheckpointedTransformer`` is this in front of ``LightningModule``. It brings its own
    `MemSaveCallback`: activations of all blocks are recomputed, the optimizer's state is 8-bit, and
    so on, as ``memsave`` says. A `MemSaveCallback` that the Trainer is given wins.

    **As it is**, on a Hugging Face config, dictionary, name, local folder or model, it trains
    masked and causal language models and classifiers of sequences on batches that are dictionaries
    with ``labels``. **To subclass**, leave ``model`` out, set ``self.model`` after
    ``super().__init__()``, and write ``training_step``; optimizer and schedule are there.

    ================================= =========== ==================================================
    logged                            when        what
    ================================= =========== ==================================================
    ``train_loss``                    each step   loss of the batch
    ``train_perplexity``              each epoch  language models: exp of the mean loss per token
    ``val_loss``, ``test_loss``       each epoch  mean over tokens, or over samples
    ``val_perplexity``, ``test_...``  each epoch  language models: exp of that loss
    ``val_accuracy``, ``test_...``    each epoch  share of tokens or samples that are predicted
    ================================= =========== ==================================================

    AdamW decays all weights but those of norms, biases and embeddings. A language model's head that
    shares the embedding's weight is an embedding here.

    Args:
        model: What to train. A name or a folder brings its weights, a config gets random ones.
            ``None`` if a subclass sets ``self.model``.
        task: ``None`` infers it from the architectures that the config names.
        num_labels: Classes of a sequence; ``None`` is as the config says.
        stable_embedding: Put a LayerNorm behind the token embedding and initialise that Xavier
            uniform, so that low-bit optimizer state of embeddings trains well. It is part of the
            model: weights that were trained without it, or with it, are refused if this differs.
        learning_rate: The highest one.
        weight_decay: Of AdamW, for the weights named above.
        betas: Of AdamW.
        eps: Of AdamW.
        lr_schedule: After the warm-up, ``"linear"`` or ``"cosine"`` down to zero, or
            ``"constant"``.
        warmup: Optimizer steps in which the learning rate rises from zero; a ``float`` below 1 is
            the share of all steps.
        max_steps: Optimizer steps of the schedule; ``None`` asks the Trainer.
        memsave: Arguments of `MemSaveCallback` by name; those left out have their own defaults.
            ``"auto"`` is for all defaults, ``None`` for no callback.

    Raises:
        ConfigurationError: If arguments are wrong; the message lists all that are.

    Note:
        Hyper-parameters are saved with the config as a plain dictionary, so that checkpoints load
        with ``weights_only=True`` and ``load_from_checkpoint`` needs neither network nor folder.
        Only plain values of ``memsave`` are saved. Weights are float32 unless a model is given;
        ``precision`` is for the rest. Logits of a batch are not kept in training.

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
        stable_embedding: bool = False,
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
            "stable_embedding": stable_embedding,
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
            for name in ("model", "num_labels", "stable_embedding"):
                del plain[name]
        else:
            plain |= {"model": recipe.plain_config(), "task": recipe.task, "num_labels": None}
            plain["stable_embedding"] = recipe.stable_embedding
        self._save_plain(plain)

    def _base_arguments(self) -> dict[str, Any]:
        if self.memsave is None:
            return everything_off()
        return {} if self.memsave == "auto" else dict(self.memsave)
