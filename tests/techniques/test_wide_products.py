"""Sums of products of low precision, by whichever operator this torch has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.techniques.chunked_cross_entropy import wide_products
from lightning_memsave.techniques.chunked_cross_entropy.wide_products import find_product

BF16, WIDE = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def widened(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


def addmm(total: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """As torch has it on CUDA; the CPU has no kernel for it."""
    out = kwargs["out"]
    before = kwargs["beta"] * total if kwargs["beta"] else 0
    result: Tensor = out.copy_(before + widened(a, b, kwargs["out_dtype"]))
    return result


def refuses(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")


def has_none(*args: Any, **kwargs: Any) -> Tensor:
    raise TypeError("addmm() received an invalid combination of arguments")


def is_wrong(total: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    return total


@pytest.fixture(autouse=True)
def forget():
    find_product.cache_clear()
    cached = find_product
    yield
    cached.cache_clear()


DEVICES = {
    "none": (has_none, "_add_in_tiles"),
    "refused": (refuses, "_add_in_tiles"),
    "CUDA": (addmm, "_add_by_addmm"),
    "a wrong result": (is_wrong, "_add_in_tiles"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_first", [True, False])
def test_uses_what_the_device_has(device, is_first, monkeypatch):
    has_addmm, expected = DEVICES[device]
    monkeypatch.setattr(torch, "addmm", has_addmm)
    add = find_product(CPU, WIDE, BF16)
    assert add is getattr(wide_products, expected)
    torch.manual_seed(0)
    total, a, b = (
        torch.randn(9, 1500),
        torch.randn(9, 16).bfloat16(),
        torch.randn(16, 1500).bfloat16(),
    )
    truth = a.double() @ b.double() + (0 if is_first else total.double())
    if is_first:
        total.fill_(float("nan"))  # it may hold anything
    add(total, a, b, 0 if is_first else 1)
    torch.testing.assert_close(total.double(), truth, rtol=1e-5, atol=1e-5)


def test_says_where_products_need_more_memory(monkeypatch):
    monkeypatch.setattr(torch, "addmm", addmm)
    assert wide_products.describe_missing_product(CPU, BF16) == ""
    find_product.cache_clear()
    monkeypatch.setattr(torch, "addmm", has_none)
    assert "no product of bfloat16" in wide_products.describe_missing_product(CPU, BF16)


@pytest.mark.parametrize(
    ("add", "expected"), [("_add_in_tiles", "_add_in_tiles"), ("_add_by_addmm", "_add_fake")]
)
def test_a_fit_predicts_the_product_that_it_uses(add, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(wide_products, "find_product", lambda *_: getattr(wide_products, add))
    with fake_tensors():
        found = wide_products._product_for(torch.zeros(8, 600), BF16)
    assert found is getattr(wide_products, expected)


def test_an_operator_is_looked_for_once(monkeypatch):
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return addmm(*args, **kwargs)

    monkeypatch.setattr(torch, "addmm", counted)
    assert find_product(CPU, WIDE, BF16) is find_product(CPU, WIDE, BF16)
    assert len(calls) == 1


def test_a_full_gpu_is_no_missing_operator(monkeypatch):
    def is_full(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "addmm", is_full)
    with pytest.raises(torch.OutOfMemoryError):
        find_product(CPU, WIDE, BF16)
    monkeypatch.setattr(torch, "addmm", addmm)
    assert find_product(CPU, WIDE, BF16) is wide_products._add_by_addmm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_first", [True, False])
def test_on_cuda_nothing_is_rounded_in_between(dtype, is_first):
    torch.manual_seed(0)
    total = torch.randn(64, 1001, device="cuda")
    a, b = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((64, 96), (96, 1001)))
    truth = a.double() @ b.double() + (0 if is_first else total.double())
    add = find_product(total.device, WIDE, dtype)
    add(total, a, b, 0 if is_first else 1)
    torch.testing.assert_close(total.double(), truth, rtol=1e-4, atol=1e-4)
