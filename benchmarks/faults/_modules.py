"""Awkward Lightning modules with every preset and technique: equal, refused, wrong or crashed."""

import base64
import functools
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.parameter import UninitializedParameter

from benchmarks._common import markdown_table
from benchmarks.faults._attack import _REMEDY, in_process
from benchmarks.faults._fits import digest
from lightning_memsave import (
    ChunkedCrossEntropy,
    LowBitOptimizer,
    MemSaveCallback,
    MicroBatching,
    Offloading,
)
from lightning_memsave.callbacks.settings import setting
from tests.awkward_projects import BATCH_SIZE, all_projects

PLAIN_FAILS = "plain fails"
"""Training without the callback, as on a virtual GPU, which has no recurrent kernels."""
LATE = "ended with advice"
"""After the first step, with an error that says what to type."""
BAD = ("wrong", "crashed")
OUTCOMES = ("equal", "as declared", "refused", LATE, PLAIN_FAILS, *BAD)
EXACT: dict[str, Any] = {"precision": None, "optimizer": None}
OFF: dict[str, Any] = {"preset": "off"}
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": "all"}
# Those after which weights may differ, by their relative error: what is recomputed in other tiles,
# and what keeps weights or state in fewer bits. With the latter the loss counts as well: an expert
# that gets other tokens has other weights. It is compared with those of plain training, also in
# bfloat16, which alone moves a loss by up to 3.3 %.
APPROXIMATE, MAX_LOSS = 0.5, 0.02
# Relative error of sums in another order. A model may amplify it: a larger error is as declared if
# plain training, begun with weights that are changed by 1e-7, deviates as far from plain training.
ROUNDING, NUM_NUDGES = 1e-4, 8
HALF = "bf16-mixed"
# A host rounds updates in another way than a GPU.
ON_HOST = 1e-4 if torch.cuda.is_available() else 0
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "bare in float32": (EXACT, 0),
    "bare": ({}, APPROXIMATE),
    "bitwise": ({"preset": "bitwise"}, 0),
    "single_gpu in float32": (
        {"preset": "single_gpu", **EXACT, "low_precision_weights": None},
        ROUNDING,
    ),
    "offload in float32": ({"preset": "offload", **EXACT, "low_precision_weights": None}, ROUNDING),
    "single_gpu": ({"preset": "single_gpu"}, APPROXIMATE),
    "offload": ({"preset": "offload"}, APPROXIMATE),
    "offload optimizer": ({**OFF, "offload": "optimizer"}, ON_HOST),
    "offload parameters": ({**OFF, "offload": "parameters"}, ON_HOST),
    "offload parameters, checkpointed, in backward": (
        {**OFF, **CHECKPOINTED, "offload": "parameters", "optimizer_in_backward": True},
        ON_HOST,
    ),
    "offload activations": ({**OFF, "offload": "activations"}, 0),
    "offload embeddings": (
        {**OFF, "offload": Offloading("embeddings", min_table_bytes=4)},
        ON_HOST,
    ),
    "in backward": ({**OFF, "optimizer_in_backward": True}, 0),
    "micro-batches": ({**OFF, "micro_batch_size": BATCH_SIZE // 2}, ROUNDING),
    "block micro-batches": (
        {**OFF, **CHECKPOINTED, "micro_batch_size": MicroBatching(2, of="blocks")},
        ROUNDING,
    ),
    "checkpointed": ({**OFF, **CHECKPOINTED}, 0),
    "chunked": (
        {**OFF, "chunked_cross_entropy": ChunkedCrossEntropy(heads="re:.*head", chunk_size=16)},
        ROUNDING,
    ),
    "8-bit": (
        {**OFF, "optimizer": LowBitOptimizer(min_8bit_size=1, min_saved_bytes=0)},
        APPROXIMATE,
    ),
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.5},
    "3 batches": {"accumulate_grad_batches": 3},
    "resumed": {},
}


def run(
    project: str,
    settings: dict[str, Any] | None,
    condition: str,
    *,
    drops: bool,
    precision: Any = None,
    nudge: int = 0,
) -> dict[str, Any]:
    """Train a project, with a callback unless ``None``; give its weights and how it ended.

    With ``nudge``, a seed, initial weights are changed by about 1e-7 of their values.
    """
    callback = None
    if settings is not None:
        callback = MemSaveCallback(**settings, predict=False, report=False)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch.object(setting, "SMALLEST_SAVING_BYTES", 0):
            lit, steps, error = _fit(
                project,
                callback,
                condition,
                Path(folder),
                drops=drops,
                precision=precision,
                nudge=nudge,
            )
    return {
        "weights": _as_text(lit),
        "loss": float(lit.trainer.callback_metrics.get("loss", 0.0)),
        # Refused before the first step, lazy weights have no values.
        "digest": None if error is not None else digest(lit.cpu()),
        "steps": steps,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "has_advice": error is not None and bool(_REMEDY.search(_said(error))),
    }


