import gc
import json
import logging
import os
import pickle
import re
import signal
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from jsonargparse import ArgumentParser
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback
from lightning_memsave.callbacks import oom_observer
from lightning_memsave.callbacks.oom_observer import OOMObserver
from lightning_memsave.errors import ConfigurationError, MemoryExhaustedError, MemsaveWarning
from lightning_memsave.measure.allocator import AllocatorReading
from lightning_memsave.measure.nvml import NvmlReading
from lightning_memsave.oom import report as _oom_facts
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.units import GIB
from tests import out_of_memory
from tests.callbacks.lit import (
    LIGHTNING,
    Vectors,
    callback_with,
    make_lit,
    make_trainer,
    only,
    quiet,
)
from tests.cases import WIDTH, make_model
from tests.helpers import set_clock
from tests.oom import messages as oom_messages
from tests.out_of_memory import OutOfMemoryAt

MESSAGE = oom_messages.FRAGMENTED.partition(": ")[2]
TEXT, JSON = Path("memsave_oom.txt"), Path("memsave_oom.json")


pytestmark = pytest.mark.usefixtures("only_own_tensors", "no_prediction")


@pytest.fixture
def real_message(monkeypatch):
    """What the mode raises is what CUDA says."""
    monkeypatch.setattr(out_of_memory, "MESSAGE", MESSAGE)


class Failing(nn.Module):
    """A model that runs out of memory in one of its forward passes, with tensors in hand."""

    def __init__(self, at, error=None, refs=None):
        super().__init__()
        self.inner = make_model("dropout")
        self.at, self.error, self.refs = at, error or torch.OutOfMemoryError(MESSAGE), refs
        self.num_calls = 0

    def forward(self, x):
        scores = x.repeat(3, 50).exp()
        loss = self.inner(x) + 0 * scores.mean()
        if self.refs is not None:
            self.refs.append(weakref.ref(scores))
        self.num_calls += 1
        if self.num_calls >= self.at:
            raise self.error
        return loss


class FullInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        run_out()


class EndsInBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make_model("dropout")
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(FullInBackward.apply(self.first(x)))


def fit_until_out_of_memory(
    package, lit, *callbacks, error=torch.OutOfMemoryError, stage="fit", **settings
):
    trainer = make_trainer(package, *callbacks, num_sanity_val_steps=0, **settings)
    with pytest.raises(error) as raised:
        getattr(trainer, stage)(lit)
    return trainer, raised.value


def fail(package, *callbacks, at=2, error=None, **settings):
    """Let a model run out of memory in a batch; give the error, and what is written of it."""
    lit, kind = make_lit(package, Failing(at, error)), type(error or torch.OutOfMemoryError())
    _, raised = fit_until_out_of_memory(package, lit, *callbacks, error=kind, **settings)
    assert raised is lit.model.error
    return raised, written()


def written():
    return json.loads(JSON.read_text()) if JSON.exists() else None


def sizes_of(lit, trainer):
    state = [t for o in trainer.optimizers for s in o.state.values() for t in s.values()]
    return {
        "parameter": 4 * sum(p.numel() for p in lit.parameters()),
        "optimizer_state": sum(t.nbytes for t in state),
    }


