import copy
import functools
import importlib
import io
import json
import logging
import multiprocessing
import pickle
import re
import sys
from csv import DictReader
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from matplotlib import pyplot
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave.callbacks import memory_probes as _memory_probes
from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.callbacks.memory_probes import CudaProbe, Probe
from lightning_memsave.callbacks.memory_summary import MemorySummary, print_summary
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.nested import first_size
from lightning_memsave.errors import ConfigurationError, MissingDependencyError
from lightning_memsave.measure.allocator import AllocatorReading
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.measure.nvml import NvmlReading
from lightning_memsave.prediction.cuda.gpus import parse_gpu
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.work import Kernel, Work
from lightning_memsave.trainer.distributed import reduce_over_ranks
from lightning_memsave.units import GIB, format_bytes
from tests.callbacks import lit
from tests.callbacks.lit import no_step

NUM_SAMPLES, BATCH_SIZE = 40, 4
NUM_PARAMETERS = 64 * 256 + 256 + 256 + 1


@pytest.fixture
def counted(monkeypatch):
    """The Trainer's batches, from zero, in which live tensors were counted."""
    batches = []

    def track_input(self, batch):
        batches.append(int(batch[1][0]) // BATCH_SIZE)
        LiveTensors.track_input(self, batch)

    spy = type("Spy", (LiveTensors,), {"track_input": track_input})
    monkeypatch.setattr(_memory_probes, "LiveTensors", spy)
    return batches


def validation_step(self, batch, batch_idx):
    self.model(batch[0])


def make_module(package, **attributes):
    def training_step(self, batch, batch_idx):
        loss = self.model(batch[0]).pow(2).mean()
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1)
    methods = {"training_step": training_step, "validation_step": no_step} | attributes
    module = lit.make_lit(package, nn.Sequential(*layers), **methods)
    module.losses = []
    return module


def loader():
    torch.manual_seed(1)
    samples = TensorDataset(torch.randn(NUM_SAMPLES, 64), torch.arange(NUM_SAMPLES))
    return DataLoader(samples, batch_size=BATCH_SIZE)


make_trainer = functools.partial(lit.make_trainer, log_every_n_steps=1)


def fit(package, *callbacks, module=None, **arguments):
    module, trainer = module or make_module(package), make_trainer(package, *callbacks, **arguments)
    trainer.fit(module, loader(), loader())
    return trainer


def loggers(package, path):
    module = importlib.import_module(f"{package.__name__}.loggers")

    class Memory(module.CSVLogger):  # type: ignore[name-defined, misc]
        """A second logger, which keeps what it is given."""

        def __init__(self):
            super().__init__(path, name="second")
            self.monitored = []
            self.others = []

        def log_metrics(self, metrics, step=None):
            (self.monitored if "memory/host_rss_gib" in metrics else self.others).append(
                (step, dict(metrics))
            )

    return module.CSVLogger(path, name="first"), Memory()


def logged_rows(logger):
    (path,) = Path(logger.save_dir, logger.name).rglob("metrics.csv")
    with path.open() as file:
        return [row for row in DictReader(file) if row["memory/host_rss_gib"]]


def test_logs_to_every_logger_at_the_right_steps(package, tmp_path):
    csv, memory = loggers(package, tmp_path)
    trainer = fit(package, GPUMemoryMonitor(3), logger=[csv, memory], max_epochs=2)
    rows = logged_rows(csv)
    assert [int(row["step"]) for row in rows] == [2, 5, 8, 11, 14, 17]
    assert [step for step, _ in memory.monitored] == [2, 5, 8, 11, 14, 17]
    assert [step for step, _ in memory.others] == list(range(20))  # Lightning's own metrics
    for row, (_, metrics) in zip(rows, memory.monitored, strict=True):
        found = {key for key, value in row.items() if key.startswith("memory/") and value}
        assert found == metrics.keys() <= documented_keys()
    assert trainer.callback_metrics.keys() == {"loss"}