def _fit(
    project: str,
    callback: MemSaveCallback | None,
    condition: str,
    folder: Path,
    *,
    drops: bool,
    precision: Any,
    nudge: int,
) -> tuple[Any, int, Exception | None]:
    epochs = (1, 2) if condition == "resumed" else (2,)
    for max_epochs in epochs:
        torch.manual_seed(0)
        lit = all_projects()[project]()
        for module in () if drops else lit.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0
        if nudge:
            _nudge(lit, nudge)
        trainer = pl.Trainer(
            max_epochs=max_epochs,
            callbacks=[
                *filter(None, [callback]),
                *(make() for make in lit.callbacks),
                ModelCheckpoint(folder, save_last=True),
            ],
            **{} if not lit.automatic_optimization else CONDITIONS[condition],
            precision=precision,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            last = folder / "last.ckpt"
            path = last if max_epochs != epochs[0] else None
            trainer.fit(lit, lit.loader(1), lit.loader(2), ckpt_path=path, weights_only=False)
        except Exception as error:
            return lit, trainer.global_step, error
    return lit, trainer.global_step, None


def _nudge(lit: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in _values(lit):
            if param.is_floating_point():
                param.mul_(1 + 1e-7 * torch.randn(param.shape, generator=generator))


def _values(lit: nn.Module) -> list[nn.Parameter]:
    return [p for p in lit.parameters() if not isinstance(p, UninitializedParameter)]


def _as_text(lit: nn.Module) -> list[str]:
    weights = [param.detach().float().cpu().numpy() for param in _values(lit)]
    return [base64.b64encode(weight.tobytes()).decode() for weight in weights]


def _said(error: BaseException | None) -> str:
    said = ""
    while error is not None:
        said += "\n".join([str(error), *getattr(error, "__notes__", ())])
        error = error.__cause__ or error.__context__
    return said


class Cells:
    """Runs cells of the table, and remembers what plain training gives."""

    def __init__(self) -> None:
        self._plain: dict[tuple[str, str, bool, str | None], Any] = {}

    def run(self, project: str, name: str, condition: str) -> dict[str, Any]:
        """Run one cell."""
        settings, tolerance = SETTINGS[name]
        drops = not name.endswith("micro-batches")  # of other tensors it drops others
        plain = self._train(project, condition, drops, None)
        cell = {"project": project, "settings": name, "condition": condition}
        error = plain["error"] if isinstance(plain, dict) else f"the process: {plain}"
        if error is not None:
            return {**cell, "outcome": PLAIN_FAILS, "error": error[:600]}
        found = in_process(functools.partial(run, project, settings, condition, drops=drops))
        judged = judge(found, plain, tolerance)
        if judged["outcome"] == "wrong" and tolerance == APPROXIMATE:
            half = self._train(project, condition, drops, HALF)
            losses = [plain["loss"], *([half["loss"]] if isinstance(half, dict) else [])]
            if any(loss > 0 and abs(found["loss"] / loss - 1) <= MAX_LOSS for loss in losses):
                judged["outcome"] = "as declared"
        if judged["outcome"] == "wrong" and tolerance == ROUNDING:
            judged["amplified"] = self._amplified(project, condition, plain, drops=drops)
            if judged["deviation"] <= judged["amplified"] + tolerance:
                judged["outcome"] = "as declared"
        return {**cell, **judged}

    def _amplified(
        self, project: str, condition: str, plain: dict[str, Any], *, drops: bool
    ) -> float:
        """Return how far plain training with changed last bits deviates from plain training."""
        deviations: list[float] = []
        for nudge in range(1, NUM_NUDGES + 1):
            job = functools.partial(run, project, None, condition, drops=drops, nudge=nudge)
            found = judge(in_process(job), plain, 0)
            deviations.append(found.get("deviation", 0.0))
        return max(deviations, default=0.0)

    def _train(self, project: str, condition: str, drops: bool, precision: str | None) -> Any:
        key = project, condition, drops, precision
        if key not in self._plain:
            self._plain[key] = in_process(
                functools.partial(run, project, None, condition, drops=drops, precision=precision)
            )
        return self._plain[key]


def judge(found: Any, plain: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Compare what a fit has given with plain training."""
    if not isinstance(found, dict):
        return {"outcome": "crashed", "error": str(found)}
    if found["error"] is not None:
        outcome = (LATE if found["steps"] else "refused") if found["has_advice"] else "crashed"
        return {"outcome": outcome, "error": found["error"][:600]}
    if found["digest"] == plain["digest"]:
        return {"outcome": "equal"}
    deviation = max(
        (
            _relative(one, other)
            for one, other in zip(found["weights"], plain["weights"], strict=True)
        ),
        default=0.0,
    )
    outcome = "as declared" if deviation <= tolerance else "wrong"
    return {"outcome": outcome, "deviation": deviation}


def _relative(one: str, other: str) -> float:
    found, expected = (np.frombuffer(base64.b64decode(text), np.float32) for text in (one, other))
    return float(np.linalg.norm(found - expected)) / max(float(np.linalg.norm(expected)), 1e-3)


def attack(
    projects: Sequence[str],
    names: Sequence[str],
    conditions: Sequence[str],
    kept: Sequence[dict[str, Any]] = (),
) -> list[Any]:
    """Run each project with each of the settings that is not kept, under the conditions in turn."""
    cells, found = Cells(), []
    known = {(cell["project"], cell["settings"]): cell for cell in kept}
    for row, project in enumerate(projects):
        for column, name in enumerate(names):
            one = known.get((project, name))
            one = one or cells.run(project, name, conditions[(row + column) % len(conditions)])
            found.append(one)
            if one["outcome"] in (LATE, PLAIN_FAILS, *BAD):
                shown = str(one.get("error") or one.get("deviation"))[:200].replace("\n", " ")
                print(project, name, one["condition"], one["outcome"], shown, sep=" | ", flush=True)
    return found


def make_table(found: list[dict[str, Any]]) -> str:
    """Count the outcomes: by settings and condition, and in a second table by project."""
    tables = []
    for kinds in (("settings", "condition", "all"), ("project",)):
        rows = []
        for kind in kinds:
            for name in dict.fromkeys(one.get(kind, "all") for one in found):
                outcomes = [one["outcome"] for one in found if one.get(kind, "all") == name]
                counts = [str(outcomes.count(outcome)) for outcome in OUTCOMES]
                rows.append([name, str(len(outcomes)), *counts])
        tables.append(markdown_table(["cells", "number", *OUTCOMES], rows))
    return "\n\n".join(tables)
