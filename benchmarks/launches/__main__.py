"""Count what a step asks of a GPU, without one: `python -m benchmarks.launches`.

Steps run on the path of CUDA under fake tensors. What is counted depends on no machine: operators
(a ``foreach`` over many tensors is one), waits for the device, bytes between device and host, and
floating-point operations. The reference is what one writes by hand: `torch.utils.checkpoint` around
each block, with AdamW of torch, or in bf16 with 8-bit state.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._models import BASE, OTHERS, TINY, masked_batch
from benchmarks.launches._count import Counts, Setup, count
from benchmarks.presets._run import SETTINGS, gpt2
from lightning_memsave import find_blocks
from lightning_memsave.errors import IncompatibleError

MIB = 2**20
NUM_PARTS = 4


class Model(NamedTuple):
    """A model and its batch.

    Args:
        build: Makes the model.
        batch: Its keywords.
    """

    build: Callable[[], nn.Module]
    batch: dict[str, Tensor]

    def checkpointed(self) -> nn.Module:
        """Make the model with `torch.utils.checkpoint` around each block."""
        model = self.build()
        for block in find_blocks(model):
            forward = partial(checkpoint, block.module.forward, use_reentrant=False)
            object.__setattr__(block.module, "forward", forward)
        return model


def _without_cache(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = build()
        config: Any = model.config
        config.use_cache = False  # checkpointing switches it off, and it changes the masks
        return model

    return make


def _gpt2_batch(vocab_size: int, batch_size: int, num_tokens: int) -> dict[str, Tensor]:
    ids = masked_batch(vocab_size, batch_size, num_tokens)["input_ids"]
    return {"input_ids": ids, "labels": ids}


MODELS = {
    "RoBERTa 84M, 64 x 128": Model(BASE.build, masked_batch(52_000, 64, 128)),
    "GPT-2 XL, 12 blocks, 8 x 1024": Model(
        _without_cache(gpt2(50_257, 1600, 12, 25)), _gpt2_batch(50_257, 8, 1024)
    ),
    "ResNet-50, 32 x 224 x 224": Model(OTHERS["ResNet"].build, OTHERS["ResNet"].make_batch()),
}
DRY = {"RoBERTa tiny, 8 x 16": Model(TINY.build, masked_batch(500, 8, 16))}


class Row(NamedTuple):
    """What is counted.

    Args:
        settings: Arguments of the callback.
        reference: The row to compare with; empty for none.
        clip: Bound on the norm of all gradients.
        is_by_hand: Whether the blocks are checkpointed by hand.
        limit: The most operators of the reference that it may have.
        parts: Micro-batches.
        simulated: Of which a prediction simulates so many, as all others are like them.
        accumulated: Batches in a step.
    """

    settings: dict[str, Any]
    reference: str = ""
    clip: float | None = None
    is_by_hand: bool = False
    limit: float = 0.0
    parts: int = 1
    simulated: int = 1
    accumulated: int = 1


BY_HAND = "by hand"
BY_HAND_8BIT = "by hand, bf16, 8-bit"
BF16 = {"precision": "bf16-mixed"}


def _techniques() -> dict[str, Row]:
    chosen: dict[str, dict[str, Any]] = {
        "checkpointing": {"activation_checkpointing": "all"},
        "checkpointing, nested": {"activation_checkpointing": "nested"},
        "checkpointing, selective": {"activation_checkpointing": "selective"},
        "early release": BF16,
        "8-bit optimizer": {"optimizer": "8bit"},
        "chunked cross-entropy": {"chunked_cross_entropy": True},
        "optimizer in backward": {"optimizer_in_backward": True},
        "bf16 weights, stochastic": {"low_precision_weights": "stochastic", **BF16},
        "bf16 weights, kahan": {"low_precision_weights": "kahan", **BF16},
        "attention kernel": {"attention": "sdpa"},
    }
    rows = {
        name: Row(settings, "plain, bf16" if "precision" in settings else "plain")
        for name, settings in chosen.items()
    }
    in_backward = chosen["optimizer in backward"]
    rows["optimizer in backward, clipped"] = Row(in_backward, "plain, clipped", clip=1.0)
    rows["2 batches"] = Row({"accumulate_grad_batches": 2}, "plain", accumulated=2)
    rows[f"2 of {NUM_PARTS} micro-batches"] = Row({}, "plain", parts=NUM_PARTS, simulated=2)
    return rows


def _presets() -> dict[str, Row]:
    rows = {}
    limits = {"bitwise": 1.25, "classic": 1.25, "single_gpu": 1.6}
    for preset, limit in limits.items():
        reference = BY_HAND if preset == "bitwise" else BY_HAND_8BIT
        # As the loops by hand, in small models too.
        settings = SETTINGS[preset] | ({} if preset == "bitwise" else {"optimizer": "8bit"})
        rows[preset] = Row(settings, reference, limit=limit)
        rows[f"{preset}, clipped"] = Row(settings, f"{reference}, clipped", 1.0, limit=limit)
        few = 2 if preset == "classic" else 3  # with updates in backward
        in_parts = Row(settings, reference, parts=NUM_PARTS, simulated=few)
        rows[f"{preset}, {few} of {NUM_PARTS}"] = in_parts
    return rows


ROWS: dict[str, Row] = {
    "plain": Row({}),
    "plain, clipped": Row({}, clip=1.0),
    "plain, bf16": Row(BF16),
    BY_HAND: Row({}, "plain", is_by_hand=True),
    f"{BY_HAND}, clipped": Row({}, "plain, clipped", 1.0, is_by_hand=True),
    BY_HAND_8BIT: Row({"optimizer": "8bit", **BF16}, "plain, bf16", is_by_hand=True),
    f"{BY_HAND_8BIT}, clipped": Row(
        {"optimizer": "8bit", **BF16}, "plain, bf16", 1.0, is_by_hand=True
    ),
    **_techniques(),
    **_presets(),
}
"""By name; a reference comes before what is compared with it."""


class Found(NamedTuple):
    """What was counted, and the predicted peak in bytes."""

    counts: Counts
    peak_bytes: int


def count_row(model: Model, row: Row) -> Found:
    """Count a step.

    Args:
        model: The model.
        row: What to switch on.

    Returns:
        What was counted.
    """
    counts, prediction = count(setup_of(model, row))
    return Found(counts, prediction.peak_bytes)


def setup_of(model: Model, row: Row) -> Setup:
    """Describe the step of a row."""
    build = model.checkpointed if row.is_by_hand else model.build
    settings = dict(row.settings)
    if row.parts > 1:
        settings["micro_batch_size"] = -(-len(next(iter(model.batch.values()))) // row.parts)
    return Setup(build, model.batch, settings, row.clip)


def as_line(row: Row, found: dict[str, Found], name: str) -> list[str]:
    """Lay out one row of the table.

    Args:
        row: The row.
        found: What was counted so far.
        name: Its name.

    Returns:
        The cells.
    """
    counts, peak_bytes = found[name]
    reference = found[row.reference].counts if row.reference else counts
    return [
        name,
        f"{counts.num_operators:,}",
        f"{counts.recomputed:,}",
        f"{ratio(counts, reference):.2f}" if row.reference else "",
        f"{counts.num_waits}",
        f"{counts.to_host_bytes / MIB:,.0f}",
        f"{counts.from_host_bytes / MIB:,.0f}",
        f"{counts.flop / found['plain'].counts.flop / row.accumulated:.2f}",
        f"{peak_bytes / MIB:,.0f}",
    ]


HEADER = (
    *("step", "operators", "recomputed", "/ reference", "waits", "to host, MiB"),
    *("from host, MiB", "FLOP / plain", "peak, MiB"),
)


def ratio(counts: Counts, reference: Counts) -> float:
    """Return the operators over those of the reference."""
    return counts.num_operators / reference.num_operators


def check_claims(model: str, found: dict[str, Found]) -> dict[str, bool]:
    """Say what holds of what is claimed.

    Args:
        model: Its name.
        found: What was counted, by row.

    Returns:
        True or false for each claim.
    """
    claims = {}
    for name, row in ROWS.items():
        if name not in found or not row.reference:
            continue
        counts, reference = found[name].counts, found[row.reference].counts
        if row.limit:
            what = f"{model}: {name} has at most {row.limit} times the operators of {row.reference}"
            claims[what] = ratio(counts, reference) <= row.limit
        # The model may wait in each forward pass. In micro-batches of a simulation the chunked
        # loss asks for the number of labels in each; in a fit all are read at once.
        most = found["plain"].counts.num_waits * max(row.simulated, row.accumulated) + 1
        waits = counts.num_waits - max(0, counts.waits["nonzero"] - 1)
        claims[f"{model}: {name} waits at most {most} times"] = waits <= most
    return claims


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and write the results.

    Args:
        arguments: Of the command line.

    Returns:
        1 if what is claimed is not so.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="a tiny model only")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    texts: list[str] = []
    results: dict[str, Any] = {}
    claims: dict[str, bool] = {}
    for model, chosen in (DRY if options.dry else MODELS).items():
        found: dict[str, Found] = {}
        lines = []
        for name, row in ROWS.items():
            try:
                found[name] = count_row(chosen, row)
            except IncompatibleError as error:  # nothing of the model to apply it to
                print(model, name, error, sep=" | ", flush=True)
                continue
            lines.append(as_line(row, found, name))
            print(model, *lines[-1], sep=" | ", flush=True)
        texts += [f"{model}:", markdown_table(HEADER, lines)]
        claims |= {} if options.dry else check_claims(model, found)
        results[model] = {
            name: {
                "operators": dict(counts.operators),
                "waits": dict(counts.waits),
                "recomputed": counts.recomputed,
                "to_host_bytes": counts.to_host_bytes,
                "from_host_bytes": counts.from_host_bytes,
                "flop": counts.flop,
                "peak_bytes": peak_bytes,
            }
            for name, (counts, peak_bytes) in found.items()
        }
    failed = [claim for claim, holds in claims.items() if not holds]
    texts += [f"Does not hold: {claim}." for claim in failed]
    path = write_results(
        "launches_dry" if options.dry else "launches_cpu",
        {"counted": results, "claims": claims},
        "\n\n".join(texts),
        folder=options.results or (Path(tempfile.mkdtemp()) if options.dry else RESULTS),
    )
    print(f"\nWritten to {path}", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
