"""Simulate the CUDA caching allocator."""

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from lightning_memsave.errors import MemoryExhaustedError
from lightning_memsave.units import MIB

Key = tuple[int, int, "Block"]  # size and address, the order of free blocks; addresses are unique


@dataclass(eq=False, slots=True)
class Block:
    address: int
    size: int
    pool: "Pool"
    is_free: bool = True
    is_mapped: bool = True
    previous: "Block | None" = None
    next: "Block | None" = None

    @property
    def room(self) -> int:
        """Its size plus that of the unmapped block behind it."""
        has_room = self.next is not None and not self.next.is_mapped
        return self.size + (self.next.size if has_room and self.next is not None else 0)

    @property
    def is_whole(self) -> bool:
        return self.previous is None and self.next is None

    def and_following(self) -> Iterator["Block"]:
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next

    def cut(self, size: int) -> "Block":
        """Split a block that is in no list."""
        rest = Block(self.address + size, self.size - size, self.pool)
        rest.is_mapped, rest.previous, rest.next = self.is_mapped, self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def joined(self) -> "Block":
        """Merge a block that is in no list with free neighbours (``try_merge_blocks``)."""
        block = self
        if self.next is not None and self._take_mergeable(self.next):
            block = _merge(self, self.next)
        if block.previous is not None and block._take_mergeable(block.previous):
            block = _merge(block.previous, block)
        return block

    def _take_mergeable(self, neighbour: "Block") -> bool:
        if not neighbour.is_free or neighbour.is_mapped != self.is_mapped:
            return False
        neighbour.pool.take(neighbour)
        return True


@dataclass(eq=False, slots=True)
class Pool:
    is_small: bool
    page_bytes: int
    heads: list[Block] = field(default_factory=list)
    free: list[Key] = field(default_factory=list)
    unmapped: list[Key] = field(default_factory=list)

    def put(self, block: Block) -> None:
        insort(self._list_of(block), _key(block))

    def take(self, block: Block) -> None:
        blocks = self._list_of(block)
        del blocks[bisect_left(blocks, _key(block))]

    def smallest_from(self, size: int) -> Iterator[Block]:
        # No address is 0, so this key sorts before all blocks of the size.
        for index in range(bisect_left(self.free, (size, 0)), len(self.free)):
            yield self.free[index][2]

    def _list_of(self, block: Block) -> list[Key]:
        return self.free if block.is_mapped else self.unmapped


def _key(block: Block) -> Key:
    return (block.size if block.is_mapped else 0, block.address, block)


def _merge(left: Block, right: Block) -> Block:
    left.size += right.size
    left.next = right.next
    if left.next is not None:
        left.next.previous = left
    return left


Change = tuple[int, int]
"""Id of a storage, and its change in bytes."""


