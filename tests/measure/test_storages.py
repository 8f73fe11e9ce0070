from collections import UserDict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nested import nested_tensor

from lightning_memsave.measure.storages import storages_of, tensors_in


@dataclass
class Batch:
    inputs: Tensor
    label: str


def test_tensors_of_all_usual_batches():
    a, b, c, d = (torch.tensor(i) for i in range(4))
    batch = [a, (Batch(b, "text"), UserDict(ids=c)), {"nothing": None, "number": 3}, d, d]
    assert [int(tensor) for tensor in tensors_in(batch)] == [0, 1, 2, 3, 3]
    assert list(tensors_in(Batch)) == []


def num_bytes(tensor):
    return sum(storage.nbytes() for storage in storages_of(tensor))


def test_bytes_of_unusual_tensors():
    assert num_bytes(torch.zeros(10)[2:3]) == 40
    assert num_bytes(torch.eye(3).to_sparse()) == 3 * 4 + 3 * 2 * 8
    assert num_bytes(torch.zeros(10, device="meta")) == 40
    jagged = nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged)
    assert num_bytes(jagged) >= 8 * 4 + 3 * 8


def test_wrappers_of_torch_func_have_no_storage_of_their_own():
    seen = []

    def function(x):
        seen.append(num_bytes(x))
        return x

    torch.func.vmap(function)(torch.zeros(2, 3))
    assert seen == [0]
