"""Which name of one model is which name of another, where prefixes or roots differ."""

from collections import Counter
from collections.abc import Iterable, Iterator

# What torch puts between the names of a module and those inside it: compile, FSDP, checkpointing.
_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
_MAX_ROOT_DEPTH = 4
# A rest that stands under so many roots, such as that of 100 blocks, is found under their parent.
_MAX_ROOTS = 64
# Two layers with a weight and a bias each are the least that is told to be the same by its names.
_MIN_RENAMED = 4

_Pair = tuple[str, str]


def align_names(a: Iterable[str], b: Iterable[str]) -> tuple[dict[str, str], tuple[_Pair, ...]]:
    """Find which names mean the same.

    Equal names do, apart from those of torch's wrappers. Of what is then left, the two roots under
    which most names are the same go together, such as ``"bert"`` and ``"model.encoder"``, and so
    on. Where it is not only that one side has a prefix more, four names must be the same.

    Args:
        a: Names with dots.
        b: The others.

    Returns:
        Name in ``b`` by name in ``a``; and pairs of roots that were taken for the same.

    Example:
        >>> align_names(["net.0.weight", "x.bias"], ["model.net.0.weight", "model.x.bias"])
        ({'net.0.weight': 'model.net.0.weight', 'x.bias': 'model.x.bias'}, (('', 'model'),))
    """
    left, right = _cleaned(a), _cleaned(b)
    found = {left.pop(name): right.pop(name) for name in list(left) if name in right}
    roots = []
    while left and right:
        pair = _best_roots(left, right)
        if pair is None:
            break
        roots.append(pair)
        for name in list(left):
            other = _moved(name, *pair)
            if other in right:
                found[left.pop(name)] = right.pop(other)
    return found, tuple(roots)


def _cleaned(names: Iterable[str]) -> dict[str, str]:
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): name for name in names
    }


def _best_roots(left: Iterable[str], right: Iterable[str]) -> _Pair | None:
    roots_of: dict[str, list[str]] = {}
    for name in right:
        for root, rest in _divided(name):
            roots_of.setdefault(rest, []).append(root)
    votes: Counter[_Pair] = Counter()
    for name in left:
        for root, rest in _divided(name):
            others = roots_of.get(rest, ())
            if len(others) <= _MAX_ROOTS:
                votes.update((root, other) for other in others)
    sizes = [
        Counter(root for name in names for root, _ in _divided(name)) for names in (left, right)
    ]
    likely = [pair for pair, number in votes.items() if _is_likely(pair, number, sizes)]
    return max(likely, key=lambda pair: (votes[pair], -_depth(pair), pair), default=None)


def _is_likely(pair: _Pair, votes: int, sizes: list[Counter[str]]) -> bool:
    short, long = sorted(pair, key=len)
    is_prefix_only = not short or long.endswith(f".{short}")
    if votes < _MIN_RENAMED and not is_prefix_only:
        return False
    return 2 * votes >= min(sizes[0][pair[0]], sizes[1][pair[1]])


def _divided(name: str) -> Iterator[_Pair]:
    parts = name.split(".")
    for i in range(min(_MAX_ROOT_DEPTH, len(parts) - 1) + 1):
        if i < len(parts):
            yield ".".join(parts[:i]), ".".join(parts[i:])


def _depth(pair: _Pair) -> int:
    return sum(len(root.split(".")) if root else 0 for root in pair)


def _moved(name: str, old: str, new: str) -> str | None:
    if old and not name.startswith(f"{old}."):
        return None
    rest = name.removeprefix(f"{old}.") if old else name
    return f"{new}.{rest}" if new else rest
