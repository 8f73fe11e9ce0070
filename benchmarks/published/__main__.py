"""Predict published runs: `python -m benchmarks.published`.

Each figure that somebody measured on a GPU and published is compared with the prediction of that
run. pip installs the transformers of a run, whose code of the model differs from today's, into a
folder of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, markdown_table, run_in_process, write_results
from benchmarks.published._sources import SOURCES, Source

# What each version of transformers needs beside what is installed here.
_NEEDED = {
    "4.41.2": ("tokenizers==0.19.1", "huggingface_hub==0.24.6"),
    "4.43.4": ("tokenizers==0.19.1", "huggingface_hub==0.24.6"),
    "4.45.2": ("tokenizers==0.20.3", "huggingface_hub==0.26.5"),
    "4.46.3": ("tokenizers==0.20.3", "huggingface_hub==0.26.5"),
}
_LIMIT_S = 3600


def install(version: str, folder: Path) -> Path:
    """Install a version of transformers where it is not yet.

    Args:
        version: Of transformers.
        folder: Of all versions.

    Returns:
        The folder of this version, for ``PYTHONPATH``.
    """
    place = folder / version
    if not (place / "transformers").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        wanted = [f"transformers=={version}", *_NEEDED[version]]
        subprocess.run([*pip, "--target", str(place), *wanted], check=True)
    return place


def predict_source(source: Source, only: Sequence[str] = ()) -> dict[str, Any]:
    """Predict the runs of a source with the transformers that this process imports.

    Args:
        source: The source.
        only: Names of runs; all if empty.

    Returns:
        The version of transformers, and the published and predicted bytes of each run.
    """
    import transformers  # noqa: PLC0415 - which one depends on the process

    from benchmarks.published._step import predict, predicted_bytes  # noqa: PLC0415

    found = {}
    for run in source.runs:
        if only and str(run) not in only:
            continue
        prediction = predict(source, run)
        predicted, published = predicted_bytes(source, prediction), run.published * source.unit
        found[str(run)] = {
            "published": run.published,
            "published_bytes": published,
            "predicted_bytes": predicted,
            "error": predicted / published - 1,
            "peak": f"{prediction.peak_phase}, {prediction.peak_op}",
            "guesses": list(prediction.guesses),
            "seconds": prediction.seconds,
        }
        print(f"{source.name}, {run}: {found[str(run)]['error']:+.2%}", file=sys.stderr, flush=True)
    return {"transformers": transformers.__version__, "runs": found}


def describe(source: Source, found: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a source is, beside what was predicted.

    Args:
        source: The source.
        found: What `predict_source` gave.

    Returns:
        Both, for the result file.
    """
    told = ("url", "versions", "gpu", "figure", "unit", "model", "config", "config_from")
    more = ("loop", "dtype", "has_mask", "context", "differs", "wrong")
    return {name: getattr(source, name) for name in (*told, *more)} | dict(found)


def errors_of(sources: Mapping[str, Any], *, as_published: bool) -> list[float]:
    """Collect the errors of one kind of source.

    Args:
        sources: What `describe` gave, by name.
        as_published: Whether of those with the run's own code of model and loop, or the others.

    Returns:
        Relative errors of their runs, without figures that are wrong.
    """
    return [
        one["error"]
        for found in sources.values()
        if as_published != bool(found["differs"])
        for run, one in found["runs"].items()
        if run not in found["wrong"]
    ]


