"""Run a training step deterministically in float32, and observe its loss functions."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memsave.core.memory import category_in_context
from lightning_memsave.techniques.micro_batching.module_state import ModuleState, key_of

_HALF = (torch.float16, torch.bfloat16)
_MEAN = 1  # `reduction="mean"`, as torch's operators number it
_MAX_IGNORED = 16
_SHARPENING = 8.0
_LOGITS = ("aten::_log_softmax", "aten::binary_cross_entropy_with_logits")
_CROSS_ENTROPY = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_COMPARISONS = ("aten::ne", "aten::eq")
# They copy values: converting their results to float32 needs less memory than their inputs.
_COPIES = (
    *("aten::embedding", "aten::index_select", "aten::index", "aten::gather"),
    *("aten::_to_copy", "aten::clone"),
)
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
_MAX_CONVERTED = 2**22  # elements of a factor that are in float32 at the same time


class SavesBeforeWrites(TorchDispatchMode):
    def __init__(self, state: ModuleState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _, written, _ = _facts_of(func)
        if written:
            self.save_written(written, dict(_bound(func, args, kwargs)))
        return func(*args, **kwargs)

    def save_written(self, written: frozenset[str], values: dict[str, Any]) -> None:
        """Save the tensors among an operator's arguments that it writes to."""
        for name in written & values.keys():
            value = values[name]
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor):
                    self._state.save_before_write(tensor)


class LossProbe(SavesBeforeWrites):
    """Makes the loss of some samples a deterministic function of these samples, in float32.

    Dropout is the identity, random numbers are the same for each sample, half precision is computed
    in float32, and tensors are saved before they are written to.
    """

    def __init__(self, state: ModuleState, *, is_sharp: bool) -> None:
        super().__init__(state)
        self.denominators: list[Tensor] = []
        """Denominators of mean cross-entropies."""
        self.ignored: set[int] = set()
        """Integers that losses ignore, or that the step compares tensors with."""
        self.class_weights: list[Tensor] = []
        self.watched: dict[int, str] = {}
        """Names of tensors by the identities of their storages."""
        self.read: set[str] = set()
        """Names of those that an operator has had as an argument."""
        self.has_logits = False
        """Whether a loss has logits, which can be scaled to make losses of samples differ."""
        self._is_sharp = is_sharp

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, written, has_aliases = _facts_of(func)
        if category_in_context():  # what offloading moves keeps its type: it outlives the proof
            self.save_written(written, dict(_bound(func, args, kwargs)))
            return func(*args, **kwargs)
        if self.watched:
            keys = {
                key_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            }
            self.read |= {name for key, name in self.watched.items() if key in keys}
        if written:
            self.save_written(written, dict(_bound(func, args, kwargs)))
        # What is written to fixes the type: sums in float32 take factors in float32.
        is_wide = written and getattr(args[0], "dtype", None) is torch.float32
        if is_wide or not (has_aliases or name in _COPIES):
            if name in _PRODUCTS and _is_large_half(args[-1]):
                return _product_in_pieces(name, *args, **kwargs)
            args, kwargs = tree_map(_float, args), tree_map(_float, kwargs)
        if kwargs.get("dtype") in _HALF:
            kwargs = {**kwargs, "dtype": torch.float32}
        if torch.Tag.nondeterministic_seeded in func.tags or "dropout" in name:
            return _without_randomness(func, args, kwargs)
        if name == "aten::_to_copy" and self._is_uncast(args, kwargs):
            return args[0]
        self._look(name, args)
        if self._is_sharp and name in _LOGITS:
            args = (args[0] * _SHARPENING, *args[1:])
        return func(*args, **kwargs)

    # Casting a whole weight, now to float32, need not copy it.
    def _is_uncast(self, args: Any, kwargs: Any) -> bool:
        return (
            set(kwargs) == {"dtype"}
            and args[0].dtype == kwargs["dtype"]
            and not torch.is_grad_enabled()
            and self._state.owns(args[0])
        )

    def _look(self, name: str, args: Any) -> None:
        self.has_logits |= name in _LOGITS
        if name in _COMPARISONS and type(args[1]) is int and len(self.ignored) < _MAX_IGNORED:
            self.ignored.add(args[1])
        if name in _CROSS_ENTROPY:
            _, target, weight, reduction, ignored = args[:5]
            self.ignored.add(ignored)
            counts = target != ignored
            if weight is not None:
                self.class_weights.append(weight)
                counts = weight[target.clamp(0, len(weight) - 1)] * counts
            if reduction == _MEAN:
                self.denominators.append(counts.sum())


