"""The shape cache returns what torch returns."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_memsave.prediction.fake import kernels as _fake_kernels
from lightning_memsave.prediction.fake.values import LARGEST

aten = torch.ops.aten


def _described(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result), [_described(part) for part in result]
    place = result.shape, result.stride(), result.storage_offset(), result.dtype, result.device
    return *place, result.untyped_storage().nbytes()


CALLS: dict[str, Any] = {
    "mm": (aten.mm.default, lambda x: (x, x.t())),
    "add": (aten.add.Tensor, lambda x: (x, 1.5)),
    "add_int": (aten.add.Tensor, lambda x: (x.to(torch.int64), 1)),
    "add_float": (aten.add.Tensor, lambda x: (x.to(torch.int64), 1.5)),
    "transpose": (aten.transpose.int, lambda x: (x, 0, 1)),
    "slice": (aten.slice.Tensor, lambda x: (x, 1, 2, 5)),
    "expand": (aten.expand.default, lambda x: (x[:, None], [4, 3, 8])),
    "split": (aten.split.Tensor, lambda x: (x, 2)),
    "unsafe_view": (aten._unsafe_view.default, lambda x: (x, [32])),
    "layer_norm": (aten.native_layer_norm.default, lambda x: (x, [8], None, None, 1e-5)),
    "sum": (aten.sum.dim_IntList, lambda x: (x, [0], True)),
    "where": (aten.where.self, lambda x: (x > 0, x, x)),
    "in_place": (aten.mul_.Tensor, lambda x: (x, x.clone())),
    "broadcast": (aten.mul_.Tensor, lambda x: (x, x[:1].clone())),
    "sqrt_list": (aten._foreach_sqrt.default, lambda x: ([x, x.clone()],)),
    "list_transposed": (aten._foreach_sqrt.default, lambda x: ([x.t()],)),
    "strided": (aten.neg.default, lambda x: (x[:, ::2],)),
    "complex": (aten.neg.default, lambda x: (torch.complex(x, x),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_gives_what_torch_gives(name: str) -> None:
    func, arguments = CALLS[name]
    with FakeTensorMode():
        x = torch.empty(4, 8)
        expected = _described(func(*arguments(x)))
        for _ in range(2):  # the second one is remembered
            args = arguments(x)
            result = _fake_kernels.run_cached(func, args, {})
            assert _described(result) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_its_fake_tensors_are_those_of_the_constructor(dtype: torch.dtype) -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(4, 8, dtype=dtype)
        mine = _fake_kernels.run_cached(aten.t.default, (x,), {})
        mine = _fake_kernels.run_cached(aten.t.default, (x,), {})  # the second one is remembered
        with torch._C._DisableTorchDispatch():
            constructed = FakeTensor(mode, torch.empty(8, 4, dtype=dtype, device="meta"), "cpu")
        assert type(mine) is FakeTensor
        assert vars(mine) == vars(constructed)
        keys = [torch._C._dispatch_keys(tensor) for tensor in (mine, constructed)]
        assert keys[0] == keys[1]


@pytest.mark.parametrize("name", ["transpose", "slice", "unsafe_view", "in_place"])
def test_views_share_memory(name: str) -> None:
    func, arguments = CALLS[name]
    with FakeTensorMode():
        x = torch.empty(4, 8)
        for _ in range(2):
            result = _fake_kernels.run_cached(func, arguments(x), {})
            assert result.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_tells_types_of_numbers_and_default_types_apart() -> None:
    with FakeTensorMode():
        x = torch.empty(4, dtype=torch.int64)
        run = _fake_kernels.run_cached
        assert run(aten.mul.Tensor, (x, 1), {}).dtype is torch.int64
        assert run(aten.mul.Tensor, (x, 1.0), {}).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert run(aten.mul.Tensor, (x, 1.0), {}).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_refuses_what_torch_refuses() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 8)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="must have same reduction dim"):
                _fake_kernels.run_cached(aten.mm.default, (x, x), {})


OFFSETS = torch.tensor([3, 8, 8, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten._grouped_mm.default, (torch.ones(10, 64), torch.ones(4, 64, 32), OFFSETS)),
        (aten._grouped_mm.default, (torch.ones(10, 64).t(), torch.ones(10, 32), OFFSETS)),
        (aten._grouped_mm.default, (torch.ones(4, 5, 64), torch.ones(4, 64, 32))),
        (
            aten.native_layer_norm.default,
            (torch.ones(4, 8, dtype=torch.bfloat16), [8], torch.ones(8), torch.ones(8), 1e-5),
        ),
        (
            aten.native_group_norm.default,
            (torch.ones(4, 8, 6, dtype=torch.bfloat16), *[torch.ones(8)] * 2, 4, 8, 6, 2, 1e-5),
        ),
        (
            aten.native_batch_norm.default,
            (torch.ones(4, 8, dtype=torch.bfloat16), *[torch.ones(8)] * 4, True, 0.1, 1e-5),
        ),
    ],
    ids=["experts", "experts_weights", "experts_batch", "layer_norm", "group_norm", "batch_norm"],
)
def test_gives_what_the_real_kernel_gives(func: Any, args: tuple[Any, ...]) -> None:
    real = func(*args)
    with FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
        assert _described(_fake_kernels.run(func, fakes, {})) == _described(real)


def test_makes_no_result_smaller_than_a_real_one() -> None:
    real = torch.tensor([[1, 1, 2], [0, 2, 2]])
    calls: list[Any] = [
        (aten.nonzero.default, (real,)),
        (aten.masked_select.default, (real, real > 1)),
        (aten._unique2.default, (real, True, True, True)),
        (aten.unique_consecutive.default, (real, True, True)),
        (aten.unique_dim.default, (real, 0)),
        (aten.bincount.default, (real.flatten(), None, 5)),
    ]
    for func, args in calls:
        expected, found = func(*args), LARGEST[func](*args)
        pairs = (
            zip(expected, found, strict=True) if isinstance(found, tuple) else [(expected, found)]
        )
        for one, other in pairs:
            assert other.numel() >= one.numel()
            assert (other.ndim, other.dtype) == (one.ndim, one.dtype)
