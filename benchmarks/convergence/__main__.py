"""Train each preset for 500 steps on real text: `python -m benchmarks.convergence`.

A small GPT-2 learns the King James Bible, each row with three seeds for weights, dropout and order.
Validation is in float32 on chapters that nobody was trained on. A preset passes if its mean final
loss differs from that of float32 by less than the float32 runs differ among themselves.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._common import RESULTS, markdown_table, run_in_process, write_results
from benchmarks.convergence._run import ROWS

SEEDS = (0, 1, 2)
PRESETS = ("bitwise", "classic", "single_gpu")
"""What must pass; the other rows stand beside them."""
SEVERAL = ("float32", "bitwise", "classic", "single_gpu")
"""Rows that run with each seed; the others with the first."""
LIMIT_S = 3600

Losses = dict[str, dict[int, dict[int, float]]]
"""Validation losses by row, seed and step."""


def run(row: str, seed: int, *, is_dry: bool) -> dict[int, float]:
    """Train one row in a fresh process.

    Args:
        row: Its name.
        seed: Of everything that is random.
        is_dry: Only a few steps.

    Returns:
        Validation losses by step.

    Raises:
        RuntimeError: If the training fails.
    """
    arguments = [row, "--seed", str(seed), *(["--dry"] if is_dry else [])]
    found = run_in_process("benchmarks.convergence._run", *arguments, limit_s=LIMIT_S)
    if "error" in found:
        raise RuntimeError(f"{row}, seed {seed}: {found['error']}")
    losses = {int(step): loss for step, loss in found.items()}
    print(f"{row}, seed {seed}: {_last(losses):.4f}", flush=True)
    return losses


def judge(losses: Losses) -> dict[str, dict[str, Any]]:
    """Compare the final loss of each row with that of float32 under the same seeds.

    Args:
        losses: Of all rows, ``"float32"`` among them.

    Returns:
        For each row the ``mean``, its ``difference`` to float32's, and whether it ``passes``.
    """
    without = {seed: _last(one) for seed, one in losses["float32"].items()}
    spread = max(without.values()) - min(without.values())
    verdicts = {}
    for row, seeds in losses.items():
        average = mean(_last(one) for one in seeds.values())
        difference = average - mean(without[seed] for seed in seeds)
        verdicts[row] = {
            "mean": average,
            "difference": difference,
            "passes": abs(difference) < spread,
        }
    return verdicts


def make_text(losses: Losses) -> str:
    """Lay out the losses.

    Args:
        losses: Of all rows.

    Returns:
        Markdown.
    """
    verdicts = judge(losses)
    steps = sorted(next(iter(losses["float32"].values())))
    shown = [step for step in steps if step % (steps[-1] // 5 or 1) == 0]
    lines = [
        [
            row,
            *(f"{mean(one[step] for one in seeds.values()):.4f}" for step in shown),
            " ".join(f"{_last(one):.4f}" for one in seeds.values()),
            f"{verdicts[row]['difference']:+.4f}",
        ]
        for row, seeds in losses.items()
    ]
    header = [*(f"step {step}" for step in shown), "each seed", "less float32"]
    finals = [_last(one) for one in losses["float32"].values()]
    return (
        f"{markdown_table(['mean validation loss', *header], lines)}\n\n"
        f"Final losses in float32 lie {max(finals) - min(finals):.4f} apart."
    )


def _last(losses: dict[int, float]) -> float:
    return losses[max(losses)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print and write the results.

    Args:
        arguments: Of the command line.

    Returns:
        1 if a preset does not pass.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="a few steps, one seed")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    seeds = SEEDS[:1] if options.dry else SEEDS
    rows = list(dict.fromkeys(["float32", *options.rows]))
    wanted = [(row, seed) for row in rows for seed in (seeds if row in SEVERAL else seeds[:1])]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda one: run(*one, is_dry=options.dry), wanted)
        losses: Losses = {row: {} for row in rows}
        for (row, seed), one in zip(wanted, found, strict=True):
            losses[row][seed] = one
    text, verdicts = make_text(losses), judge(losses)
    print(f"\n{text}")
    path = write_results(
        "convergence_dry" if options.dry else "convergence_cpu",
        {"verdicts": verdicts, "losses": losses},
        text,
        folder=options.results or (Path(tempfile.mkdtemp()) if options.dry else RESULTS),
    )
    print(f"\nWritten to {path}")
    failed = [row for row in PRESETS if row in verdicts and not verdicts[row]["passes"]]
    print(f"Do not pass: {', '.join(failed)}" if failed else "Every preset passes.")
    return 1 if failed and not options.dry else 0


if __name__ == "__main__":
    sys.exit(main())