@functools.cache
def _facts_of(func: Any) -> tuple[str, frozenset[str], bool]:
    """Return an operator's name, the arguments that it writes to, and whether it has aliases."""
    arguments = func._schema.arguments
    aliased = {a.name: a.alias_info for a in arguments if a.alias_info is not None}
    written = {name for name, alias in aliased.items() if alias.is_write}
    # Batch normalisation does not declare these.
    written |= {a.name for a in arguments} & {"running_mean", "running_var"}
    return func._schema.name, frozenset(written), bool(aliased)


def _bound(func: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Pair the names of an operator's arguments with their values."""
    names = [argument.name for argument in func._schema.arguments]
    return [*zip(names, args, strict=False), *kwargs.items()]


def _float(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in _HALF
    return value.float() if is_half else value


def _is_large_half(value: Any) -> bool:
    is_half = isinstance(value, Tensor) and value.dtype in _HALF
    return is_half and value.numel() > _MAX_CONVERTED


# The weight of a head in float32 may need more memory than a training step.
def _product_in_pieces(
    name: str, *factors: Tensor, out: Tensor | None = None, **scales: float
) -> Tensor:
    """Multiply by a weight in half precision, of which a few columns at a time are in float32."""
    *summand, factor, weight = factors
    factor, num_columns = _float(factor), weight.shape[1]
    if name == "aten::addmm_":
        total = summand[0]
    else:
        shape = (len(factor), num_columns)
        total = factor.new_empty(shape) if out is None else out
        total.copy_(summand[0]) if summand else total.zero_()
    size = max(1, _MAX_CONVERTED // len(weight))
    for columns, part in zip(total.split(size, 1), weight.split(size, 1), strict=True):
        columns.addmm_(factor, part.float(), **scales)
    return total


def _without_randomness(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a random operator with the same result for every sample."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    given = dict(_bound(func, args, kwargs))
    values = {argument.name: argument.default_value for argument in func._schema.arguments} | given
    for rate in ("dropout_p", "dropout"):
        if rate in values:
            return func(**{**given, rate: 0.0})
    if name == "native_dropout":
        return values["input"].clone(), torch.ones_like(values["input"], dtype=torch.bool)
    if name == "randperm":  # mixup with the neighbouring sample
        return func(*args, **kwargs).sort(descending=True).values
    if name == "multinomial":
        return values["self"].topk(values["num_samples"]).indices
    drawn = func(*args, **kwargs)
    constant = _CONSTANTS.get(name)
    return drawn if constant is None else drawn.copy_(constant(_evenly_spread(drawn), values))


def _evenly_spread(like: Tensor) -> Tensor:
    """Return values between 0 and 1 that are the same for each index of the first dimension."""
    shape = like.shape[1:]
    count = torch.arange(1, shape.numel() + 1, dtype=torch.float32, device=like.device)
    return (count * 0.6180339887).frac().view(shape).expand(like.shape)


def _bernoulli(u: Tensor, values: dict[str, Any]) -> Any:
    """Return the expectation, so that dropout written with ``bernoulli`` is the identity."""
    given = values.get("p", values["self"])
    return given if isinstance(given, Tensor) else torch.full_like(u, given)


def _uniform(u: Tensor, values: dict[str, Any]) -> Any:
    low, high = values.get("from", 0.0), values.get("to", 1.0)
    return low + (high - low) * u


def _integer(u: Tensor, values: dict[str, Any]) -> Any:
    low = values.get("low", values.get("from", 0)) or 0
    high = values.get("high", values.get("to"))
    return (low + ((high or 2) - low) * u).floor()


# Other random operators stay random, so that nothing can be proven with them.
_CONSTANTS: dict[str, Callable[[Tensor, dict[str, Any]], Any]] = {
    "bernoulli": _bernoulli,
    **dict.fromkeys(("rand", "rand_like", "uniform"), _uniform),
    **dict.fromkeys(
        ("randn", "randn_like", "normal"),
        lambda u, given: (2 * u - 1) * 1.5 * given.get("std", 1.0) + given.get("mean", 0.0),
    ),
    **dict.fromkeys(("randint", "randint_like", "random"), _integer),
    "exponential": lambda u, given: -torch.log1p(-u) / given.get("lambd", 1.0),
}
