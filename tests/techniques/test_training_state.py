"""State of a step that is copied, compared and restored, whatever its tensors are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import MemoryExhaustedError, MemSaveCallback
from lightning_memsave.techniques.micro_batching.training_state import KnownChanges
from tests.callbacks.lit import assert_same, fit, make_lit, rows_of
from tests.helpers import in_pairs
from tests.out_of_memory import OutOfMemoryAt

pytestmark = pytest.mark.usefixtures("no_prediction")


def _matrix() -> Tensor:
    return torch.arange(1.0, 13).reshape(4, 3)


def _nested(**layout: Any) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **layout)


PLAIN: dict[str, Callable[[], Tensor]] = {
    "column": lambda: _matrix()[:, 1],
    "column of bfloat16": lambda: _matrix().bfloat16()[:, 1],
    "column of one row": lambda: _matrix()[:1, 1],
    "transposed": lambda: _matrix().t(),
    "every second": lambda: _matrix()[::2, ::2],
    "expanded": lambda: torch.ones(3, 1).expand(3, 4),
    "windows": lambda: torch.arange(6.0).unfold(0, 3, 1),
    "scalar": lambda: torch.tensor(1.0),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugate": lambda: torch.full((3,), 1 + 2j).conj(),
    "negative": lambda: torch.full((3,), 1 + 2j).conj().imag,
    "8-bit float": lambda: _matrix().to(torch.float8_e4m3fn),
    "quantized": lambda: torch.quantize_per_tensor(_matrix(), 0.1, 0, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        _matrix(), torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long), 1, torch.qint8
    ),
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "coordinates": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "mkldnn": lambda: _matrix().to_mkldnn(),
    "nested": _nested,
    "jagged": lambda: _nested(layout=torch.jagged),
}
EMPTY: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "column of nothing": lambda: torch.empty(0, 3)[:, 1],
    "expanded nothing": lambda: torch.empty(1, 0).expand(3, 0),
    "meta": lambda: torch.empty(3, device="meta"),
}
KINDS = PLAIN | OTHERS | EMPTY
# Of prototypes, and of kinds of tensors that torch gives up.
QUIET = pytest.mark.filterwarnings(
    "ignore:.*(nested tensors|Sparse .* tensor|quantize):UserWarning"
)


def values_of(tensor: Tensor) -> list[Any]:
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    if tensor.layout is not torch.strided:
        return tensor.to_dense().tolist()
    if tensor.is_quantized:
        return tensor.int_repr().tolist()
    return (tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor).tolist()


def change(tensor: Tensor) -> None:
    """Write other values to the memory of a tensor, as an operator in place does."""
    if tensor.layout is torch.sparse_coo:
        tensor._values().mul_(3)
    elif tensor.layout is torch.strided and not tensor.is_nested:
        torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).bitwise_xor_(1)
    else:
        tensor.mul_(3)


class Keeps(nn.Module):
    """Keeps a tensor between steps."""

    def __init__(self, tensor: Tensor, is_buffer: bool) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("kept", tensor)
        else:
            self.kept = tensor


@QUIET
@pytest.mark.parametrize(
    ("is_buffer", "is_watched", "kind"),
    in_pairs([False, True], [True, False], [*(PLAIN | OTHERS)]),
    ids=str,
)
def test_tensors_of_any_kind_are_restored(kind, is_watched, is_buffer):
    module = Keeps(KINDS[kind](), is_buffer)
    before = values_of(module.kept)
    state = KnownChanges(module).save("drop", is_watched)
    change(module.kept)
    assert values_of(module.kept) != before
    state.restore()
    assert values_of(module.kept) == before


@QUIET
@pytest.mark.parametrize("is_buffer", [False, True], ids=["attribute", "buffer"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_found(kind, is_buffer):
    inner = Keeps(KINDS[kind](), is_buffer)
    known = KnownChanges(nn.Sequential(inner))
    known.save("drop", is_watched=True)
    known.learn()
    # Of sparse, opaque and nested tensors it is not known, so they are saved.
    assert (inner in known.changing) == (kind in OTHERS)
    if kind not in EMPTY:
        known.save("drop", is_watched=True)
        change(inner.kept)
        known.learn()
        assert inner in known.changing


def lit_that_keeps(make: Callable[[], Tensor]) -> Any:
    lit = make_lit()
    type(lit).on_fit_start = lambda self: setattr(self, "kept", make())
    return lit


@QUIET
@pytest.mark.parametrize("kind", KINDS)
def test_the_bare_callback_trains_a_module_that_keeps_it(kind):
    callback = MemSaveCallback(report=False, predict=False)
    fit(lit_that_keeps(KINDS[kind]), callback)
    assert rows_of(callback)["micro_batch_size"].status == "on"


class Unreadable(Tensor):
    """A tensor of which nothing can be copied, as of a library with a layout of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "clone":
            raise NotImplementedError("no copies of this layout")
        return super().__torch_function__(func, types, args, kwargs or {})


class TestStateThatCannotBeSaved:
    def make(self) -> tuple[Any, MemSaveCallback]:
        lit = lit_that_keeps(lambda: torch.ones(2).as_subclass(Unreadable))
        return lit, MemSaveCallback(
            preset="bitwise", activation_checkpointing=None, report=False, predict=False
        )

    def test_does_not_end_the_fit_and_has_a_row(self):
        lit, callback = self.make()
        assert_same(fit(lit, callback), fit(make_lit()))
        row = rows_of(callback)["micro_batch_size"]
        assert row.status == "off"
        assert "cannot be saved and restored (NotImplementedError: no copies" in row.details[0]

    def test_ends_with_advice_where_memory_runs_out(self):
        lit, callback = self.make()
        mode = OutOfMemoryAt(5)
        step = type(lit).training_step

        def training_step(self, batch, batch_idx):
            mode.is_armed = torch.is_grad_enabled()  # not in the proof
            return step(self, batch, batch_idx)

        type(lit).training_step = training_step
        match = r"(?s)cannot be repeated.*no copies of this layout.*`micro_batch_size=4`"
        with mode, pytest.raises(MemoryExhaustedError, match=match):
            fit(lit, callback)