def test_writes_what_the_message_says_and_what_was_alive(package):
    lit, observer = make_lit(package, Failing(at=3)), OOMObserver()
    trainer, _ = fit_until_out_of_memory(package, lit, observer)
    found = written()
    assert found["diagnosis"]["cause"] == "fragmentation"
    assert found["diagnosis"]["oom"]["phase"] == "forward"
    assert found["diagnosis"]["oom"]["requested_bytes"] == 764 * 2**20
    assert found["error"].startswith("OutOfMemoryError: CUDA out of memory.")
    assert found["where"] == {
        "stage": "train",
        "epoch": 0,
        "global_step": 2,
        "batch": 2,
        "device": "cpu",
        "rank": 0,
        "world_size": 1,
        "precision": "32-true",
    }
    assert found["batch"] == [
        {"name": "batch", "shape": [4, WIDTH], "dtype": "float32", "device": "cpu"}
    ]
    by_category = found["alive"]["by_category"]
    assert {n: by_category[n] for n in ("parameter", "optimizer_state")} == sizes_of(lit, trainer)
    assert by_category["input"] == 4 * 4 * WIDTH
    assert found["alive"]["total_bytes"] == sum(by_category.values())
    names = [one["name"] for one in found["alive"]["largest"]]
    assert "model.inner.blocks.0.up.weight" in names
    scores = "scores in Failing.forward (test_oom_observer.py:"
    assert any(name.startswith(scores) for name in names)
    assert "training_step" in found["traceback"]
    assert found["versions"]["torch"]
    text = TEXT.read_text()
    assert text == str(observer.report)
    for line in (
        "Out of memory on cuda:0 in forward: free memory is scattered between tensors.",
        "  1. Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before Python starts",
        "  global step: 2",
        "  batch: (4, 64) float32 on cpu",
        "Tensors that were alive:",
        "optimizer_state",
        f"  {MESSAGE.partition(' If')[0]}",
    ):
        assert line in text


def arm_before(package, mode, hook):
    """Arms a mode that runs out of memory before a phase of the second step."""

    def arm(self, trainer, *args):
        mode.is_armed = trainer.global_step == 1

    return callback_with(package, **{hook: arm})


@pytest.mark.parametrize(
    ("hook", "phase"),
    [("on_before_backward", "backward"), ("on_before_optimizer_step", "optimizer")],
)
def test_tells_the_phase(package, real_message, hook, phase):
    mode = OutOfMemoryAt(40 if phase == "backward" else 0)
    observer = OOMObserver()
    lit = make_lit(package)
    with mode:
        fit_until_out_of_memory(package, lit, observer, arm_before(package, mode, hook))
    assert observer.report.diagnosis.oom.phase == phase
    by_category = observer.report.alive.by_category()
    assert by_category["gradient"] > 0
    if phase == "optimizer":
        assert by_category["gradient"] == by_category["parameter"]
        assert 'optimizer="8bit"' in TEXT.read_text()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_observes_evaluation(package, stage):
    _, found = fail(package, OOMObserver(), stage=stage)
    assert (found["where"]["stage"], found["where"]["batch"]) == (stage, 1)
    assert found["batch"]


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access"), KeyboardInterrupt()], ids=repr
)
def test_writes_nothing_when_memory_did_not_run_out(package, error):
    observer, lit = OOMObserver(), make_lit(package, Failing(at=2, error=error))
    kind = SystemExit if isinstance(error, KeyboardInterrupt) else type(error)
    fit_until_out_of_memory(package, lit, observer, error=kind)
    assert observer.report is None
    assert not TEXT.exists()
    assert not JSON.exists()


def test_looks_behind_an_error_that_memory_caused(package):
    class Wrapping(Failing):
        def forward(self, x):
            try:
                return super().forward(x)
            except torch.OutOfMemoryError as error:
                raise RuntimeError("layer 3 failed") from error

    observer = OOMObserver()
    lit = make_lit(package, Wrapping(at=2))
    fit_until_out_of_memory(package, lit, observer, error=RuntimeError)
    assert observer.report.diagnosis.cause == "fragmentation"
    assert any(one.name.startswith("scores in") for one in observer.report.largest)


@pytest.mark.parametrize(
    "error", [RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), MemoryError()], ids=repr
)
def test_observes_errors_in_a_librarys_own_words(package, error):
    _, found = fail(package, OOMObserver(), error=error)
    assert found["alive"]["by_category"]["parameter"] > 0


