"""Peaks of recordings made by hand."""

import pytest
import torch
from torch import nn

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.storages import LiveStorage
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.peaks import MAX_POINTS, Peaks, room_for_gradients
from lightning_memsave.prediction.predict import summarise
from lightning_memsave.prediction.recording import (
    Event,
    Recording,
    StepProfile,
)
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory
from lightning_memsave.prediction.snapshot import Origin


class Tape:
    """Writes a recording, storage by storage."""

    def __init__(self) -> None:
        self.recording = Recording(
            (
                ModuleMemory("", "Net", 0),
                ModuleMemory("a", "Linear", 25),
                ModuleMemory("b", "Linear", 5),
            )
        )
        self.storages: dict[str, tuple[LiveStorage, int]] = {}

    def make(self, name: str, num_bytes: int, category: str, module: str, phase: str) -> None:
        storage = LiveStorage(category, len(self.storages))
        storage.origin = Origin(module, f"aten.{name}", phase, (num_bytes // 4,), "float32")
        self.storages[name] = storage, num_bytes
        self._note(name, num_bytes, phase)

    def free(self, name: str, phase: str) -> None:
        self._note(name, -self.storages[name][1], phase)

    def _note(self, name: str, change: int, phase: str) -> None:
        storage = self.storages[name][0]
        event = Event(storage, change, phase, storage.origin.module, f"aten.{name}")
        self.recording.events.append(event)

    def end_batch(self) -> None:
        self.recording.batch_ends.append(len(self.recording.events))


def one_step(tape: Tape, number: int, activation_bytes: int = 200) -> None:
    """At the most 100 + 20 + 200 + 60 + 50 = 430 bytes, in backward."""
    tape.make(f"x{number}", 20, "input", "", "forward")
    tape.make(f"h{number}", activation_bytes, "activation", "a", "forward")
    tape.make(f"y{number}", 60, "activation", "b", "forward")
    tape.make(f"t{number}", 50, "temporary", "b", "backward")
    tape.free(f"t{number}", "backward")
    tape.free(f"y{number}", "backward")
    tape.make(f"g{number}", 100, "gradient", "a", "backward")
    tape.free(f"h{number}", "backward")
    tape.make(f"s{number}", 30, "temporary", "a", "optimizer")
    for name in (f"s{number}", f"g{number}", f"x{number}"):
        tape.free(name, "optimizer")
    tape.end_batch()


@pytest.fixture
def tape():
    tape = Tape()
    tape.make("w", 100, "parameter", "a", "forward")
    one_step(tape, 1)
    one_step(tape, 2)
    return tape


def test_the_peak_and_what_it_is_made_of(tape):
    peaks = Peaks(tape.recording)
    expected = {"parameter": 100, "input": 20, "activation": 260, "temporary": 50}
    assert {k: v for k, v in peaks.peak.by_category().items() if v} == expected
    assert (peaks.event.op, peaks.event.module, peaks.event.phase) == ("aten.t2", "b", "backward")


def test_of_two_equal_steps_the_later_one_is_shown(tape):
    peaks = Peaks(tape.recording)
    assert (peaks.start, peaks.end) == (tape.recording.batch_ends[0], len(tape.recording.events))


def test_an_earlier_step_is_shown_if_it_takes_more():
    tape = Tape()
    tape.make("w", 100, "parameter", "a", "forward")
    one_step(tape, 1, activation_bytes=500)
    one_step(tape, 2)
    peaks = Peaks(tape.recording)
    assert peaks.peak.total_bytes == 730
    assert (peaks.start, peaks.end) == (0, tape.recording.batch_ends[0])


def test_all_that_is_told_of_the_peak_is_of_the_same_moment(tape):
    peaks = Peaks(tape.recording)
    assert peaks.event.phase == "backward"
    assert peaks.peak == peaks.by_phase["backward"]
    assert sum(t.num_bytes for t in peaks.largest()) == peaks.peak.total_bytes
    assert sum(peaks.by_module().values(), MemoryBreakdown()) == peaks.peak
    timeline = peaks.timeline()
    assert timeline.phases[timeline.peak_index] == "backward"


def test_each_phase_has_its_peak(tape):
    by_phase = Peaks(tape.recording).by_phase
    assert {phase: memory.total_bytes for phase, memory in by_phase.items()} == {
        "forward": 380,  # 100 + 20 + 260
        "backward": 430,
        "optimizer": 250,  # 100 + 20 + 100 + 30
    }
    assert by_phase["optimizer"].gradient_bytes == 100


def test_modules_add_up_to_the_peak(tape):
    peaks = Peaks(tape.recording, [("other", 3, "a"), ("other", 4, "")])
    by_module = peaks.by_module()
    assert {name: memory.total_bytes for name, memory in by_module.items()} == {
        "": 20 + 4,
        "a": 100 + 200 + 3,
        "b": 60 + 50,
    }
    assert sum(by_module.values(), MemoryBreakdown()) == peaks.peak
    assert peaks.peak.total_bytes == 437
    assert by_module["b"] == MemoryBreakdown(activation_bytes=60, temporary_bytes=50)


def test_the_largest_tensors(tape):
    largest = Peaks(tape.recording).largest()
    assert [(t.op, t.num_bytes, t.category) for t in largest] == [
        ("aten.h2", 200, "activation"),
        ("aten.w", 100, "parameter"),
        ("aten.y2", 60, "activation"),
        ("aten.t2", 50, "temporary"),
        ("aten.x2", 20, "input"),
    ]
    assert (largest[0].module, largest[0].phase, largest[0].shape) == ("a", "forward", (50,))


def test_the_time_line(tape):
    timeline = Peaks(tape.recording).timeline()
    totals = [sum(point) for point in zip(*timeline.by_category.values(), strict=True)]
    assert totals == [120, 320, 380, 430, 380, 320, 420, 220, 250, 220, 120, 100]
    assert timeline.phases == ("forward",) * 3 + ("backward",) * 5 + ("optimizer",) * 4
    assert timeline.peak_index == 3
    assert set(timeline.by_category) == {
        *("parameter", "input", "activation", "temporary", "gradient"),
    }


@pytest.mark.parametrize("num_steps", [50, 1500, 4001])
def test_a_long_time_line_keeps_the_peak(num_steps):
    tape = Tape()
    for number in range(num_steps):
        tape.make(f"h{number}", 4, "activation", "a", "forward")
    for number in range(num_steps):
        tape.free(f"h{number}", "backward")
    tape.end_batch()
    timeline = Peaks(tape.recording).timeline()
    assert len(timeline.phases) <= MAX_POINTS
    activations = timeline.by_category["activation"]
    assert activations[timeline.peak_index] == max(activations) == 4 * num_steps


def test_what_the_allocator_is_asked_for(tape):
    blocks = [("input", 8, ""), ("other", 0, ""), ("other", 7, "")]
    changes = list(Peaks(tape.recording, blocks).changes())
    assert [change for _, change in changes[:2]] == [8, 7]
    assert [change for _, change in changes[2:]] == [e.change for e in tape.recording.events]
    live: dict[int, int] = {}
    for key, change in changes:
        live[key] = live.get(key, 0) + change
        assert live[key] >= 0


@pytest.mark.parametrize(("has_run", "first"), [(False, 3), (True, 1)])
def test_workspaces_lie_where_the_first_products_make_them(tape, has_run, first):
    tape.recording.events[0].op = ""  # there before the first batch
    tape.recording.first_products = {"forward": 3, "backward": 5}
    changes = Peaks(tape.recording, (), (7, 9), has_run=has_run).changes()
    assert [at for at, (_, change) in enumerate(changes) if change in {7, 9}] == [first, 6]


def test_a_category_that_was_claimed_later_counts_from_the_start():
    tape = Tape()
    tape.make("w", 100, "parameter", "a", "forward")
    tape.make("g", 50, "activation", "a", "backward")
    tape.end_batch()
    tape.storages["g"][0].category = "gradient"
    assert Peaks(tape.recording).peak.gradient_bytes == 50


def test_the_peak_is_what_live_tensors_count():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with StepProfile(model, [optimizer]) as profile:
        for _ in range(2):
            model(torch.randn(5, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profile.end_batch()
    peaks = Peaks(profile.recording)
    assert peaks.peak == profile.peak
    assert sum(peaks.by_module().values(), MemoryBreakdown()) == profile.peak


def test_the_summary_has_every_module_in_order(tape):
    tape.recording.host_bytes = 9
    prediction = summarise(tape.recording, device="cpu", model="Net", settings={"a": "b"})
    assert [m.name for m in prediction.modules] == ["", "a", "b"]
    assert sum((m.memory for m in prediction.modules), MemoryBreakdown()).total_bytes == 430
    assert (prediction.peak_bytes, prediction.peak.host_bytes) == (430, 9)
    assert (prediction.peak_phase, prediction.peak_module) == ("backward", "b")
    assert prediction.reserved_bytes is None
    on_cuda = summarise(tape.recording, device="cuda", model="Net", context_bytes=1000)
    assert on_cuda.reserved_bytes == 2 * 2**20  # one segment of small blocks
    assert on_cuda.device_bytes == 2 * 2**20 + 1000
    # Parameter, input, two activations and the temporary of the second step, in blocks of 512.
    assert (on_cuda.allocated_bytes, on_cuda.measurable_bytes) == (5 * 512, 5 * 512)
    assert prediction.measurable_bytes == 430


MIB = 2**20


def test_the_least_memory_is_what_is_enough_when_the_cache_is_returned():
    tape = Tape()
    for name, size, phase in (("h", 30, "forward"), ("y", 40, "backward")):
        tape.make(name, size * MIB, "activation", "a", phase)
        tape.free(name, phase)
    tape.end_batch()
    found = summarise(tape.recording, device="cuda", model="Net", context_bytes=MIB)
    assert (found.allocated_bytes, found.reserved_bytes) == (40 * MIB, 70 * MIB)
    assert (found.least_reserved_bytes, found.device_bytes) == (40 * MIB, 41 * MIB)
    assert found.fits(Gpu("41 MiB", 41 * MIB))
    assert not found.fits(Gpu("40 MiB", 40 * MIB))
    assert MemoryPrediction.from_dict(found.to_dict()) == found


def test_workspaces_are_blocks_of_their_own():
    tape = Tape()
    tape.make("w", 512, "parameter", "a", "forward")
    tape.end_batch()
    found = summarise(
        *(tape.recording,),
        device="cuda",
        model="Net",
        extra=[("other", 25 * MIB, "")],
        workspaces=(9 * MIB, 9 * MIB),
    )
    assert (found.peak.other_bytes, found.workspace_bytes) == (43 * MIB, 18 * MIB)
    # A segment of 20 MiB for both workspaces, one of 26 for the rest, and a small one.
    assert found.reserved_bytes == (20 + 26 + 2) * MIB


def test_room_for_gradients_that_wait_below_the_peak():
    """Three gradients of 100, 80 and 60; the peak of 430 is before the first of them."""
    for temporary, expected in [(0, 240), (250, 240), (251, 140), (350, 140), (351, 60)]:
        tape, taken = Tape(), []
        tape.make("h", 430, "activation", "a", "forward")
        tape.free("h", "forward")
        for name, size in (("a", 100), ("b", 80), ("c", 60)):
            tape.make(name, size, "gradient", "a", "backward")
            taken.append((len(tape.recording.events), size))
            tape.free(name, "backward")  # moved to the host
            if name == "b":
                tape.make("t", temporary, "temporary", "a", "backward")
                tape.free("t", "backward")
        tape.end_batch()
        assert room_for_gradients(tape.recording, taken) == expected, temporary


def test_reserved_memory_follows_the_allocators_settings(monkeypatch):
    tape = Tape()
    for name, mib in (("a", 12), ("b", 13)):
        tape.make(name, mib * MIB, "activation", "a", "forward")
        tape.free(name, "forward")
    tape.end_batch()
    found = []
    for settings in ("", "expandable_segments:True"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
        prediction = summarise(tape.recording, device="cuda", model="Net")
        found.append((prediction.allocated_bytes, prediction.reserved_bytes))
    # Two segments of fixed size, of which the rest of 1 MiB is not split off, or pages of 20 MiB.
    assert found == [(14 * MIB, 26 * MIB), (13 * MIB, 20 * MIB)]
