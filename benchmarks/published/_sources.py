"""Published runs: address, versions, model, batches, settings and the published figure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MB, MIB, GIB = 10**6, 2**20, 2**30
ALLOCATED, SMI = "allocated", "nvidia-smi"


@dataclass(frozen=True, slots=True)
class Run:
    """One published figure.

    Args:
        published: The figure, in the unit of its source.
        batch_size: Samples.
        num_tokens: Tokens of each sample.
        attention: Hugging Face's ``attn_implementation``.
        settings: Arguments of `MemSaveCallback`.
        trainer: Arguments of the Trainer.
        name: What the settings are called, if anything.
    """

    published: float
    batch_size: int
    num_tokens: int
    attention: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        """Name it within its source."""
        parts = (f"{self.batch_size} x {self.num_tokens}", self.attention, self.name)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Source:
    """Figures of one model from one place.

    Args:
        name: Short name.
        url: Where the figures stand.
        versions: Versions that the source names, and the command.
        gpu: The GPU, as `predict_memory` knows it.
        figure: `ALLOCATED` (``torch.cuda.max_memory_allocated``) or `SMI` (the process in
            nvidia-smi).
        unit: Bytes of a unit.
        model: Class of the model in transformers.
        config: Its configuration.
        config_from: Where the configuration comes from.
        loop: Name of the training loop in `benchmarks.published._step`.
        runs: The figures.
        dtype: Of the weights.
        has_mask: The batch has an attention mask of ones.
        context: The process in nvidia-smi with an empty GPU, as the source measured it;
            `None` is the estimate of the prediction.
        transformers: Version of transformers that has the model's code of the run.
        differs: What is not as in the run, apart from torch; empty if nothing is.
        wrong: Runs whose figure is not theirs, as the source itself shows, and why.
    """

    name: str
    url: str
    versions: str
    gpu: str
    figure: str
    unit: int
    model: str
    config: Mapping[str, Any]
    config_from: str
    loop: str
    runs: tuple[Run, ...]
    dtype: str = "float16"
    has_mask: bool = False
    context: float | None = None
    transformers: str | None = None
    differs: str = ""
    wrong: Mapping[str, str] = field(default_factory=dict)


# Rows of "batch tokens eager sdpa"; a dash is a run that was out of memory. Of each table the rows
# with the largest batch, of three long tables those of at least 512 tokens.
def _both(text: str) -> tuple[Run, ...]:
    runs = []
    for line in text.strip().splitlines():
        batch_size, num_tokens, *figures = line.split()
        for attention, figure in zip(("eager", "sdpa"), figures, strict=True):
            if figure != "-":
                runs.append(Run(float(figure), int(batch_size), int(num_tokens), attention))
    return tuple(runs)


_PULL = "https://github.com/huggingface/transformers/pull/"
_DOCS = "huggingface/transformers in 2024, docs/source/en/model_doc/"
_CAUSAL = "script https://gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331, --use-half"
_MASKED = f"{_CAUSAL}, without a mask"
_RECOMPUTED = {"activation_checkpointing": "all"}
_ALL = _RECOMPUTED | {"micro_batch_size": 4, "optimizer": "8bit"}
_FOUR, _HALF = {"accumulate_grad_batches": 4}, {"precision": "16-mixed"}

SOURCES = (
    Source(
        "DistilBERT",
        f"{_DOCS}distilbert.md",
        f"PyTorch 2.3.1; {_MASKED}",
        "RTX-2060",
        ALLOCATED,
        MB,
        "DistilBertForMaskedLM",
        {},
        "defaults of DistilBertConfig, which are distilbert-base-uncased",
        "SumOfLogits",
        _both("""
            8 128 545.922 502.745
            8 256 983.450 798.480
        """),
        transformers="4.46.3",
    ),
    Source(
        "BERT base",
        f"{_DOCS}bert.md",
        f"PyTorch 2.2.0; {_CAUSAL}",
        "A100-80GB",
        ALLOCATED,
        MB,
        "BertForMaskedLM",
        {},
        "defaults of BertConfig, which are bert-base-uncased",
        "SumOfLogits",
        _both("""
            16 256 2874.426 2134.262
            16 512 6964.659 3961.013
        """),
        has_mask=True,
        transformers="4.41.2",
    ),
    Source(
        "ALBERT base v2",
        f"{_PULL}32092",
        "script in the pull request, AutoModelForMaskedLM, float16",
        "RTX-2060",
        ALLOCATED,
        MB,
        "AlbertForMaskedLM",
        {
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "docstring of AlbertConfig; version 2 has no dropout (google-research/albert#225)",
        "SumOfLogits",
        _both("""
            4 256 794.206 717.332
            4 512 1664.025 1363.268
        """),
        transformers="4.45.2",
    ),
    Source(
        "BioGPT",
        f"{_DOCS}biogpt.md",
        f"PyTorch 2.3.1; {_MASKED}",
        "RTX-2060",
        ALLOCATED,
        MB,
        "BioGptForCausalLM",
        {},
        "defaults of BioGptConfig, which are microsoft/biogpt",
        "SumOfLogits",
        _both("""
            8 128 2098.521 1848.435
            8 256 3989.980 2986.492
        """),
        transformers="4.46.3",
    ),
    Source(
        "OPT 350M",
        f"{_PULL}33298",
        f"PyTorch 2.4.0; {_CAUSAL}",
        "L40S",
        ALLOCATED,
        MB,
        "OPTForCausalLM",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        "config.json of facebook/opt-350m, as public code quotes it",
        "SumOfLogits",
        _both("""
            8 512 10985.391 4750.55
            8 1024 34175.763 8821.18
            8 2048 - 8821.18
        """),
        has_mask=True,
        wrong={
            "8 x 2048, sdpa": "the source has the figure and the time of 8 x 1024, as it has those "
            "of 4 x 1024 for 4 x 2048, which are as many tokens as 8 x 1024"
        },
        transformers="4.46.3",
    ),
    Source(
        "GPT-NeoX 410M",
        f"{_PULL}31031",
        f"PyTorch 2.2.1; {_CAUSAL}",
        "RTX-3080-Ti",
        ALLOCATED,
        MB,
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50304,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        "models/410M/pythia-410m-deduped.yml of EleutherAI/pythia",
        "SumOfLogits",
        _both("""
            4 512 6290.58 3877.29
            4 1024 - 6821.98
            4 2048 - 12705.1
        """),
        has_mask=True,
        transformers="4.43.4",
    ),
    Source(
        "GPT-2 large",
        f"{_DOCS}gpt2.md",
        f"PyTorch 2.2.1; {_CAUSAL}",
        "RTX-3080-Ti",
        ALLOCATED,
        MB,
        "GPT2LMHeadModel",
        {"n_embd": 1280, "n_layer": 36, "n_head": 20},
        "model.py of karpathy/nanoGPT",
        "SumOfLogits",
        _both("""
            4 512 12466.6 8102.64
            4 1024 - 14568.2
        """),
        has_mask=True,
        transformers="4.43.4",
    ),
    Source(
        "BERT large",
        "https://huggingface.co/docs/transformers/v4.18.0/en/performance",
        "transformers 4.18, CUDA 11.2; Trainer(per_device_train_batch_size=4), 512 random tokens",
        "V100-16GB",
        SMI,
        MIB,
        "BertForSequenceClassification",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        "the paper, arXiv:1810.04805: L=24, H=1024, A=16",
        "HuggingFaceTrainer",
        (
            Run(14949, 4, 512, "eager"),
            Run(13939, 4, 512, "eager", {}, _HALF, "float16"),
            Run(8681, 1, 512, "eager", {}, _FOUR, "accumulated"),
            Run(6775, 1, 512, "eager", _RECOMPUTED, _FOUR, "accumulated, checkpointing"),
            Run(7275, 1, 512, "eager", _RECOMPUTED, _FOUR | _HALF, "the same, float16"),
        ),
        dtype="float32",
        context=1343,
        differs="transformers 4.18 and its torch, which keep more for backward: cause not shown",
    ),
    Source(
        "RoBERTa 84M",
        "the table of this project's first document",
        "torch 1.11",
        "P100-16GB",
        SMI,
        MIB,
        "RobertaForMaskedLM",
        {"vocab_size": 52_000, "num_hidden_layers": 6, "max_position_embeddings": 514},
        "84 million parameters, as benchmarks/_models.py",
        "HuggingFaceTrainer",
        (
            Run(12589, 64, 128, "eager"),
            Run(8311, 64, 128, "eager", _RECOMPUTED, {}, "checkpointing"),
            Run(3503, 64, 128, "eager", {"micro_batch_size": 4}, {}, "micro-batches"),
            Run(10119, 64, 128, "eager", {}, _HALF, "float16"),
            Run(12621, 64, 128, "eager", {"optimizer": "8bit"}, {}, "8-bit"),
            Run(2873, 64, 128, "eager", _ALL, _HALF, "all four"),
        ),
        dtype="float32",
        differs="torch 1.11, and a length of 128 that the table does not give: cause not shown",
    ),
    Source(
        "Llama 3.2 3B",
        'https://github.com/meta-pytorch/torchtune, README, row "+ Packed Dataset"',
        "torchtune, full_finetune_single_device, AdamW, dtype=bf16, batch 2, packed to 4,096",
        "A100-80GB",
        ALLOCATED,
        GIB,
        "LlamaForCausalLM",
        {
            "vocab_size": 128_256,
            "hidden_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "tie_word_embeddings": True,
        },
        "llama3_2_3b in torchtune",
        "FusedAdamW",
        (Run(60.0, 2, 4096, "sdpa"),),
        dtype="bfloat16",
        differs="torchtune's own model code, and its compiled attention for packed samples",
    ),
)