class TestWithMemSaveCallback:
    @staticmethod
    def suite():
        return quiet(activation_checkpointing=None, optimizer=None)

    def test_writes_when_nothing_smaller_is_left(self, package):
        lit = make_lit(package, Failing(at=2))
        callbacks = self.suite(), OOMObserver()
        fit_until_out_of_memory(package, lit, *callbacks, error=MemoryExhaustedError)
        found = written()
        assert found["error"].startswith("MemoryExhaustedError: Out of memory with one sample")
        assert found["diagnosis"]["cause"] == "fragmentation"
        # Not "optimizer", inside of whose step the closure runs the forward pass.
        assert found["diagnosis"]["oom"]["phase"] == "forward"
        assert "freed" in found["notes"][0]
        assert not any("Add `MemSaveCallback" in line for line in found["diagnosis"]["advice"])
        assert not any("smaller batch does not help" in a for a in found["diagnosis"]["advice"])

    def test_has_the_original_message_where_a_batch_cannot_be_repeated(self, package):
        lit = make_lit(package, EndsInBackward())
        suite = only(MicroBatching("halve"), optimizer_in_backward=True)
        callbacks = suite, OOMObserver(predict=False)
        _, error = fit_until_out_of_memory(package, lit, *callbacks, error=MemoryExhaustedError)
        assert "has updated parameters already" in str(error)
        assert MESSAGE in str(error)
        found = written()
        assert found["diagnosis"]["cause"] == "fragmentation"
        assert found["diagnosis"]["oom"]["phase"] == "backward"

    def test_writes_nothing_when_a_smaller_batch_fits(self, package):
        class OnceFull(Failing):
            def forward(self, x):
                if len(x) > 2:
                    raise torch.OutOfMemoryError(MESSAGE)
                return self.inner(x)

        lit = make_lit(package, OnceFull(at=99))
        with pytest.warns(MemsaveWarning, match="repeated with"):
            make_trainer(package, self.suite(), OOMObserver(), limit_val_batches=0).fit(lit)
        assert not TEXT.exists()


def run_out(*args, **kwargs):
    raise torch.OutOfMemoryError(MESSAGE)


@pytest.mark.parametrize(
    "hook", ["prepare_data", "setup", "configure_model", "configure_optimizers"]
)
def test_works_when_memory_runs_out_early(package, hook):
    lit = make_lit(package)
    setattr(lit, hook, run_out)
    fit_until_out_of_memory(package, lit, OOMObserver())
    found = written()
    assert found["diagnosis"]["cause"] == "fragmentation"
    assert found["batch"] == []
    assert found["notes"] == []


def test_writes_into_the_directory_of_the_logger_or_where_it_is_told(package, tmp_path, caplog):
    logger = package.loggers.CSVLogger(tmp_path / "logs", name="run")
    fail(package, OOMObserver(), logger=logger, log_every_n_steps=1)
    assert (Path(logger.log_dir) / TEXT).exists()
    with caplog.at_level(logging.WARNING, logger=f"{package.__name__}.memsave"):
        fail(package, OOMObserver(Path("new", "folder")))
    assert Path("new", "folder", JSON).exists()
    assert not JSON.exists()
    assert "scattered between tensors. See `new/folder/memsave_oom.txt`." in caplog.text