def test_values_on_cpu(package, tmp_path):
    memory = loggers(package, tmp_path)[1]
    fit(package, GPUMemoryMonitor(1), logger=memory)
    _, metrics = memory.monitored[-1]
    names = ("live_gib", "peak_live_gib", "host_rss_gib")
    assert metrics.keys() == {f"memory/{name}" for name in names}
    # After a step: parameters, gradients, two moments, and less than a kB of steps and losses; at
    # its peak at least one temporary of the optimizer besides, as large as the first weight.
    state_bytes = 4 * 4 * NUM_PARAMETERS
    batch_bytes = BATCH_SIZE * (64 * 4 + 8)
    assert state_bytes + batch_bytes <= metrics["memory/live_gib"] * GIB
    assert metrics["memory/live_gib"] * GIB < state_bytes + batch_bytes + 1000
    assert metrics["memory/peak_live_gib"] * GIB > state_bytes + batch_bytes + 4 * 64 * 256
    assert 0.05 < metrics["memory/host_rss_gib"] < 100


def test_accumulated_batches_are_one_step(package, tmp_path, counted):
    memory = loggers(package, tmp_path)[1]
    monitor = GPUMemoryMonitor(4)
    fit(package, monitor, logger=memory, accumulate_grad_batches=2)
    assert [step for step, _ in memory.monitored] == [3]
    assert counted == [0, 1, 2, 3, 6, 7]  # two batches each of the first two steps and the fourth
    assert monitor.summary.num_steps == 5
    counted.clear()
    fit(package, GPUMemoryMonitor(5))
    assert counted == [0, 1, 4, 9]


@pytest.mark.parametrize("window", [1, 3])
def test_training_is_the_same_bit_for_bit(package, window):
    modules = []
    for callbacks in ([], [GPUMemoryMonitor(2)]):
        modules.append(make_module(package))
        trainer = make_trainer(package, *callbacks, accumulate_grad_batches=window, max_epochs=2)
        data = loader()
        torch.manual_seed(2)
        trainer.fit(modules[-1], data)
    plain, monitored = modules
    assert len(plain.losses) == 20
    assert all(map(torch.equal, plain.losses, monitored.losses))
    assert all(map(torch.equal, plain.parameters(), monitored.parameters()))


def test_summary(package, capsys):
    monitor = GPUMemoryMonitor()
    fit(
        package, monitor, module=make_module(package, validation_step=validation_step), max_epochs=2
    )
    summary = monitor.summary
    assert (summary.num_steps, summary.num_samples) == (20, 80)
    assert summary.by_category["parameter"] == 4 * NUM_PARAMETERS
    assert summary.by_category["optimizer_state"] == 8 * NUM_PARAMETERS + 16
    assert summary.by_category["input"] == BATCH_SIZE * (64 * 4 + 8)
    assert summary.peak_bytes == sum(summary.by_category.values())
    assert summary.samples_per_second == pytest.approx(80 / summary.seconds)
    assert json.loads(json.dumps(summary.to_dict()))["steps_per_second"] > 0
    assert (summary.device, summary.notes) == ("cpu", ())
    printed = capsys.readouterr().out
    assert printed.count("Memory of this fit") == 1
    assert "samples: 80 (" in printed


