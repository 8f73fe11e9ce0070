"""Blocks of CUDA memory: cut, joined, and kept in order of size."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

Key = tuple[int, int, "Block"]  # size and address order the free blocks; an address is unique


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment.

    Args:
        address: Where it begins.
        size: Its bytes.
        pool: The pool that its segment belongs to.
        is_free: Whether no tensor has it.
        is_mapped: Whether memory stands behind the addresses; not so in the unused part of an
            expandable segment.
        previous: The block before it in the segment.
        next: The block behind it.
    """

    address: int
    size: int
    pool: "Pool"
    is_free: bool = True
    is_mapped: bool = True
    previous: "Block | None" = None
    next: "Block | None" = None

    @property
    def room(self) -> int:
        """Its bytes and those that it can grow by."""
        has_room = self.next is not None and not self.next.is_mapped
        return self.size + (self.next.size if has_room and self.next is not None else 0)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.previous is None and self.next is None

    def and_following(self) -> Iterator["Block"]:
        """Walk through the segment.

        Yields:
            This block and those behind it.
        """
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next

    def cut(self, size: int) -> "Block":
        """Shorten it, while it is in no list.

        Args:
            size: Bytes that it keeps.

        Returns:
            The rest, in no list yet.
        """
        rest = Block(self.address + size, self.size - size, self.pool)
        rest.is_mapped, rest.previous, rest.next = self.is_mapped, self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def joined(self) -> "Block":
        """Join it with free neighbours, while it is in no list (``try_merge_blocks``).

        Returns:
            What became of it.
        """
        block = self
        if self.next is not None and self._joins(self.next):
            block = _one_of(self, self.next)
        if block.previous is not None and block._joins(block.previous):
            block = _one_of(block.previous, block)
        return block

    def _joins(self, neighbour: "Block") -> bool:
        if not neighbour.is_free or neighbour.is_mapped != self.is_mapped:
            return False
        neighbour.pool.take(neighbour)
        return True


@dataclass(eq=False, slots=True)
class Pool:
    """The blocks for small requests, or those for large ones.

    Args:
        is_small: For which of the two.
        page_bytes: What an expandable segment grows by.
        heads: The first block of each segment.
        free: Free blocks by size, then address (``BlockComparatorSize``).
        unmapped: Blocks without memory, by address.
    """

    is_small: bool
    page_bytes: int
    heads: list[Block] = field(default_factory=list)
    free: list[Key] = field(default_factory=list)
    unmapped: list[Key] = field(default_factory=list)

    def put(self, block: Block) -> None:
        """Put a free block into its list.

        Args:
            block: One that is in no list.
        """
        insort(self._list_of(block), _key(block))

    def take(self, block: Block) -> None:
        """Take a block out of its list.

        Args:
            block: One that was put there.
        """
        blocks = self._list_of(block)
        del blocks[bisect_left(blocks, _key(block))]

    def smallest_from(self, size: int) -> Iterator[Block]:
        """Find free blocks.

        Args:
            size: What they must have at least.

        Yields:
            Each, smallest first.
        """
        # An address is never 0, so this stands before all blocks of the size.
        for index in range(bisect_left(self.free, (size, 0)), len(self.free)):
            yield self.free[index][2]

    def _list_of(self, block: Block) -> list[Key]:
        return self.free if block.is_mapped else self.unmapped


def _key(block: Block) -> Key:
    return (block.size if block.is_mapped else 0, block.address, block)


def _one_of(left: Block, right: Block) -> Block:
    left.size += right.size
    left.next = right.next
    if left.next is not None:
        left.next.previous = left
    return left
