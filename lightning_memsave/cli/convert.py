"""``memsave convert``: convert optimizer state in a checkpoint between 8 and 32 bits."""

import argparse
from pathlib import Path
from typing import Any

from lightning_memsave.core.files import replacing
from lightning_memsave.core.names import without_controls
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.units import format_bytes

SUMMARY = "Convert the optimizer state in a Lightning checkpoint between 8 and 32 bits."
EXAMPLES = """\
memsave convert last.ckpt --to 32bit      # writes last-32bit.ckpt; resume without the callback
memsave convert last.ckpt --to 8bit --output small.ckpt
memsave convert last.ckpt --to 8bit --keep-32bit '*embed*' '*head*'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="checkpoint file")
    parser.add_argument(
        "--to",
        required=True,
        choices=("8bit", "32bit"),
        help="8bit: as saved with MemSaveCallback; 32bit: as saved with torch.optim",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="file to write; default: CKPT with -8bit or -32bit before its suffix",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the output if it exists")
    parser.add_argument(
        "--keep-32bit",
        nargs="*",
        metavar="PATTERN",
        help="with --to 8bit: shell patterns of parameter names whose state stays 32-bit; default: "
        "parameters that look like embeddings or biases",
    )


def run(arguments: argparse.Namespace) -> None:
    source: Path = arguments.checkpoint
    output: Path = arguments.output or source.parent / (
        f"{source.stem}-{arguments.to}{source.suffix}"  # `with_stem` refuses "."
    )
    _check_output(output, arguments.force)
    if arguments.keep_32bit is not None and arguments.to == "32bit":
        raise ConfigurationError(
            "--keep-32bit works only with --to 8bit. Remove it: --to 32bit converts everything."
        )
    # After what can be refused at once: this import takes seconds.
    from lightning_memsave.techniques.low_bit_optimizer.checkpoint import (
        convert_optimizer_states,
    )

    checkpoint = load_checkpoint(source)
    converted, changes = convert_optimizer_states(checkpoint, arguments.to, arguments.keep_32bit)
    _check_output(output, arguments.force)  # it has taken a while
    write_checkpoint(converted, output, mode_of=source)
    for i, change in enumerate(changes):
        text = f"{'' if change.is_converted else 'not converted: '}{change.text}"
        print(f"optimizer {i}: {without_controls(text)}")
    before, after = (format_bytes(path.stat().st_size) for path in (source, output))
    print(f"{without_controls(str(output))} ({before} -> {after})")


def _check_output(output: Path, may_overwrite: bool) -> None:
    if not output.parent.is_dir():
        raise ConfigurationError(f"The folder `{output.parent}` does not exist. Create it first.")
    if output.is_dir():
        raise ConfigurationError(f"`{output}` is a folder. Pass the name of a file in it.")
    if (output.exists() or output.is_symlink()) and not may_overwrite:
        raise ConfigurationError(f"`{output}` exists. Pass --force, or another --output.")


def load_checkpoint(path: Path) -> dict[str, Any]:
    from lightning_memsave.targets.checkpoints import load_without_code

    if path.is_dir():
        raise ConfigurationError(
            f"`{path}` is a folder: sharded checkpoints of FSDP and DeepSpeed are not converted. "
            "Save a full one: `FSDPStrategy(state_dict_type='full')`."
        )
    if not path.is_file():
        why = "is not a regular file" if path.exists() else "does not exist"
        raise ConfigurationError(
            f"`{path}` {why}. Give a file that `ModelCheckpoint` or "
            "`trainer.save_checkpoint` has written."
        )
    checkpoint = load_without_code(
        path,
        if_code="If you trust its origin, save it without these objects: `c = torch.load(path, "
        "weights_only=False)`, delete what is not a tensor or a plain value (most often in "
        "`c['hyper_parameters']`), and `torch.save(c, path)`.",
        if_unreadable="Give an earlier file that `ModelCheckpoint` or `trainer.save_checkpoint` "
        "has written.",
        map_location="cpu",
    )
    if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
        raise ConfigurationError(
            f"`{path}` is not a checkpoint of Lightning. Give a file that `ModelCheckpoint` or "
            "`trainer.save_checkpoint` has written."
        )
    if not checkpoint.get("optimizer_states"):
        raise ConfigurationError(
            f"`{path}` has no optimizer states: it was saved with weights only, and there is "
            "nothing to convert. Load it without conversion."
        )
    return checkpoint


def write_checkpoint(checkpoint: dict[str, Any], path: Path, mode_of: Path) -> None:
    """Write a checkpoint atomically, with the permissions of the file ``mode_of``."""
    import torch

    try:
        with replacing(path, mode_of) as file:
            torch.save(checkpoint, file)
    # Where a write fails, torch's writer raises an error of its own from it.
    except (OSError, RuntimeError) as error:
        failure = error if isinstance(error, OSError) else error.__context__
        if not isinstance(failure, OSError):
            raise
        raise ConfigurationError(
            f"`{path}` cannot be written: {failure.strerror}. Nothing was changed. Make room, or "
            "pass another --output."
        ) from error