def test_time_of_validation_is_left_out(package, monkeypatch):
    # A clock that only the steps move: one second for training, a hundred for validation.
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("lightning_memsave.callbacks.memory_monitor.time", clock)

    def training_step(self, batch, batch_idx):
        now[0] += 1
        return self.model(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        now[0] += 100

    module = make_module(package, training_step=training_step, validation_step=validation_step)
    monitor = GPUMemoryMonitor()
    fit(package, monitor, module=module, max_epochs=2)
    assert monitor.summary.seconds == 20


@pytest.mark.parametrize(
    ("arguments", "num_steps"),
    [({"fast_dev_run": 2}, 2), ({"max_steps": 3}, 3), ({"max_epochs": 0}, 0)],
    ids=str,
)
def test_short_fits_and_nothing_is_printed_if_told_so(package, arguments, num_steps, capsys):
    monitor = GPUMemoryMonitor(every_n_steps=1, print_summary=False)
    module = make_module(package, validation_step=validation_step)
    fit(package, monitor, module=module, **arguments)
    summary = monitor.summary
    # With nothing to do Lightning never starts to train.
    assert (0 if summary is None else summary.num_steps) == num_steps
    assert "Memory of this fit" not in capsys.readouterr().out


def test_fit_twice_measures_twice(package, tmp_path):
    memory = loggers(package, tmp_path)[1]
    monitor = GPUMemoryMonitor(every_n_steps=10)
    trainer = make_trainer(package, monitor, logger=memory, max_epochs=1)
    module = make_module(package)
    trainer.fit(module, loader())
    first = monitor.summary
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert (first.num_steps, monitor.summary.num_steps) == (10, 10)
    assert monitor.summary is not first
    assert [step for step, _ in memory.monitored] == [9, 19]


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_does_nothing_outside_fit(package, stage, counted):
    monitor = GPUMemoryMonitor(1)
    module = make_module(
        package,
        validation_step=validation_step,
        predict_step=lambda self, batch, batch_idx: batch[0],
    )
    getattr(make_trainer(package, monitor), stage)(module, loader())
    assert counted == []
    assert monitor.summary is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_exception_in_the_middle_of_a_step(package, capsys, error):
    """An interrupted fit shows its summary; after an error, the traceback is what is to be seen."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise error
        return self.model(batch[0]).mean()

    monitor = GPUMemoryMonitor()
    module = make_module(package, training_step=training_step)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(package, monitor, module=module)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    assert monitor.summary.num_steps == 1
    assert monitor.summary.notes == (f"fit was ended by {error.__name__}",)
    said = capsys.readouterr().out
    is_interrupted = error is KeyboardInterrupt
    assert ("Memory of this fit" in said) == is_interrupted
    assert ("note: fit was ended by KeyboardInterrupt" in said) == is_interrupted


def test_batches_that_the_module_skips(package):
    # Lightning then ends the epoch without `on_train_batch_end`.
    modes = []
    module = make_module(
        package,
        on_train_batch_start=lambda self, batch, batch_idx: -1 if batch_idx == 1 else None,
        on_train_epoch_end=lambda self: modes.append(torch._C._len_torch_dispatch_stack()),
    )
    monitor = GPUMemoryMonitor(1)
    fit(package, monitor, module=module, max_epochs=2)
    assert modes == [0, 0]
    assert monitor.summary.num_steps == 2


def test_manual_optimization_with_two_optimizers(package, tmp_path):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.model(batch[0]).mean())
            optimizer.step()

    module = make_module(
        package,
        training_step=training_step,
        automatic_optimization=False,
        configure_optimizers=lambda self: [
            torch.optim.SGD(self.model[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.model[3].parameters()),
        ],
    )
    memory = loggers(package, tmp_path)[1]
    monitor = GPUMemoryMonitor(5)
    fit(package, monitor, module=module, logger=memory)
    assert [step for step, _ in memory.monitored] == [4, 9]
    assert monitor.summary.num_steps == 10
    first, last = 64 * 256 + 256, 256 + 1
    assert monitor.summary.by_category["optimizer_state"] == 4 * first + 8 * last + 8


def test_compiled_modules_are_not_counted(package, tmp_path, counted):
    module = make_module(package)
    module.model[0] = torch.compile(module.model[0], backend="eager")
    memory = loggers(package, tmp_path)[1]
    monitor = GPUMemoryMonitor(1)
    fit(package, monitor, module=module, logger=memory, max_steps=2)
    assert counted == []
    assert monitor.summary.peak_bytes is None
    assert len(monitor.summary.notes) == 1
    assert "not counted in a module with `torch.compile`" in monitor.summary.notes[0]
    assert memory.monitored[0][1].keys() == {"memory/host_rss_gib"}


def test_the_second_monitor_does_nothing(package, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(package.__name__), "propagate", True)
    memory = loggers(package, tmp_path)[1]
    first, second = GPUMemoryMonitor(5), GPUMemoryMonitor(1)
    fit(package, first, second, logger=memory)
    assert [step for step, _ in memory.monitored] == [4, 9]
    assert first.summary is not None
    assert second.summary is None
    assert "Another `GPUMemoryMonitor` measures already" in caplog.text


def test_copies_and_pickles_after_a_fit(package):
    monitor = GPUMemoryMonitor(7)
    fit(package, monitor, max_steps=1)
    for name in ("log", "log_dict"):
        delattr(monitor, name)  # Lightning puts it there, bound to the module
    for other in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert other.every_n_steps == 7
        assert other.summary == monitor.summary


def test_on_the_command_line_of_either_package(package):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(package.Callback, "callback")
    path = f"{GPUMemoryMonitor.__module__}.GPUMemoryMonitor"
    arguments = [f"--callback={path}", "--callback.every_n_steps=7"]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    monitor = instantiate(parser.parse_args(arguments)).callback
    assert isinstance(monitor, GPUMemoryMonitor)
    assert (monitor.every_n_steps, monitor.print_summary) == (7, True)
    again = eval(repr(GPUMemoryMonitor(7, print_summary=False)))
    assert (again.every_n_steps, again.print_summary) == (7, False)
    with pytest.raises(ArgumentError, match="every_n_steps"):
        parser.parse_args([arguments[0], "--callback.every_n_steps=often"])


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        *(({"every_n_steps": n}, "Use `every_n_steps=1`") for n in (0, -3, "50", True, 2.5)),
        ({"print_summary": "no"}, "Use `print_summary=False`"),
        ({"every_n_steps": 0, "print_summary": 1}, "2 problems"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, remedy):
    with pytest.raises(ConfigurationError, match=re.escape(remedy)):
        GPUMemoryMonitor(**arguments)


class Graphs(SimpleNamespace):
    """As PyTorch Geometric's `Batch`, whose tensors have a row for each node or edge."""

    from_data_list = None


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), 1),
        ({"name": "x", "ids": torch.zeros(5)}, 5),
        ([["a", "b"], {"x": torch.zeros(2)}], 2),
        (["a", "b", "c"], 3),
        ((["a", "b", "c"], ["d", "e", "f"]), 3),
        ({"text": ["a", "b"], "label": [0, 1]}, 2),
        ([{"text": "a"}, {"text": "b"}, {"text": "c"}], 3),
        ({"text": "a"}, 1),
        ([], 1),
        (None, 1),
        (Graphs(num_graphs=96, x=torch.zeros(1908, 3)), 96),
    ],
)
def test_batch_size(batch, size):
    assert first_size(batch) == size