_MIN_BLOCK_BYTES = 512  # kMinBlockSize
_SMALL_BYTES = MIB  # kSmallSize: the largest request that the small pool serves
_SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size
_MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: larger requests get a segment of their own
_ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge
_MAX_NON_SPLIT_BYTES = 20 * MIB  # max_non_split_rounding_size
_NO_LIMIT = 2**63
_ADDRESS_SPACE_BYTES = 2**36 * _LARGE_SEGMENT_BYTES  # of an expandable segment; no memory yet


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    expandable_segments: bool = False
    max_split_bytes: int | None = None

    @classmethod
    def of_environment(cls) -> "AllocatorSettings":
        """Read them as torch does: of two variables that are set, only the first counts."""
        text = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "")
        pairs = (item.partition(":")[::2] for item in text.replace(" ", "").split(","))
        values = dict(pairs)
        mib = values.get("max_split_size_mb", "")
        return cls(
            values.get("expandable_segments") == "True", int(mib) * MIB if mib.isdecimal() else None
        )


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class CachingAllocator:
    """Simulation of torch's native caching allocator for CUDA.

    Reserved bytes are those that other programs see a process use. They exceed the bytes of
    tensors, because requests are rounded up, segments are split into blocks, and freed blocks are
    cached, each for the stream on which it was allocated. Follows
    ``c10/cuda/CUDACachingAllocator.cpp`` with the constants of torch 2.13
    (``c10/core/AllocatorConfig.h``), for one device.

    Note:
        Not modelled: tensors that another stream uses (``record_stream``), graphs, private pools,
        and ``roundup_power2_divisions`` and ``garbage_collection_threshold``, which are off by
        default. The driver's choice of addresses is not known; here new segments get higher
        addresses, which only matters between free blocks of equal size.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings = AllocatorSettings(),
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = settings.expandable_segments
        self._max_split_bytes = settings.max_split_bytes or _NO_LIMIT
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._used: dict[int, Block] = {}
        self._pools: dict[tuple[str, bool], Pool] = {}  # by stream, and whether it is small
        self._next_address = _LARGE_SEGMENT_BYTES  # 0 is the null pointer

    def malloc(self, num_bytes: int, stream: str = "") -> int:
        """Allocate a free block if one fits, else a new segment (``malloc``)."""
        if num_bytes == 0:
            return 0
        size = rounded_up(num_bytes, _MIN_BLOCK_BYTES)  # round_size
        pool = self._pool(stream, is_small=size <= _SMALL_BYTES)
        block = self._take_free(pool, size) or self._add(pool, size)
        if block is None and self._release_oversized(pool, size):
            block = self._add(pool, size)
        if block is None:
            self._release_cached_blocks()
            self.num_retries += 1
            block = self._add(pool, size)
        if block is None:
            raise MemoryExhaustedError(f"{num_bytes} bytes cannot be allocated")
        remaining = block.size - size
        # should_split
        if remaining >= _MIN_BLOCK_BYTES and (
            pool.is_small
            or self.expandable_segments
            or (size < self._max_split_bytes and remaining > _SMALL_BYTES)
        ):
            pool.put(block.cut(size))
        block.is_free = False
        self._used[block.address] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.address

    def free(self, handle: int) -> None:
        """Free a block and merge it with free neighbours (``free_block``)."""
        if handle == 0:
            return
        block = self._used.pop(handle)
        self.allocated_bytes -= block.size
        block.is_free = True
        block.pool.put(block.joined())

    def replay(self, events: Iterable[Change]) -> None:
        alive: dict[int, tuple[int, int]] = {}
        for storage, change in events:
            handle, num_bytes = alive.pop(storage, (0, 0))
            num_bytes += change
            if num_bytes:
                alive[storage] = (self.malloc(num_bytes), num_bytes)
            self.free(handle)

    # get_pool
    def _pool(self, stream: str, *, is_small: bool) -> Pool:
        key = (stream, is_small)
        if key not in self._pools:
            page_bytes = _SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT_BYTES
            self._pools[key] = Pool(is_small, page_bytes)
        return self._pools[key]

    # get_free_block: best fit. The end of an expandable segment counts with the room to grow, so
    # that other blocks are filled first.
    def _take_free(self, pool: Pool, size: int) -> Block | None:
        candidates = pool.smallest_from(size)
        block = next(candidates, None)
        if block is None:
            return None
        if self.expandable_segments:
            for other in candidates:
                if other.room >= block.room:
                    break
                block = other
        # A block that is not split is kept for requests of about its size.
        limit = self._max_split_bytes
        if size < limit <= block.size or limit <= size <= block.size - _MAX_NON_SPLIT_BYTES:
            return None
        pool.take(block)
        return block

    # alloc_block, get_allocation_size: new memory from the driver.
    def _add(self, pool: Pool, size: int) -> Block | None:
        if self.expandable_segments:
            return self._expand(pool, size)
        if pool.is_small:
            segment_size = _SMALL_SEGMENT_BYTES
        elif size < _MIN_LARGE_BYTES:
            segment_size = _LARGE_SEGMENT_BYTES
        else:
            segment_size = rounded_up(size, _ROUND_LARGE_BYTES)
        return self._new_segment(pool, segment_size) if self._reserve(segment_size) else None

    def _new_segment(self, pool: Pool, size: int) -> Block:
        block = Block(self._next_address, size, pool)
        self._next_address += size
        pool.heads.append(block)
        return block

    def _reserve(self, num_bytes: int) -> bool:
        reserved = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True

    # try_allocate_expandable_block: map pages behind a free block, or in a gap.
    def _expand(self, pool: Pool, size: int) -> Block | None:
        block = self._expandable_block(pool, size)
        mapped = block if block.is_mapped else self._map(block, min(block.size, size))
        while mapped is not None and mapped.size < size:
            following = mapped.next
            assert following is not None, "_expandable_block checks that there is room"
            mapped = self._map(following, min(size - mapped.size, following.size))
        if mapped is not None:
            pool.take(mapped)
        return mapped

    # find_expandable_block: the lowest address at which there is room.
    def _expandable_block(self, pool: Pool, size: int) -> Block:
        for _, _, unmapped in pool.unmapped:
            before = unmapped.previous
            block = unmapped if before is None or not before.is_free else before
            free = takewhile(lambda piece: piece.is_free, block.and_following())
            if sum(piece.size for piece in free) >= size:
                return block
        block = self._new_segment(pool, _ADDRESS_SPACE_BYTES)
        block.is_mapped = False
        pool.put(block)
        return block

    # map_block: whole pages.
    def _map(self, block: Block, size: int) -> Block | None:
        size = rounded_up(size, block.pool.page_bytes)
        if not self._reserve(size):
            return None
        block.pool.take(block)
        if size < block.size:
            block.pool.put(block.cut(size))
        block.is_mapped = True
        block = block.joined()
        block.pool.put(block)
        return block

    # release_available_cached_blocks: blocks that are not split, enough of them for the request.
    def _release_oversized(self, pool: Pool, size: int) -> bool:
        limit = self._max_split_bytes
        if limit == _NO_LIMIT or self.expandable_segments:
            return False
        needed = max(size, limit)
        chosen = [*pool.smallest_from(needed)][:1]
        if not chosen:
            for block in reversed([*pool.smallest_from(limit)]):
                chosen.append(block)
                if sum(b.size for b in chosen) >= needed:
                    break
        for block in chosen:
            self._release(block)
        return sum(b.size for b in chosen) >= needed

    # release_cached_blocks: return all free segments or pages.
    def _release_cached_blocks(self) -> None:
        for pool in self._pools.values():
            for block in list(pool.smallest_from(0)):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    # release_block
    def _release(self, block: Block) -> None:
        block.pool.take(block)
        block.pool.heads.remove(block)
        self.reserved_bytes -= block.size

    # unmap_block: the pages inside a block; segments begin at a multiple of their page.
    def _unmap(self, block: Block) -> None:
        pool = block.pool
        first = rounded_up(block.address, pool.page_bytes)
        size = (block.address + block.size) // pool.page_bytes * pool.page_bytes - first
        if size <= 0:
            return
        pool.take(block)
        if first > block.address:
            rest = block.cut(first - block.address)
            pool.put(block)
            block = rest
        if size < block.size:
            pool.put(block.cut(size))
        block.is_mapped = False
        self.reserved_bytes -= size
        pool.put(block.joined())


def least_capacity(
    events: Sequence[Change],
    low: int,
    high: int,
    settings: AllocatorSettings = AllocatorSettings(),
) -> int:
    """Find the smallest capacity with which the allocator can serve all requests.

    Before it raises, torch returns cached segments to the driver and retries, so this is less than
    the reserved bytes without a limit.
    """
    step = max(_SMALL_SEGMENT_BYTES, high >> 8)
    low -= 1  # `low` itself may be enough
    while high - low > step:
        middle = (low + high) // (2 * _SMALL_SEGMENT_BYTES) * _SMALL_SEGMENT_BYTES
        if middle <= low:
            break
        try:
            CachingAllocator(middle, settings).replay(events)
            high = middle
        except MemoryExhaustedError:
            low = middle
    return high


def rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step
