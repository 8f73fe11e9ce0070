"""Train the rows of the ladder for 300 steps on real text: `python -m benchmarks.learning_curves`.

A small masked language model learns the King James Bible; validation is in float32 for all rows, on
chapters that nobody was trained on. Training without anything and with everything run with three
seeds each, for weights, dropout and order; the other rows with the first of them.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, run_in_process, write_results
from benchmarks.ladder._rows import ROWS

SEEDS = (0, 1, 2)
LIMIT_S = 1200
Curves = dict[str, dict[int, dict[str, Any]]]
"""What was found by row and seed."""


def run(row: str, seed: int, *, is_dry: bool) -> dict[str, Any]:
    """Train one row in a fresh process.

    Args:
        row: Its name.
        seed: Of everything that is random.
        is_dry: Only a few steps.

    Returns:
        Its losses; those of validation by the number of steps.

    Raises:
        RuntimeError: If the training fails.
    """
    arguments = [row, "--seed", str(seed), *(["--dry"] if is_dry else [])]
    found = run_in_process("benchmarks.learning_curves._run", *arguments, limit_s=LIMIT_S)
    if "error" in found:
        raise RuntimeError(f"{row}, seed {seed}: {found['error']}")
    validation = found["validation_losses"]
    found["validation_losses"] = {int(step): loss for step, loss in validation.items()}
    print(f"{row}, seed {seed}: {_last(found):.4f}", flush=True)
    return found


def judge(curves: Curves) -> dict[str, Any]:
    """Say whether training with everything on ends within the spread of training without.

    Args:
        curves: Of ``"nothing"`` and ``"all"`` with several seeds.

    Returns:
        The spread, the mean with everything on, and whether it lies inside; the largest difference
        between runs with the same seed besides.
    """
    without = {seed: _last(found) for seed, found in curves["nothing"].items()}
    saving = {seed: _last(found) for seed, found in curves["all"].items()}
    mean = sum(saving.values()) / len(saving)
    return {
        "lowest_without": min(without.values()),
        "highest_without": max(without.values()),
        "mean_with_all": mean,
        "is_within": min(without.values()) <= mean <= max(without.values()),
        "largest_difference": max(abs(saving[seed] - without[seed]) for seed in without),
    }


def make_table(curves: Curves) -> str:
    """Lay out the validation losses at a few steps.

    Args:
        curves: What was found.

    Returns:
        A table in Markdown.
    """
    steps = sorted(next(iter(curves["nothing"].values()))["validation_losses"])
    shown = [step for step in steps if step % (steps[-1] // 6 or 1) == 0]
    reference = {seed: _last(found) for seed, found in curves["nothing"].items()}
    rows = [
        [
            f"{row}, seed {seed}",
            *(f"{found['validation_losses'][step]:.4f}" for step in shown),
            f"{_last(found) - reference[seed]:+.4f}",
        ]
        for row, seeds in curves.items()
        for seed, found in seeds.items()
    ]
    header = [*(f"step {step}" for step in shown), "less nothing"]
    return markdown_table(["validation loss", *header], rows)


def plot(curves: Curves, path: Path) -> None:
    """Draw the validation losses.

    Args:
        curves: What was found.
        path: Where to.
    """
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    # So that the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "lightning-memsave", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        whole, end = figure.subplots(1, 2)
        for axes in (whole, end):
            for row, seeds in curves.items():
                style = {"nothing": ("black", "-"), "all": ("tab:red", "--")}.get(row)
                for index, found in enumerate(seeds.values()):
                    points = list(found["validation_losses"].items())
                    axes.plot(
                        *zip(
                            *(points if axes is whole else points[len(points) // 2 :]), strict=True
                        ),
                        color=style and style[0],
                        linestyle=style[1] if style else ":",
                        label=None if index else row,
                    )
            axes.set_xlabel("step")
        whole.set_ylabel("validation loss")
        whole.legend(fontsize="small")
        end.set_title("the second half")
        figure.savefig(path, metadata={"Date": None})


def _last(found: dict[str, Any]) -> float:
    losses: dict[int, float] = found["validation_losses"]
    return losses[max(losses)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print and write the results.

    Args:
        arguments: Of the command line.

    Returns:
        1 if training with everything on ends outside of the spread.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_curves", description=__doc__
    )
    parser.add_argument("--dry", action="store_true", help="a few steps, one seed")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    seeds = SEEDS[:1] if options.dry else SEEDS
    rows = dict.fromkeys(["nothing", *options.rows, "all"])
    wanted = [
        (row, seed) for row in rows for seed in (seeds if row in {"nothing", "all"} else SEEDS[:1])
    ]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda one: run(*one, is_dry=options.dry), wanted)
        curves: Curves = {row: {} for row in rows}
        for (row, seed), one in zip(wanted, found, strict=True):
            curves[row][seed] = one
    table, verdict = make_table(curves), judge(curves)
    text = (
        f"{table}\n\nWithout anything {verdict['lowest_without']:.4f} to "
        f"{verdict['highest_without']:.4f} over {len(seeds)} seeds; with everything on "
        f"{verdict['mean_with_all']:.4f} on average, "
        f"{'within' if verdict['is_within'] else 'OUTSIDE of'} that spread. Runs with the same "
        f"seed differ by {verdict['largest_difference']:.4f} at most."
    )
    print(f"\n{text}")
    path = write_results(
        "learning_curves_dry" if options.dry else "learning_curves_cpu",
        {"verdict": verdict, "curves": curves},
        text,
        folder=options.results or (Path(tempfile.mkdtemp()) if options.dry else RESULTS),
    )
    plot(curves, path.with_suffix(".svg"))
    print(f"\nWritten to {path}")
    return 0 if verdict["is_within"] or options.dry else 1


if __name__ == "__main__":
    sys.exit(main())