def documented_keys():
    text = GPUMemoryMonitor.__doc__ or ""
    return set(re.findall(r"^    \| ``(memory/\w+)``", text, re.MULTILINE))


class FakeGpu:
    """A driver and an allocator with figures of their own; only the hardware is pretended."""

    def __init__(self, monkeypatch, nvml):
        self.calls: list[str] = []
        self.reading = AllocatorReading(4, 6, 5, 7, 1, 2)
        host = SimpleNamespace(rss_bytes=GIB, pinned_bytes=2 * GIB)
        for owner, name, function in (
            (_memory_probes, "read_allocator", lambda device: self.reading),
            (_memory_probes, "read_host_memory", lambda: host),
            (torch.cuda, "reset_peak_memory_stats", lambda device: self.calls.append("reset")),
            (torch.cuda, "synchronize", lambda device: self.calls.append("wait")),
            (torch.cuda, "get_device_name", lambda device: "Some GPU"),
        ):
            monkeypatch.setattr(owner, name, function)
        gpu = self

        class Device:
            def __init__(self, device):
                pass

            def __enter__(self):
                gpu.calls.append("open")
                return self

            def __exit__(self, *exc_info):
                gpu.calls.append("close")

            def read(self, reserved_bytes=None):
                return nvml

        monkeypatch.setattr(_memory_probes, "NvmlDevice", Device)
        self.probe = CudaProbe(torch.device("cuda", 0))

    def step(self, *, is_logged, peak_bytes=None):
        self.probe.begin_step(is_logged=is_logged)
        if peak_bytes is not None:
            self.reading = AllocatorReading(4, 6, peak_bytes, 2 * peak_bytes, 0, 0)
        self.probe.end_step()
        return self.probe


