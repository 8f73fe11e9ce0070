"""Blocks of torch's CUDA caching allocator, and their free lists."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

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
        """Iterate over free blocks of at least ``size`` bytes, smallest first."""
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
