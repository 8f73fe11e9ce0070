"""Batches and outputs of every kind that DataLoaders and modules make."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import MaskedLMOutput

from lightning_memsave.core.nested import count_samples, merge_outputs, pick_samples, split_samples
from lightning_memsave.errors import IncompatibleError

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Record:
    x: Tensor
    names: list[str]
    scale: float = 2.0
    derived: Tensor = field(init=False, default_factory=lambda: torch.arange(7))


X = torch.arange(14).view(7, 2)
NAMES = list("abcdefg")

BATCHES: dict[str, Any] = {
    "tensor": X,
    "list": [X, X[:, 0]],
    "tuple": (X, {"y": X[:, 1], "deeper": [X]}),
    "dict": {"x": X, "scalar": torch.tensor(3.0), "flag": True, "text": "all", "none": None},
    "ordered": OrderedDict(x=X, names=NAMES),
    "default": defaultdict(list, x=X, names=NAMES),
    "namedtuple": Point(X, NAMES),
    "dataclass": Record(X, NAMES),
    "encoding": BatchEncoding({"input_ids": X, "labels": X}),
    "strings": NAMES,
    "pair of strings": [NAMES, list("hijklmn")],
    "output": MaskedLMOutput(logits=X),
}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.tolist()]
    if isinstance(value, Record):
        return [leaves(value.x), value.names, value.scale, leaves(value.derived)]
    if hasattr(value, "items"):
        return [[name, leaves(item)] for name, item in value.items()]
    if isinstance(value, list | tuple):
        return [leaves(item) for item in value]
    return [value]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, [1] * 7), (2, [2, 2, 2, 1]), (3, [3, 2, 2]), (4, [4, 3]), (6, [5, 2]), (7, [7]), (9, [7])],
)
def test_parts_have_the_form_of_the_batch_and_make_it_up(name, size, expected):
    batch = BATCHES[name]
    before = leaves(batch)
    parts = split_samples(batch, size)
    sizes = [count_samples(part) for part in parts]
    assert sizes == expected
    assert all(type(part) is type(batch) for part in parts)
    assert leaves(merge_outputs(parts, sizes, [n / 7 for n in sizes])) == before
    assert leaves(batch) == before


def test_parts_share_memory_with_the_batch():
    part = split_samples({"x": X}, 3)[1]["x"]
    assert part.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


def test_a_tokenizers_batch_keeps_what_else_it_has():
    batch = BATCHES["encoding"]
    part = split_samples(batch, 2)[0]
    assert part.encodings is batch.encodings
    assert part["input_ids"].shape == (2, 2)


def test_a_record_keeps_what_is_not_an_argument():
    part = split_samples(Record(X, NAMES), 3)[2]
    assert (part.names, part.derived.tolist(), part.scale) == (["f", "g"], [5, 6], 2.0)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, r"\['x'\]: 3, \['y'\]: 4"),
        ((torch.zeros(3), ["a"]), r"\[0\]: 3, \[1\]: 1"),
        ({"x": torch.tensor(1.0)}, "none"),
        (object(), "none"),
        (None, "none"),
    ],
)
def test_disagreeing_sizes_are_refused(batch, sizes):
    with pytest.raises(IncompatibleError, match=rf"{sizes}.*split_batch="):
        split_samples(batch, 2)


MERGED: dict[str, tuple[list[Any], Any]] = {
    "mean": ([torch.tensor(1.0), torch.tensor(4.0)], torch.tensor(3.25)),
    "floats": ([1.0, 4.0], 3.25),
    "joined": ([torch.tensor([1]), torch.tensor([2, 3, 4])], torch.tensor([1, 2, 3, 4])),
    "equal": ([torch.tensor([5, 6]), torch.tensor([5, 6])], torch.tensor([5, 6])),
    "per sample": ([["a"], ["b", "c", "d"]], ["a", "b", "c", "d"]),
    "text": (["same", "same"], "same"),
    "nothing": ([None, None], None),
    "empty": ([{}, {}], {}),
    "list of tensors": (
        [[torch.tensor([1])], [torch.tensor([2, 3, 4])]],
        [torch.tensor([1, 2, 3, 4])],
    ),
    "nested": (
        [{"a": (torch.tensor(1.0), ["x"])}, {"a": (torch.tensor(5.0), ["y", "z", "w"])}],
        {"a": (torch.tensor(4.0), ["x", "y", "z", "w"])},
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_outputs_of_one_and_three_samples(name):
    outputs, expected = MERGED[name]
    merged = merge_outputs(outputs, [1, 3], [0.25, 0.75])
    assert (leaves(merged), type(merged)) == (leaves(expected), type(expected))


@pytest.mark.parametrize(
    ("outputs", "path"),
    [
        ([torch.zeros(5), torch.ones(5)], r"`output` has neither"),
        ([{"x": {"y": torch.zeros(2, 2)}}, {"x": {"y": torch.ones(2, 2)}}], r"\['x'\]\['y'\]"),
        ([1, 2], "`output` is neither"),
        ([{"x": 1}, {"y": 1}], "dict"),
        ([torch.tensor(1.0), None], "neither"),
        (["a", "b"], "neither"),
    ],
)
def test_what_cannot_be_put_together_is_named(outputs, path):
    with pytest.raises(ValueError, match=path):
        merge_outputs(outputs, [1, 3], [0.25, 0.75])


class TestWhatIsSplitByIndexing:
    def test_a_tensordict(self):
        tensordict: Any = pytest.importorskip("tensordict")
        inner = {"x": X, "deeper": {"y": X[:, 0]}}
        batch = {"all": tensordict.TensorDict(inner, batch_size=[7]), "names": NAMES}
        assert count_samples(batch) == 7
        parts = split_samples(batch, 3)
        assert [part["all"].batch_size[0] for part in parts] == [3, 2, 2]
        assert torch.equal(torch.cat([part["all"]["deeper", "y"] for part in parts]), X[:, 0])
        picked = pick_samples(batch, [6, 0])
        assert picked["all"]["x"].tolist() == [X[6].tolist(), X[0].tolist()]
        assert picked["names"] == ["g", "a"]

    def test_a_batch_of_graphs(self):
        data: Any = pytest.importorskip("torch_geometric.data")
        graphs = [
            data.Data(x=torch.full((i + 1, 2), i), edge_index=torch.tensor([[0], [i]]), y=i)
            for i in range(5)
        ]
        batch = data.Batch.from_data_list(graphs)
        assert count_samples(batch) == 5
        parts = split_samples(batch, 2)
        assert [part.num_graphs for part in parts] == [2, 2, 1]
        assert parts[1].x[:, 0].tolist() == [2] * 3 + [3] * 4
        assert parts[1].edge_index.tolist() == [[0, 3], [2, 6]]
        assert pick_samples(batch, [4, 1]).y.tolist() == [4, 1]

    def test_what_is_in_each_image(self):
        labels = [{"boxes": torch.ones(n, 4), "size": torch.tensor([2, 2])} for n in (1, 3, 2)]
        batch = {"images": torch.zeros(3, 8), "labels": labels}
        assert count_samples(batch) == 3
        assert [len(part["labels"]) for part in split_samples(batch, 2)] == [2, 1]
        assert [len(one["boxes"]) for one in pick_samples(batch, [2, 0])["labels"]] == [2, 1]

    def test_a_list_of_batches_is_no_list_of_samples(self):
        batch = [{"x": X, "y": X[:, 0]}, {"x": X, "y": X[:, 0]}]
        assert [len(part[0]["x"]) for part in split_samples(batch, 4)] == [4, 3]
