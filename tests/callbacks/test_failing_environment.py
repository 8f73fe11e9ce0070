"""Disks, folders, output and drivers that fail in the middle of a fit: it goes on, or says why."""

import json
import logging
import os
import shutil
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from benchmarks.faults.driver import FakeDriver
from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.oom_observer import OOMObserver
from lightning_memsave.callbacks.start_advice import is_whole
from lightning_memsave.errors import MemsaveWarning
from lightning_memsave.units import GIB
from tests.callbacks.lit import LIGHTNING, callback_with, fit, loader, make_lit, make_trainer, quiet
from tests.helpers import full_disk, seed_torch
from tests.out_of_memory import MESSAGE

# Lightning's: that a folder has checkpoints, and that those who wrote them are not here.
pytestmark = [
    pytest.mark.usefixtures("no_prediction", "any_saving_counts"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
REPORT, TEXT, JSON = Path("memsave_report.json"), Path("memsave_oom.txt"), Path("memsave_oom.json")


def at_step(number, do):
    return callback_with(
        on_train_batch_start=lambda self, trainer, *_: trainer.global_step == number and do()
    )


def raise_out_of_memory():
    raise torch.OutOfMemoryError(MESSAGE)


def assert_as_undisturbed(found, package=LIGHTNING):
    losses, state, _ = fit(make_lit(package), MemSaveCallback(report=False), package=package)
    assert found[0] == losses
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in state.items())


def memsave_warnings(caught):
    return [str(one.message) for one in caught if issubclass(one.category, MemsaveWarning)]


def names():
    return sorted(path.name for path in Path.cwd().iterdir())


@contextmanager
def output_to(where):
    """What a shell does with ``> file`` or ``| head``."""
    if where == "closed pipe":
        reads, descriptor = os.pipe()
        os.close(reads)
    else:
        descriptor = os.open(where, os.O_CREAT | os.O_WRONLY)
    file = os.fdopen(descriptor, "w")
    with redirect_stdout(file):
        yield
    with suppress(OSError):  # what is left in its buffer
        file.close()


class TestFullDisk:
    def test_the_older_report_is_kept_and_training_is_the_same(self, package, recwarn, capsys):
        REPORT.write_text("older")
        with full_disk():
            found = fit(make_lit(package), MemSaveCallback(), package=package)
        (said,) = memsave_warnings(recwarn)
        assert "memsave_report.json` cannot be written (OSError: [Errno 27] File too" in said
        assert REPORT.read_text() == "older"
        assert names() == ["memsave_report.json"]
        assert_as_undisturbed(found, package)

    def test_older_reports_of_memory_are_kept_and_the_error_is_seen(self, caplog):
        for path in (TEXT, JSON):
            path.write_text("older")
        callbacks = quiet(), OOMObserver(), at_step(2, raise_out_of_memory)
        with full_disk(), pytest.raises(torch.OutOfMemoryError) as raised:
            fit(make_lit(), *callbacks)
        assert str(raised.value) == MESSAGE
        (said,) = [r.message for r in caplog.records if "Not written" in r.message]
        assert "memsave_oom.txt" in said
        assert "memsave_oom.json (OSError: [Errno 27] File too large). Use" in said
        assert "See `" not in caplog.text
        assert (TEXT.read_text(), JSON.read_text()) == ("older", "older")

    def test_one_file_without_room_leaves_the_others(self, caplog):
        class Adding(OOMObserver):
            def extend(self, report, trainer, pl_module):
                report.add_file("memsave_oom.html", "x" * 10**6)

        fails = at_step(2, raise_out_of_memory)
        with full_disk(200_000), pytest.raises(torch.OutOfMemoryError):
            fit(make_lit(), Adding(), fails)
        assert names() == ["memsave_oom.json", "memsave_oom.txt"]
        assert json.loads(JSON.read_text())["where"]["batch"] == 2
        assert "Not written: " in caplog.text
        assert "memsave_oom.html (OSError" in caplog.text

    @pytest.mark.parametrize("where", ["out.txt", "closed pipe"])
    def test_output_that_cannot_be_written(self, where, caplog):
        with full_disk(), output_to(where):
            found = fit(make_lit(), MemSaveCallback(), default_root_dir="memory://fits")
        said = [r.message for r in caplog.records if "standard output" in r.message]
        assert len(said) == 2  # the table, and the memory of the fit
        assert_as_undisturbed(found)

    @pytest.mark.parametrize(("save_top_k", "save_last"), [(1, True), (1, "link"), (-1, None)])
    def test_the_last_checkpoint_is_whole_and_resumed(self, save_top_k, save_last, tmp_path):
        folder = tmp_path / "checkpoints"

        def checkpoint():
            return ModelCheckpoint(folder, save_top_k=save_top_k, save_last=save_last)

        until_end = ExitStack()
        # In the third epoch; a part of the next checkpoint can still be written.
        fails = at_step(14, lambda: until_end.enter_context(full_disk(1000)))
        with until_end, pytest.raises(OSError, match="File too large"):
            train(fails, checkpoint(), enable_checkpointing=True, max_epochs=4)
        whole = [path for path in folder.iterdir() if is_whole(path)]
        newest = max(whole, key=lambda path: torch.load(path, weights_only=False)["global_step"])
        assert torch.load(newest, weights_only=False)["global_step"] == 12
        resumed, undisturbed = train(max_epochs=4, ckpt_path=newest), train(max_epochs=4)
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in undisturbed.items())


