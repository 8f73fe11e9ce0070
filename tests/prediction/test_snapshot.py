"""Predicted steps in the format of torch's memory viewer."""

import json
import pickle
import pickletools

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viewer

from lightning_memsave import ConfigurationError, MemoryPrediction, predict_memory
from lightning_memsave.prediction.snapshot import Origin, StepTrace

# What MemoryViz.js of torch 2.13 unpickles.
OPCODES = frozenset(
    {
        *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT"),
        *("BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST"),
        *("LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE"),
        *("PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2"),
        "TUPLE3",
    }
)


def live_bytes(snapshot):
    """Bytes after each event."""
    signs = {"alloc": 1, "free_completed": -1}
    found = [0]
    for event in snapshot["device_traces"][0]:
        found.append(found[-1] + signs.get(event["action"], 0) * event["size"])
    return found


def make_prediction(**options):
    model = nn.Sequential(nn.Embedding(300, 32), nn.Flatten(), nn.Linear(256, 64), nn.ReLU())
    return predict_memory(model, torch.zeros(16, 8, dtype=torch.long), **options)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def prediction(request):
    return make_prediction(device=request.param)


@pytest.fixture
def snapshot(prediction):
    return prediction.to_snapshot()


def test_has_the_peak_of_the_prediction(prediction, snapshot):
    assert max(live_bytes(snapshot)) == prediction.peak_bytes
    assert min(live_bytes(snapshot)) == 0


def test_frees_only_what_is_allocated_and_never_twice_at_one_address(snapshot):
    alive: dict[int, int] = {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            ends = [address + size for address, size in alive.items() if address < event["addr"]]
            assert max(ends, default=0) <= event["addr"]
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
    assert sum(alive.values()) == live_bytes(snapshot)[-1]


def test_the_viewer_reads_it(snapshot):
    assert "MemoryViz.js" in viewer.trace_plot(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in viewer.trace(snapshot)


def test_its_pickle_has_only_what_the_viewer_knows(snapshot):
    written = pickle.dumps(snapshot, protocol=4)
    assert {opcode.name for opcode, _, _ in pickletools.genops(written)} <= OPCODES


def test_each_allocation_says_who_made_it(prediction, snapshot):
    made = {
        (event["category"], *(frame["filename"] + ":" + frame["name"] for frame in event["frames"]))
        for event in snapshot["device_traces"][0]
        if event["action"] == "alloc"
    }
    assert ("parameter", "parameter:float32[64,256]", "before the step:2") in made
    assert ("activation", "activation:aten.embedding float32[16,8,32]", "forward:0") in made
    largest = prediction.largest_tensors[0]
    assert any(largest.category == category for category, *_ in made)


def test_a_storage_that_changes_its_size_is_allocated_again():
    trace = StepTrace((("activation", Origin()),), ((0, 100), (0, 1000), (0, -1050), (0, -50)))
    assert list(dict.fromkeys(live_bytes(trace.to_snapshot()))) == [0, 100, 1100, 50]


def test_refuses_a_prediction_without_events(prediction):
    empty = MemoryPrediction.from_dict(json.loads(json.dumps(prediction.to_dict())))
    assert empty == prediction
    with pytest.raises(ConfigurationError, match="Predict again"):
        empty.to_snapshot()