def test_cuda_metrics_are_the_documented_ones(monkeypatch):
    gpu = FakeGpu(monkeypatch, NvmlReading(10 * GIB, 80 * GIB, 9 * GIB, GIB))
    probe = gpu.step(is_logged=True)
    metrics = probe.metrics()
    probe.close()
    probe.close()
    assert metrics.keys() | {"memory/live_gib", "memory/peak_live_gib"} == documented_keys()
    assert metrics["memory/nvml_process_gib"] == 9
    assert metrics["memory/cuda_context_gib"] == 1
    assert metrics["memory/host_pinned_gib"] == 2
    assert metrics["memory/peak_allocated_gib"] == 5 / GIB
    assert (metrics["memory/num_alloc_retries"], metrics["memory/num_ooms"]) == (1, 2)
    assert gpu.calls == ["open", "reset", "close"]
    assert (probe.name, probe.notes) == ("Some GPU", [])


def test_cuda_peaks_are_of_each_step_and_the_highest_is_kept(monkeypatch):
    gpu = FakeGpu(monkeypatch, NvmlReading(used_bytes=10, total_bytes=80, reason="in a container"))
    for peak_bytes in (50, 70, 60):
        probe = gpu.step(is_logged=True, peak_bytes=peak_bytes)
        metrics = probe.metrics()
        assert metrics["memory/peak_allocated_gib"] == peak_bytes / GIB
    highest = probe.highest
    assert (highest.peak_bytes, highest.reserved_bytes, highest.nvml_bytes) == (70, 140, 10)
    assert gpu.calls.count("reset") == 3
    assert probe.notes == ["in a container"]
    assert "memory/nvml_process_gib" not in metrics
    summary = MemorySummary("Some GPU", 5, nvml_peak_bytes=10, is_nvml_of_gpu=True)
    assert ("peak seen by NVML on the whole GPU", "10 B") in summary.rows()


def test_cuda_peaks_between_logged_steps_cost_nothing_and_count_and_those_of_validation_do_not(
    monkeypatch,
):
    gpu = FakeGpu(monkeypatch, NvmlReading(10, 80, 9))
    for peak_bytes in (50, 50, 90, 50):
        probe = gpu.step(is_logged=False, peak_bytes=peak_bytes)
        gpu.calls.append(str(probe.highest.peak_bytes))
    assert gpu.calls == ["open", "reset", "50", "reset", "50", "50", "50"]
    assert probe.highest.nvml_bytes == 9
    gpu.reading = AllocatorReading(4, 6, 90, 180, 0, 0)  # as the allocator keeps it
    probe.begin_step(is_logged=True)
    assert (probe.highest.peak_bytes, probe.highest.reserved_bytes) == (90, 180)
    probe.end_step()
    probe.pause()
    gpu.reading = AllocatorReading(4, 6, 5, 7, 0, 0)  # after the reset
    probe.resume()
    probe.finish()
    assert probe.highest.peak_bytes == 90
    assert gpu.calls[-3:] == ["reset", "reset", "wait"]


