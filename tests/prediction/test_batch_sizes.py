import torch

from lightning_memsave.prediction.what_if import (
    SequenceAxis,
    find_axis,
    find_sequence,
    sample_count,
    with_length,
    with_samples,
)


def test_samples_are_counted_and_repeated():
    assert sample_count({"x": torch.zeros(4, 2), "columns": ("a", "b")}) == 4
    tensor, names = with_samples([torch.tensor([7, 8, 9]), ["a", "b", "c"]], 4)
    assert tensor.tolist() == [7, 8, 9, 7]
    assert names == ["a", "b", "c", "a"]


def test_the_axis_of_the_sequence_is_found():
    ids = {"input_ids": torch.zeros(8, 128, dtype=torch.long)}
    assert find_sequence(ids) == SequenceAxis(1, 128)
    assert find_sequence([torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)]) is None
    assert find_axis([torch.zeros(8, 256, 64), torch.zeros(8)], [256]) == SequenceAxis(1, 256)


def test_tokens_are_cut_and_repeated():
    ids = torch.arange(4).view(1, 4)
    sequence = SequenceAxis(1, 4)
    assert with_length(ids, sequence, 3).tolist() == [[0, 1, 2]]
    assert with_length(ids, sequence, 5).tolist() == [[0, 1, 2, 3, 0]]