class TestNeverHidesTheException:
    @pytest.fixture(autouse=True)
    def every_warning_is_an_error(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*treespec", FutureWarning)
            warnings.filterwarnings("ignore", ".*workers", UserWarning)
            yield

    @pytest.mark.parametrize("what", ["write_files", "make_report", "find_alive_tensors"])
    def test_when_the_report_fails(self, package, monkeypatch, caplog, what):
        def cannot(*args, **kwargs):
            raise OSError("disk full")

        is_a_part = what == "find_alive_tensors"
        monkeypatch.setattr(_oom_facts if is_a_part else oom_observer, what, cannot)
        fail(package, OOMObserver())
        assert "disk full" in (TEXT.read_text() if is_a_part else caplog.text)

    def test_when_an_addition_fails_and_what_it_has_added_stays(self, package):
        class Adding(OOMObserver):
            def extend(self, report, trainer, pl_module):
                report.add_section("Remedies", ["bf16 saves 3.00 GiB"], {"bf16": 3 * GIB})
                report.add_file("memsave_oom.html", "<html></html>")
                report.add_file("memsave_oom.bin", b"\x00")
                raise ValueError("no figures")

        _, found = fail(package, Adding())
        assert found["notes"] == ["An addition to this report failed: ValueError: no figures"]
        assert "Remedies:\n  bf16 saves 3.00 GiB\n" in TEXT.read_text()
        assert found["sections"] == {"Remedies": {"bf16": 3 * GIB}}
        assert Path("memsave_oom.html").read_text() == "<html></html>"
        assert Path("memsave_oom.bin").read_bytes() == b"\x00"


def test_keeps_no_tensor_alive(package):
    refs: list[weakref.ref[torch.Tensor]] = []
    observer = OOMObserver()
    lit = make_lit(package, Failing(at=3, refs=refs))
    trainer = make_trainer(package, observer, num_sanity_val_steps=0)
    # Not `pytest.raises`, which keeps the exception.
    try:
        trainer.fit(lit)
    except torch.OutOfMemoryError:
        alive = refs[-1]() is not None
    assert alive
    lit.model.error = None  # the test raised one that it had kept, with its traceback
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert observer.report is not None


def test_a_subclass_adds_what_it_knows_of_the_module(package):
    class Own(OOMObserver):
        def extend(self, report, trainer, pl_module):
            report.add_section("Module", [type(pl_module).__name__], trainer.global_step)

    assert fail(package, Own())[1]["sections"] == {"Module": 1}


def outputs_kept(self, outputs):
    self.outputs = [*getattr(self, "outputs", []), outputs]


def metric_kept(self, outputs):
    self.metric.update(outputs)


OWNERS = {outputs_kept: "self.outputs", metric_kept: "self.metric.value"}


def keeping_lit(package, keep):
    def validation_step(self, batch, batch_idx):
        keep(self, self.model(batch).repeat(200_000))
        fail_at(batch_idx, 1)

    lit = make_lit(package, validation_step=validation_step)
    lit.metric = torchmetrics.CatMetric()
    return lit


def fail_at(batch_idx, last):
    if batch_idx == last:
        run_out()


class TestWhatIsKept:
    """Alive before the step, and in no prediction."""

    def check(self, package, lit, owner, *callbacks, stage="fit", **settings):
        callbacks = *callbacks, OOMObserver(".", predict=False)
        _, raised = fit_until_out_of_memory(package, lit, *callbacks, stage=stage, **settings)
        found = written()
        kept = found["diagnosis"]["kept"]
        assert kept["owner"] == owner
        assert kept["num_bytes"] == found["alive"]["kept"][owner]
        assert kept["before_bytes"] - kept["expected_bytes"] >= kept["num_bytes"]
        said = f": `{owner}` keeps "
        first, advice = raised.__notes__[0].splitlines()[0], found["diagnosis"]["advice"][0]
        assert re.search(r"alive before the step .*B, predicted .*B" + re.escape(said), first)
        assert TEXT.read_text().splitlines()[0] == first
        assert f"`{owner}`" in advice
        return found

    @pytest.mark.parametrize("stage", ["fit", "validate"])
    @pytest.mark.parametrize("keep", OWNERS)
    def test_by_a_module_or_its_metric(self, package, keep, stage):
        owner = OWNERS[keep]
        found = self.check(package, keeping_lit(package, keep), owner, stage=stage)
        assert found["diagnosis"]["kept"]["count"] >= 2
        advice = " ".join(found["diagnosis"]["advice"])
        assert 'MemSaveCallback(micro_batch_size="halve")' in advice
        for word in ("recompute", "8 bits", "8bit", "accumulate", "activation_checkpointing"):
            assert word not in advice
        assert len([one for one in found["alive"]["largest"] if one["name"] == owner]) == 1

    def test_by_graphs(self, package):
        def on_train_batch_start(self, batch, batch_idx):
            loss = self.model.inner(batch.repeat(500, 1))
            self.log_dict_of_losses["aux"].append(loss)

        lit = make_lit(package, Failing(at=4), on_train_batch_start=on_train_batch_start)
        lit.log_dict_of_losses = {"aux": []}
        found = self.check(package, lit, "self.log_dict_of_losses")
        assert found["diagnosis"]["kept"]["in_graphs"]
        assert "`loss.detach()`" in found["diagnosis"]["advice"][0]
        assert "in a graph of self.log_dict_of_losses" in TEXT.read_text()

    def test_is_not_said_of_what_a_step_needs(self, package):
        _, found = fail(package, OOMObserver(predict=False), at=3)
        assert found["diagnosis"]["kept"] is None

    def test_is_said_where_a_batch_has_been_repeated(self, package):
        """Also by the note of an error that lists the attempts."""
        lit, error = keeping_lit(package, outputs_kept), MemoryExhaustedError
        _, raised = fit_until_out_of_memory(package, lit, quiet(), error=error, stage="validate")
        (note,) = raised.__notes__
        assert "`self.outputs` keeps " in note.splitlines()[0]
        assert 'micro_batch_size="halve"' not in note


class TestAdviceOfTheTable:
    def notes(self, package, lit, **settings):
        suite = quiet(**settings)
        _, raised = fit_until_out_of_memory(package, lit, suite)
        return raised.__notes__[0], suite

    def lists_of_boxes(self, package):
        """As for detection: one dict for each image, with any number of boxes."""

        def training_step(self, batch, batch_idx):
            fail_at(batch_idx, 2)
            images, labels = batch
            return self.model(images) + 0 * sum(label["boxes"].sum() for label in labels)

        def collate(samples):
            boxes = [{"boxes": torch.zeros(i + 1, 4)} for i, _ in enumerate(samples)]
            return torch.stack(samples), boxes

        data = torch.utils.data.DataLoader(Vectors(), batch_size=4, collate_fn=collate)
        steps = {"training_step": training_step, "train_dataloader": lambda self: data}
        return make_lit(package, **steps)

    def test_has_nothing_that_is_on_or_refused_and_what_the_table_names(self, package):
        note, suite = self.notes(package, self.lists_of_boxes(package), optimizer="8bit")
        status = {row.name: row.status for row in suite.rows}
        assert status["micro_batch_size"] == "off"
        assert status["activation_checkpointing"] == "on"
        for name in ("activation_checkpointing", "micro_batch_size", "optimizer"):
            assert f"`{name}=" not in note
        assert "Pass `split_batch=`, a function of batch and size" in note
        assert any("split_batch" in text for row in suite.rows for text in row.details)

    def test_has_what_is_neither_on_nor_refused(self, package):
        note, _ = self.notes(package, self.lists_of_boxes(package), preset="off", attention=None)
        assert '`activation_checkpointing="all"`' in note
        assert '`optimizer="8bit"`' in note

    def test_predictions_leave_out_what_is_refused(self, package):
        lit = self.lists_of_boxes(package)
        fit_until_out_of_memory(package, lit, quiet(), OOMObserver(predict=60.0))
        sections = written()["sections"]
        remedies = sections.get("What would have helped", {})
        assert not any("micro_batch_size=" in text for text in remedies if text != "unchanged")


class TestRemedies:
    def fit(self, package, *callbacks, **settings):
        lit = make_lit(package, make_model("dropout"))
        mode = OutOfMemoryAt(40)
        arm = arm_before(package, mode, "on_before_backward")
        with mode:
            observer = OOMObserver(**{"predict": 60.0, **settings})
            fit_until_out_of_memory(package, lit, *callbacks, observer, arm)
        return written()

    def test_predicts_what_would_have_helped(self, package):
        found = self.fit(package)

        assert found["notes"] == []
        remedies = found["sections"]["What would have helped"]
        unchanged, *others = remedies.values()
        assert next(iter(remedies)) == "unchanged"
        assert 'MemSaveCallback(preset="off", optimizer="8bit")' in remedies
        assert all(other["peak_bytes"] < unchanged["peak_bytes"] for other in others)
        measured = only(report=True)
        make_trainer(package, measured).fit(make_lit(package, make_model("dropout")))
        # But for the loss of the step before, which the monitor does not see.
        assert unchanged["peak_bytes"] == measured.monitor.summary.peak_bytes + 4
        assert "What would have helped:" in TEXT.read_text()
        assert "The step that ran out of memory" in Path("memsave_oom.html").read_text()

    def test_a_model_that_cannot_be_predicted_is_said(self, package):
        _, found = fail(package, OOMObserver(predict=60.0), at=3)
        assert found["sections"] == {}
        assert "OutOfMemoryError" in found["notes"][0]

    def test_the_prediction_of_the_step_counts_for_the_limit(self, package, monkeypatch):
        """Nothing is left for remedies, and the report says what it knows."""
        now_s = [0.0]
        set_clock(monkeypatch, lambda: now_s[0])
        base = WhatIf.base

        def slow_base(what_if):
            now_s[0] = 60.0
            return base(what_if)

        monkeypatch.setattr(WhatIf, "base", slow_base)
        found = self.fit(package, predict=60)["sections"]["What would have helped"]
        assert list(found) == ["unchanged"]

    def test_can_be_left_out(self, package):
        assert self.fit(package, predict=False)["sections"] == {}
        assert not Path("memsave_oom.html").exists()


def test_each_rank_has_files_of_its_own(monkeypatch):
    lit = make_lit(model=Failing(at=2))

    class Adding(OOMObserver):
        def extend(self, report, trainer, pl_module):
            report.add_file("memsave_oom.html", "x")

    observer = Adding()
    trainer, error = fit_until_out_of_memory(LIGHTNING, lit, observer, limit_train_batches=2)
    for path in Path().glob("memsave_oom*"):
        path.unlink()
    monkeypatch.setattr(type(trainer), "world_size", 4)
    monkeypatch.setattr(type(trainer), "global_rank", 3)
    observer.on_exception(trainer, lit, error)
    assert sorted(path.name for path in Path().glob("memsave_oom*")) == [
        "memsave_oom_rank3.html",
        "memsave_oom_rank3.json",
        "memsave_oom_rank3.txt",
    ]


class TestOnCuda:
    """What needs CUDA's allocator and driver, with both replaced."""

    @pytest.fixture
    def calls(self, monkeypatch):
        calls: list[object] = []
        reading = AllocatorReading(7 * GIB, 9 * GIB, 8 * GIB, 9 * GIB, 3, 1)
        monkeypatch.setattr(_oom_facts, "read_allocator", lambda device: reading)
        nvml = NvmlReading(11 * GIB, 12 * GIB, 10 * GIB, GIB)
        monkeypatch.setattr(_oom_facts, "read_nvml", lambda device, reserved: nvml)
        monkeypatch.setattr(_oom_facts, "find_alive_tensors", lambda *a, **k: [])
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
        record = lambda **k: calls.append(k)  # noqa: E731
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
        return calls

    @pytest.fixture
    def trainer(self, monkeypatch):
        trainer = make_trainer()
        device = property(lambda self: torch.device("cuda", 0))
        monkeypatch.setattr(type(trainer.strategy), "root_device", device)
        return trainer

    def test_writes_allocator_driver_and_snapshot(self, trainer, calls):
        observer = OOMObserver()
        observer.setup(trainer, None, "fit")
        observer.on_exception(trainer, None, torch.OutOfMemoryError(MESSAGE))
        found = written()
        assert found["allocator"]["num_alloc_retries"] == 3
        assert found["nvml"]["process_bytes"] == 10 * GIB
        text = TEXT.read_text()
        assert "7.00 GiB  allocated beside them" in text
        assert "process: 10.00 GiB" in text
        snapshot = pickle.loads(Path("memsave_oom_snapshot.pickle").read_bytes())
        assert snapshot == {"segments": []}
        assert calls == []

    @pytest.mark.parametrize("end", ["teardown", "on_exception"])
    def test_records_from_setup_to_the_end_if_asked(self, trainer, calls, end):
        observer = OOMObserver(record_history=True)
        observer.setup(trainer, None, "fit")
        assert calls == [{"max_entries": 100_000}]
        getattr(observer, end)(trainer, None, ValueError())
        observer.teardown(trainer, None, "fit")
        assert calls == [{"max_entries": 100_000}, {"enabled": None}]


@pytest.mark.gpu
def test_a_real_out_of_memory_error(package):
    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            kept = [self.linear(x).repeat(2**16, 1)]
            while True:
                kept.append(kept[-1].exp())

    observer = OOMObserver(record_history=True)
    lit = make_lit(package, Hungry())
    fit_until_out_of_memory(package, lit, observer, accelerator="gpu")
    report = observer.report
    oom = report.diagnosis.oom
    assert oom.device == "cuda"
    assert oom.requested_bytes
    assert oom.capacity_bytes == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.01)
    assert oom.phase == "forward"
    is_limited = torch.cuda.get_per_process_memory_fraction() < 1
    assert report.diagnosis.cause in ({"limit"} if is_limited else {"full", "other_process"})
    # Nothing else is on the device, so that what is found is what is allocated.
    assert report.alive.total_bytes == pytest.approx(report.allocator.allocated_bytes, rel=0.02)
    assert any(re.match(r"kept in .*Hungry\.forward \(", one.name) for one in report.largest)
    assert report.allocator.num_ooms >= 1
    snapshot = pickle.loads(Path("memsave_oom_snapshot.pickle").read_bytes())
    assert snapshot["segments"]


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({"dirpath": 3}, 'dirpath="reports"'),
        ({"record_history": "yes"}, "record_history=True"),
        ({"dirpath": 3, "record_history": 1}, "2 problems"),
    ],
    ids=str,
)
def test_refuses_bad_arguments(arguments, fix):
    with pytest.raises(ConfigurationError, match="OOMObserver cannot be created") as raised:
        OOMObserver(**arguments)
    assert fix in str(raised.value)


