"""The simulated allocator replays traces of torch's own, and asks for the same segments."""

from typing import Any

import pytest

from tests.virtual_gpu.processes import run_python

pytestmark = pytest.mark.gpu

SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:32")

TRAINING_AND_STREAMS = """
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 3
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for length in (128, 96, 160, 128, 33):
        model(torch.ones(16, length, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    held = []
    for _ in range(4000):
        if held and random.random() < 0.48:
            held.pop(random.randrange(len(held)))
        else:
            with torch.cuda.stream(random.choice(streams)):
                size = int(2 ** random.uniform(0, 27))
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
"""
FULL_GPU = """
    held = []
    for _ in range(3000):
        size = int(2 ** random.uniform(10, 27))
        while held and sum(map(len, held)) + size > 450 * 2**20:
            held.pop(random.randrange(len(held)))
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
"""

# `record_memory_history` knows all requests, and `segment_*` what came of them.
CODE = """
import json, random
import torch
from lightning_memsave.prediction.cuda.allocator import AllocatorSettings, CachingAllocator

def program():{program}

random.seed(0)
torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
program()
torch.cuda.synchronize()
(trace,) = [t for t in torch.cuda.memory._snapshot()["device_traces"] if t]
torch.cuda.memory._record_memory_history(enabled=None)
ours = CachingAllocator({capacity}, AllocatorSettings.of_environment())
handles, reserved, num_events, different = {{}}, 0, 0, []
for number, event in enumerate(trace):
    action, size = event["action"], event["size"]
    if action in ("segment_alloc", "segment_map"):
        reserved += size
    elif action in ("segment_free", "segment_unmap"):
        reserved -= size
    elif action == "alloc":
        handles[event["addr"]] = ours.malloc(size, str(event["stream"]))
        num_events += 1
        if ours.reserved_bytes != reserved:
            different.append((number, reserved, ours.reserved_bytes))
    elif action == "free_completed":
        ours.free(handles.pop(event["addr"]))
print(json.dumps({{
    "num_events": num_events,
    "different": different[:3],
    "allocated": [ours.peak_allocated_bytes, torch.cuda.max_memory_allocated()],
    "reserved": [ours.peak_reserved_bytes, torch.cuda.max_memory_reserved()],
    "retries": [ours.num_retries, torch.cuda.memory_stats()["num_alloc_retries"]],
}}))
"""


def replay(
    program: str, settings: str, capacity: int | None, memory: str, **environment: Any
) -> dict[str, Any]:
    found: dict[str, Any] = run_python(
        CODE.format(program=program, capacity=capacity),
        VGPU_MEMORY=memory,
        VGPU_CONTEXT="24MiB",
        VGPU_COMPUTE="0",
        PYTORCH_CUDA_ALLOC_CONF=settings,
        **environment,
    )
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_training_and_streams_reserve_the_same_at_each_request(settings):
    found = replay(TRAINING_AND_STREAMS, settings, None, "48GiB")
    assert found["different"] == []
    assert found["num_events"] > 3000
    assert found["allocated"][0] == found["allocated"][1]
    assert found["reserved"][0] == found["reserved"][1]
    assert found["retries"] == [0, 0]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_full_gpu_returns_the_same_cached_blocks(settings):
    found = replay(FULL_GPU, settings, 1000 * 2**20, "1GiB")
    assert found["different"] == []
    assert found["num_events"] > 2900
    assert found["reserved"][0] == found["reserved"][1]
    assert found["retries"][0] == found["retries"][1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("max_split_size_mb:32", "max_split_size_mb:64"),
        ("expandable_segments:False", "max_split_size_mb:32"),
        ("expandable_segments:True", "expandable_segments:False"),
        ("", "max_split_size_mb:32"),
    ],
)
def test_of_two_variables_only_the_first_counts(first, second):
    found = replay(FULL_GPU, first, 1000 * 2**20, "1GiB", PYTORCH_ALLOC_CONF=second)
    assert found["different"] == []
    assert found["reserved"][0] == found["reserved"][1]