def train(*callbacks, ckpt_path=None, **settings):
    """Fit with seeds of each batch, as random states are not in checkpoints."""
    lit = make_lit(model="unrepeated")
    lit.on_train_batch_start = lambda batch, batch_idx: seed_torch(lit.global_step)
    make_trainer(LIGHTNING, quiet(), *callbacks, **settings).fit(lit, ckpt_path=ckpt_path)
    return lit.state_dict()


class TestCheckpointThatIsNotWhole:
    @pytest.fixture
    def folder(self):
        """Three checkpoints, of which the last one is overwritten by the test."""
        checkpoint = ModelCheckpoint("c", save_top_k=-1, save_last=True, every_n_train_steps=2)
        train(checkpoint, enable_checkpointing=True)
        for number, path in enumerate(sorted(Path("c").iterdir())):
            os.utime(path, (number, number))
        return Path("c")

    # In the last, the end of the directory at its end.
    @pytest.mark.parametrize("num_bytes", [0, 1, 100, 0.5, -1])
    def test_the_error_names_it_and_another_one(self, num_bytes, folder):
        last = folder / "last.ckpt"
        data = last.read_bytes()
        last.write_bytes(data[: int(num_bytes * len(data)) if num_bytes == 0.5 else num_bytes])
        before = {path: path.read_bytes() for path in folder.iterdir()}
        checkpoint = ModelCheckpoint(folder, save_top_k=1, save_last=True, save_on_exception=True)
        for path in (last, "last"):
            with pytest.raises(Exception) as raised:  # noqa: PT011 - each length has its own
                train(checkpoint, enable_checkpointing=True, ckpt_path=path)
            (note,) = raised.value.__notes__
            named = last if path is last else last.resolve()
            assert note.startswith(f"The checkpoint `{named}` (")
            newest = named.with_name("epoch=0-step=6.ckpt")
            assert note.endswith(f"that is whole: `ckpt_path={str(newest)!r}`.")
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        train(max_epochs=2, ckpt_path=newest)

    def test_without_another_one_and_in_an_evaluation(self, package):
        Path("only.ckpt").write_bytes(b"")
        with pytest.raises(EOFError) as raised:
            train(ckpt_path="only.ckpt")
        assert "start without `ckpt_path`" in raised.value.__notes__[0]
        trainer = make_trainer(package, MemSaveCallback(report=False))
        with pytest.raises(EOFError) as raised:
            trainer.test(make_lit(package), ckpt_path="only.ckpt")
        assert "`only.ckpt` (0 B) is not whole" in raised.value.__notes__[0]

    def test_other_errors_have_no_note(self, folder):
        """Neither where it is whole, nor where it was changed after the start."""
        last = folder / "last.ckpt"
        with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key") as raised:
            make_trainer(LIGHTNING, quiet()).fit(make_lit(), ckpt_path=last)
        assert not hasattr(raised.value, "__notes__")

        def fail():
            last.write_bytes(b"")
            raise ArithmeticError

        with pytest.raises(ArithmeticError) as later:
            train(at_step(7, fail), max_epochs=2, ckpt_path=last)
        assert not hasattr(later.value, "__notes__")