def test_can_be_pickled_in_the_middle_of_a_batch():
    observer = OOMObserver("reports")
    observer.on_train_batch_start(None, None, torch.zeros(2, 3), 0)
    assert pickle.loads(pickle.dumps(observer)).dirpath == "reports"


def test_is_a_callback_of_the_command_line(package):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(package.Callback, "callback")
    arguments = [f"--callback={OOMObserver.__module__}.OOMObserver", "--callback.dirpath=x"]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    callback = instantiate(parser.parse_args(arguments)).callback
    assert isinstance(callback, OOMObserver)
    assert callback.dirpath == "x"


def test_names_the_tensors_of_a_nested_batch():
    batch = SimpleNamespace(x=torch.zeros(1))
    assert list(_oom_facts.describe_batch(batch)) == []
    names = [t.name for t in _oom_facts.describe_batch([{"a": torch.zeros(2)}, torch.zeros(3)])]
    assert names == ["batch[0]['a']", "batch[1]"]


class KilledInWorker(Vectors):
    """Its worker gets what the kernel sends where the memory of the host ran out."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_is_told_what_helps_on_the_host():
    loader = DataLoader(KilledInWorker(), batch_size=4, num_workers=1)
    lit = make_lit(train_dataloader=lambda self: loader)
    _, error = fit_until_out_of_memory(LIGHTNING, lit, MemSaveCallback(), error=RuntimeError)
    (note,) = (n for n in error.__notes__ if "What to do" in n)
    assert "the system killed a process" in note
    assert "num_workers" in note
    assert "host_budget" in note