def make_text(sources: Mapping[str, Any]) -> str:
    """Lay out what was found.

    Args:
        sources: What `describe` gave, by name.

    Returns:
        Markdown.
    """
    overview = [
        [
            name,
            found["gpu"],
            found["figure"],
            found["transformers"],
            str(len(found["runs"])),
            *_of_errors(errors_of({name: found}, as_published=not found["differs"])),
        ]
        for name, found in sources.items()
    ]
    rows = [
        [
            f"{name}, {run}",
            f"{one['published_bytes'] / 2**20:,.1f}",
            f"{one['predicted_bytes'] / 2**20:,.1f}",
            f"{one['error']:+.2%}",
        ]
        for name, found in sources.items()
        for run, one in found["runs"].items()
    ]
    lines = [
        f"- {name}: {found['url']}; {found['versions']}. Configuration: {found['config_from']}."
        + (f" **Not as in the run**: {found['differs']}." if found["differs"] else "")
        for name, found in sources.items()
    ]
    header = ["source", "GPU", "figure", "transformers", "runs", "median", "worst"]
    return "\n\n".join(
        [
            "Published peaks of GPUs and predictions of the same runs, made without a GPU. "
            "Errors are predicted less published, in percent of the published figure; the median "
            "is of their sizes.",
            _summary("With the run's own code of the model", errors_of(sources, as_published=True))
            + "\n"
            + _summary("With other code", errors_of(sources, as_published=False)),
            *(
                f"Not in these medians: {name}, {run}: {why}."
                for name, found in sources.items()
                for run, why in found["wrong"].items()
                if run in found["runs"]
            ),
            markdown_table(header, overview),
            "\n".join(lines),
            "Each run, in MiB:",
            markdown_table(["run", "published", "predicted", "error"], rows),
        ]
    )


def _of_errors(errors: Sequence[float]) -> tuple[str, str]:
    if not errors:
        return "-", "-"
    worst = max(errors, key=abs)
    return f"{statistics.median(map(abs, errors)):.2%}", f"{worst:+.2%}"


def _summary(what: str, errors: Sequence[float]) -> str:
    if not errors:
        return f"{what}: none."
    median, worst = _of_errors(errors)
    return f"{what}: {len(errors)} figures, median error {median}, worst {worst}."


def lay_out(by_name: Mapping[str, Source], folder: Path) -> int:
    """Write the table of a result file again, after a change of its words.

    Args:
        by_name: The sources.
        folder: Of the result file.

    Returns:
        0.
    """
    written = json.loads((folder / "published.json").read_text(encoding="utf-8"))
    sources = {
        name: describe(by_name[name], {key: found[key] for key in ("transformers", "runs")})
        for name, found in written["sources"].items()
    }
    made = written["provenance"]
    text = make_text(sources)
    write_results("published", {"sources": sources}, text, folder=folder, put_together=made)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, print and write the results.

    Args:
        arguments: Of the command line.

    Returns:
        1 if a prediction failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    names = [source.name for source in SOURCES]
    parser.add_argument("--sources", nargs="+", choices=names, metavar="NAME", default=names)
    parser.add_argument("--runs", nargs="+", metavar="RUN", default=[], help="only these")
    parser.add_argument(
        "--transformers",
        type=Path,
        default=Path(tempfile.gettempdir()) / "memsave-transformers",
        help="folder of the versions of transformers",
    )
    parser.add_argument("--installed", action="store_true", help="only what is installed here")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    parser.add_argument("--lay-out", action="store_true", help="only the table, of what was found")
    parser.add_argument("--only", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    by_name = {source.name: source for source in SOURCES}
    if options.only:
        print(json.dumps(predict_source(by_name[options.only], options.runs)))
        return 0
    if options.lay_out:
        return lay_out(by_name, options.results or RESULTS)
    is_whole = options.sources == names and not options.runs and not options.installed
    # A part of the table should not stand among the results.
    folder = options.results or (RESULTS if is_whole else Path(tempfile.mkdtemp()))
    sources, text = {}, ""
    for name in options.sources:
        version = None if options.installed else by_name[name].transformers
        packages = install(version, options.transformers) if version else None
        only = ["--only", name, *(["--runs", *options.runs] if options.runs else [])]
        found = run_in_process("benchmarks.published", *only, limit_s=_LIMIT_S, packages=packages)
        if "error" in found:
            print(found["error"])
            return 1
        sources[name] = describe(by_name[name], found)
        print(f"{name}: {len(found['runs'])} runs", flush=True)
        text = make_text(sources)
        path = write_results("published", {"sources": sources}, text, folder=folder)
    print(f"\n{text}\n\nWritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