class TestFolders:
    @pytest.mark.parametrize("kind", ["removed", "a file", "under a file"])
    def test_a_root_folder_that_is_gone_ends_no_fit(self, kind, recwarn):
        root = Path("root", "of", "runs")
        root.mkdir(parents=True)

        def remove():
            shutil.rmtree("root")
            if kind == "a file":
                Path("root", "of").mkdir(parents=True)
                root.write_text("")
            elif kind == "under a file":
                Path("root").write_text("")

        found = fit(make_lit(), MemSaveCallback(), at_step(3, remove), default_root_dir=root)
        said = memsave_warnings(recwarn)
        if kind == "removed":
            assert said == []
            assert json.loads((root / REPORT).read_text())["status"] == "finished"
        else:
            (one,) = said
            assert one.startswith(f"`{root}/{REPORT}` cannot be written (")
        assert_as_undisturbed(found)

    def test_a_logger_that_fails_for_memory_alone_ends_no_fit(self, caplog):
        class Failing(CSVLogger):
            def log_metrics(self, metrics, step=None):
                if any(name.startswith("memory/") for name in metrics):
                    raise OSError(30, "Read-only file system")
                super().log_metrics(metrics, step)

        memsave = MemSaveCallback(report=False)
        found = fit(make_lit(), memsave, logger=Failing("logs"), log_every_n_steps=1)
        said = [r.message for r in caplog.records if "Memory is not logged" in r.message]
        assert said == [
            "Memory is not logged by `Failing`: OSError: [Errno 30] Read-only file system"
        ]
        assert_as_undisturbed(found)


ERRORS = (
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_UNINITIALIZED,
)


@pytest.fixture
def driver(monkeypatch):
    return FakeDriver(monkeypatch.setattr)


class TestDriver:
    @pytest.mark.parametrize(("code", "num_calls"), [*zip(ERRORS, (0, 1, 5), strict=True)])
    def test_figures_end_and_training_does_not(self, code, num_calls, driver, caplog):
        error = pynvml.NVMLError(code)
        driver.fail(error, num_calls)
        monitor = GPUMemoryMonitor(1)
        with caplog.at_level(logging.INFO, logger="lightning.pytorch.memsave"):
            logger = CSVLogger("logs")
            memsave = MemSaveCallback(report=False)
            found = fit(make_lit(), memsave, monitor, logger=logger, log_every_n_steps=1)
        reason = str(error)
        assert any(reason in note for note in monitor.summary.notes)
        assert any(reason in r.message for r in caplog.records if "GPUMemoryMonitor" in r.message)
        assert monitor.summary.peak_bytes == 5
        assert_as_undisturbed(found)

    def test_the_peak_is_of_the_process_or_of_the_gpu_and_not_of_both(self, driver, monkeypatch):
        monitor = GPUMemoryMonitor()
        read = pynvml.nvmlDeviceGetComputeRunningProcesses
        calls = []

        def fail_twice(handle):
            calls.append(handle)
            if len(calls) <= 2:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
            return read(handle)

        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", fail_twice)
        fit(make_lit(), monitor)
        assert (monitor.summary.nvml_peak_bytes, monitor.summary.is_nvml_of_gpu) == (GIB, False)
        assert len(calls) > 2

    @pytest.mark.parametrize("lost", [0, 1])
    def test_on_one_of_two_processes(self, lost, driver, package):
        monitor = GPUMemoryMonitor(1)

        def lose(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_rank == lost and batch_idx == 1:
                driver.fail(pynvml.NVMLError(ERRORS[0]))

        def write(self, trainer, pl_module):
            found = monitor.summary.to_dict()
            Path(f"{trainer.global_rank}.json").write_text(json.dumps(found))

        losing = callback_with(package, on_train_batch_start=lose, on_fit_end=write)
        settings = {"devices": 2, "strategy": "ddp_fork", "limit_val_batches": 0}
        make_trainer(package, monitor, losing, **settings).fit(make_lit(package), loader())
        for rank in (0, 1):
            found = json.loads(Path(f"{rank}.json").read_text())
            assert (found["nvml_peak_bytes"], found["is_nvml_of_gpu"]) == (GIB, False)
            assert bool(found["notes"]) == (rank == lost)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", False), (b"P", False), (b"PK\x03\x04 and no more", False), (b"\x80\x02 of old", True)],
)
def test_what_is_known_not_to_be_whole(tmp_path, content, expected):
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    assert is_whole(path) is expected
    torch.save({"a": torch.ones(3)}, path)
    assert is_whole(path)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert is_whole(path)
