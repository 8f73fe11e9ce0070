import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memsave.errors import MemoryExhaustedError
from lightning_memsave.prediction.cuda.allocator import AllocatorSettings, CachingAllocator
from lightning_memsave.units import KIB, MIB


def segments_of(allocator: CachingAllocator) -> list[list[tuple[int, int, bool]]]:
    """List reserved memory, like ``torch.cuda.memory_snapshot``."""
    return [
        [(b.address, b.size, not b.is_free) for b in head.and_following() if b.is_mapped]
        for pool in allocator._pools.values()
        for head in pool.heads
    ]


SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB), st.just(MIB)
)
STEPS = st.lists(st.one_of(SIZES, st.integers(-8, -1)), max_size=60)


both_kinds = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


def run(allocator, steps):
    """Allocate each positive number; free the n-th oldest for each negative one."""
    handles = {}
    for step in steps:
        if step > 0:
            try:
                handles[allocator.malloc(step)] = step
            except MemoryExhaustedError:
                continue
        elif handles:
            handle = list(handles)[step % len(handles)]
            del handles[handle]
            allocator.free(handle)
    return handles


class TestRules:
    @pytest.mark.parametrize(
        ("num_bytes", "allocated", "reserved"),
        [
            (1, 512, 2 * MIB),
            (513, 1024, 2 * MIB),
            (MIB, MIB, 2 * MIB),  # the last small one
            (MIB + 1, MIB + 512, 20 * MIB),  # the first large one
            (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB, 10 * MIB),  # from here on a segment of its own
            (21 * MIB, 22 * MIB, 22 * MIB),  # a rest of up to 1 MiB stays with the block
            (20 * MIB + 1, 20 * MIB + 512, 22 * MIB),
        ],
    )
    def test_one_request(self, num_bytes, allocated, reserved):
        allocator = CachingAllocator()
        allocator.malloc(num_bytes)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)

    def test_no_bytes_are_no_memory(self):
        allocator = CachingAllocator()
        allocator.free(allocator.malloc(0))
        assert allocator.reserved_bytes == 0


class TestCapacity:
    def test_what_is_in_the_way_must_be_freed(self):
        allocator = CachingAllocator(100 * MIB)
        kept = allocator.malloc(50 * MIB)
        with pytest.raises(MemoryExhaustedError):
            allocator.malloc(60 * MIB)
        allocator.free(kept)
        allocator.malloc(60 * MIB)


class TestReplay:
    def test_a_storage_that_grows_has_both_blocks_for_a_moment(self):
        allocator = CachingAllocator()
        allocator.replay([(1, 30 * MIB), (1, 20 * MIB), (1, -50 * MIB)])
        assert allocator.peak_allocated_bytes == 80 * MIB
        assert allocator.allocated_bytes == 0

    @both_kinds
    def test_equals_calls_by_hand(self, expandable):
        by_hand = CachingAllocator(settings=AllocatorSettings(expandable_segments=expandable))
        first, _ = by_hand.malloc(3 * MIB), by_hand.malloc(700)
        by_hand.free(first)
        replayed = CachingAllocator(settings=AllocatorSettings(expandable_segments=expandable))
        replayed.replay([(7, 3 * MIB), (9, 700), (7, -3 * MIB)])
        assert segments_of(replayed) == segments_of(by_hand)

    @both_kinds
    def test_sums_up_a_long_run(self, expandable):
        events = [
            (i % 997 + i // 1994 * 997, (1 if i // 997 % 2 == 0 else -1)) for i in range(99700)
        ]
        sizes = [(key, sign * (key % 211 + 1) * 50_021) for key, sign in events]
        allocator = CachingAllocator(settings=AllocatorSettings(expandable_segments=expandable))
        allocator.replay(sizes)
        assert allocator.allocated_bytes == 0
        assert allocator.peak_allocated_bytes > 1000 * MIB


class TestProperties:
    @both_kinds
    @given(STEPS)
    @settings(deadline=None)
    def test_blocks_tile_their_segments(self, expandable, steps):
        allocator = CachingAllocator(settings=AllocatorSettings(expandable_segments=expandable))
        handles = run(allocator, steps)
        segments = segments_of(allocator)
        blocks = [block for segment in segments for block in segment]
        assert sum(size for _, size, _ in blocks) == allocator.reserved_bytes
        assert sum(size for _, size, used in blocks if used) == allocator.allocated_bytes
        assert {address for address, _, used in blocks if used} == set(handles)
        assert all(size >= handles.get(address, 0) for address, size, _ in blocks)
        ends = sorted((address, address + size) for address, size, _ in blocks)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        if not expandable:
            for segment in segments:  # no gap, and no two free neighbours
                for (a, size, used), (b, _, used_too) in itertools.pairwise(segment):
                    assert a + size == b
                    assert used or used_too

    @both_kinds
    @given(STEPS)
    @settings(deadline=None)
    def test_all_freed_leaves_one_free_block_in_each_segment(self, expandable, steps):
        allocator = CachingAllocator(settings=AllocatorSettings(expandable_segments=expandable))
        for handle in run(allocator, steps):
            allocator.free(handle)
        assert allocator.allocated_bytes == 0
        assert all(len(segment) == 1 for segment in segments_of(allocator))

    @both_kinds
    @given(STEPS, st.integers(1, 100))
    @settings(deadline=None)
    def test_capacity_is_never_exceeded(self, expandable, steps, capacity_mib):
        allocator = CachingAllocator(
            capacity_mib * MIB, settings=AllocatorSettings(expandable_segments=expandable)
        )
        for handle in run(allocator, steps):
            allocator.free(handle)
        assert allocator.peak_reserved_bytes <= capacity_mib * MIB
        blocks = [block for segment in segments_of(allocator) for block in segment]
        assert sum(size for _, size, _ in blocks) == allocator.reserved_bytes


def test_a_stream_does_not_use_what_another_one_has_freed():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB, "copies"))
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, AllocatorSettings()),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, AllocatorSettings(True)),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb: 64, expandable_segments:False"},
            AllocatorSettings(max_split_bytes=64 * MIB),
        ),
        # As torch 2.14.1 does on a virtual GPU: the second is not read at all.
        (
            {
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            },
            AllocatorSettings(max_split_bytes=64 * MIB),
        ),
    ],
)
def test_settings_of_the_environment(variables, expected, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert AllocatorSettings.of_environment() == expected
