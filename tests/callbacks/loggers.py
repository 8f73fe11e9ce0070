"""Fit with loggers that people use, and print as JSON what arrived in each: `test_loggers.py`."""

import importlib.util
import json
import os
import struct
import sys
from collections.abc import Iterator
from csv import DictReader
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_memsave import GPUMemoryMonitor

Point = tuple[str, int, float]
"""Name, step and value."""
BLOCK = 32768


def from_tensorboard(folder: Path) -> Iterator[Point]:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "lightning_logs" / "version_0")).Reload()
    for name in events.Tags()["scalars"]:
        yield from ((name, event.step, event.value) for event in events.Scalars(name))


def from_csv(folder: Path) -> Iterator[Point]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        for row in DictReader(file):
            yield from ((n, int(row["step"]), float(v)) for n, v in row.items() if v)


def from_wandb(folder: Path) -> Iterator[Point]:
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    (file,) = folder.rglob("*.wandb")
    for data in records_of(file.read_bytes()):
        items = record.FromString(data).history.item
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        if row:
            step = int(row.pop("trainer/global_step"))
            yield from ((n, step, v) for n, v in row.items() if isinstance(v, int | float))


def records_of(data: bytes) -> Iterator[bytes]:
    """Read LevelDB's log format, in which W&B keeps an offline run, after a header of 7 bytes."""
    position, whole, record = 7, (1, 4), b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # no room for a header
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7 + length
        record += data[position - length : position]
        if kind in whole:
            yield record
            record = b""


def from_mlflow(folder: Path) -> Iterator[Point]:
    client = importlib.import_module("mlflow.tracking").MlflowClient(folder.as_uri())
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        yield from ((name, metric.step, metric.value) for metric in history)


LOGGERS: dict[str, tuple[Any, Any]] = {
    "csv": (CSVLogger, from_csv),
    "tensorboard": (TensorBoardLogger, from_tensorboard),
    "wandb": (lambda folder: WandbLogger(save_dir=folder, offline=True), from_wandb),
    "mlflow": (lambda folder: MLFlowLogger(save_dir=str(folder)), from_mlflow),
}


def main(folder: Path) -> None:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a database needs more than mlflow-skinny
    installed = [name for name in LOGGERS if importlib.util.find_spec(name)]
    loggers = []
    for name in installed:
        (folder / name).mkdir()
        loggers.append(LOGGERS[name][0](folder / name))
    torch.manual_seed(0)
    monitor = GPUMemoryMonitor(2, print_summary=False)
    trainer = Trainer(
        max_steps=6,
        limit_val_batches=0,
        callbacks=[monitor],
        logger=loggers,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    if "wandb" in installed:
        importlib.import_module("wandb").finish()
    found = {name: [*LOGGERS[name][1](folder / name)] for name in installed}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