def test_the_device_is_read_while_the_module_is_there(package, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(_memory_probes.LiveTensorsProbe, "finish", lambda self: calls.append("end"))
    trainer = make_trainer(package, GPUMemoryMonitor())
    teardown = trainer.strategy.teardown

    def noted_teardown():
        calls.append("teardown")
        teardown()

    trainer.strategy.teardown = noted_teardown
    trainer.fit(make_module(package), loader())
    assert calls == ["end", "teardown"]


def test_logs_as_often_as_the_trainer_unless_told(package, tmp_path):
    for every, expected in ((None, 2), (1, 4)):
        memory = loggers(package, tmp_path)[1]
        fit(package, GPUMemoryMonitor(every), logger=memory, max_steps=4, log_every_n_steps=2)
        assert len(memory.monitored) == expected


def test_summary_on_a_terminal_is_a_table():
    output = io.StringIO()
    kinds, notes = {"parameter": GIB, "buffer": 0}, ("[why]", "[/]")
    summary = MemorySummary("cpu", 3 * GIB, kinds, num_steps=4, seconds=2, notes=notes)
    print_summary(summary, Console(file=output, force_terminal=True, width=60))
    text = output.getvalue()
    for shown in ("3.00 GiB", "4 (2.00 per second)", "[why]", "[/]", "─"):
        assert shown in text
    assert "buffer" not in text


def test_summary_says_how_fast_each_device_was():
    """Measured; the FLOP and the tokens of a step are those of the prediction."""
    products = Kernel("forward", "product", "float16", 65_000_000_000, 1)
    work = Work(((products, 100.0),), 8, 4096, parse_gpu("T4").throughput)
    prediction = MemoryPrediction("cuda", "Net", MemoryBreakdown(), {}, work=work)
    summary = MemorySummary("T4", GIB, num_steps=4, seconds=2, prediction=prediction)
    said = "8,192 tokens per second, 20 % of the GPU's dense peak"
    assert f"\n  each device: {said}" in str(summary)
    later = replace(summary, had_larger_batches=True)
    assert "each device" not in str(later), "the prediction is of the first batch"
    assert "each device" not in str(replace(summary, prediction=None))


def test_tokens_per_second_of_a_fit(package):
    """On a CPU, of which no data sheet is known."""
    ids: Any = DataLoader(torch.randint(9, (8, 16)), batch_size=4)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.model(batch).mean()

    module = lit.make_lit(package, model, training_step=training_step)
    callback = MemSaveCallback(preset="off", report=False)
    make_trainer(package, callback, max_steps=2, limit_val_batches=0).fit(module, ids)
    (found,) = [value for name, value in callback.monitor.summary.rows() if name == "each device"]
    rate = 4 * 16 * callback.monitor.summary.steps_per_second
    assert found == (f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}") + " tokens per second"


def test_plot_shows_the_peaks_of_the_steps_and_the_prediction(package):
    monitor = GPUMemoryMonitor(2)
    with pytest.raises(ConfigurationError, match=r"Call it after `trainer\.fit"):
        monitor.plot()
    fit(package, MemSaveCallback(preset="off", report=False), monitor)
    fig, ax = monitor.plot()
    measured, predicted = ax.get_lines()
    steps, peaks = measured.get_data()
    assert [*steps] == [1, 2, 4, 6, 8, 10]
    assert max(peaks) == monitor.summary.peak_bytes
    assert {*predicted.get_ydata()} == {monitor.summary.prediction.measurable_bytes}
    assert monitor.plot(ax) == (fig, ax)
    pyplot.close(fig)


def test_peaks_of_long_fits_are_thinned_out():
    probe = Probe(torch.device("cpu"))
    for peak_bytes in range(_memory_probes._MAX_PEAKS):
        probe.note_peak(peak_bytes)
    probe.note_peak(7)
    assert len(probe.peaks) == _memory_probes._MAX_PEAKS // 2 + 1
    assert [peak for _, peak in (*probe.peaks[:2], *probe.peaks[-2:])] == [1, 3, 9999, 7]


def test_plot_without_matplotlib_says_what_to_install(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monitor = GPUMemoryMonitor()
    fit(package, monitor, max_steps=1)
    prediction = MemoryPrediction("cpu", "Net", MemoryBreakdown(4), {})
    for plot in (monitor.plot, prediction.plot):
        with pytest.raises(MissingDependencyError, match="Run `pip install matplotlib`"):
            plot()


def test_the_progress_bar_shows_the_peak_beside_the_loss(package, capsys):
    bars = importlib.import_module(f"{package.__name__}.callbacks")

    class Bar(bars.TQDMProgressBar):  # type: ignore[misc, name-defined]
        def get_metrics(self, trainer, pl_module):
            return {**super().get_metrics(trainer, pl_module), "mine": 3}

    bar, monitor = Bar(), GPUMemoryMonitor()
    module = make_module(package)
    module.log = functools.partial(module.log, prog_bar=True)
    trainer = fit(package, monitor, bar, module=module, enable_progress_bar=True)
    assert monitor.summary is not None
    peak = format_bytes(monitor.summary.peak_bytes or 0)
    assert re.search(rf"10/10 .*loss=\S+, mine=3, peak_memory={peak}\]", capsys.readouterr().out)
    assert trainer.callback_metrics.keys() == {"loss"}
    assert "get_metrics" not in vars(bar)


def test_print_repr_and_a_notebook_show_a_summary_in_a_few_lines():
    summary = MemorySummary("GPU 0", 3 * GIB, {"parameter": GIB}, num_steps=4, seconds=2)
    assert str(summary).splitlines()[:4] == [
        "Memory of this fit",
        "  device: GPU 0",
        "  peak memory: 3.00 GiB",
        "    parameter: 1.00 GiB",
    ]
    assert repr(summary) == "<MemorySummary of 4 steps: peak 3.00 GiB on GPU 0>"
    in_a_notebook: Any = summary
    assert "3.00 GiB" in in_a_notebook._repr_mimebundle_((), ())["text/html"]


@pytest.mark.gpu
def test_values_on_cuda(package, tmp_path):
    memory = loggers(package, tmp_path)[1]
    monitor = GPUMemoryMonitor(1)
    fit(package, monitor, logger=memory, accelerator="gpu")
    metrics = memory.monitored[-1][1]
    assert metrics.keys() <= documented_keys()
    allocated, peak = metrics["memory/allocated_gib"], metrics["memory/peak_allocated_gib"]
    assert 4 * 4 * NUM_PARAMETERS / GIB <= allocated <= peak <= metrics["memory/peak_reserved_gib"]
    assert monitor.summary.peak_bytes >= peak * GIB
    assert monitor.summary.device == torch.cuda.get_device_name()


def reduce_on_rank(rank, folder):
    distributed: Any = torch.distributed
    store = distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(world_size=2, strategy=strategy)
    # In float32 the bytes would become 1000000000; rank 1 has no NVML.
    values = {"bytes": 1_000_000_001, "nvml": 5 if rank == 0 else None, "on no rank": None}
    found = [reduce_over_ranks(trainer, how, values) for how in ("max", "sum")]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_a_rank_may_lack_what_others_know(tmp_path):
    """Else its sums would meet other values of the other rank, or wait for ever."""
    processes = [
        multiprocessing.get_context("fork").Process(target=reduce_on_rank, args=(rank, tmp_path))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for rank in range(2):
        highest, total = json.loads((tmp_path / f"{rank}.json").read_text())
        assert highest == {"bytes": 1_000_000_001, "nvml": 5}
        assert total == {"bytes": 2_000_000_002}
