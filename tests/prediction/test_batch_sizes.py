import pytest
import torch

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.what_if import (
    SequenceAxis,
    find_axis,
    find_sequence,
    sample_count,
    with_length,
    with_samples,
)


def test_changed_batches_keep_their_form():
    tensor = torch.arange(6).view(3, 2)
    batch = {"x": tensor, "same": tensor, "names": ["a", "b", "c"], "columns": ("u", "v")}
    assert sample_count(batch) == 3
    more = with_samples(batch, 4)
    assert more["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert more["same"] is more["x"]
    assert (more["names"], more["columns"]) == (["a", "b", "c", "a"], ("u", "v"))
    mask = {"ids": torch.zeros(2, 8, dtype=torch.long), "mask": torch.ones(2, 1, 8, 8)}
    sequence = find_sequence(mask)
    assert sequence is not None
    shorter = with_length(mask, sequence, 4)
    assert [tuple(t.shape) for t in shorter.values()] == [(2, 4), (2, 1, 4, 4)]
    assert shorter["mask"].untyped_storage().nbytes() == 2 * 4 * 4 * 4


def test_the_axis_of_the_sequence_is_found():
    ids = {"input_ids": torch.zeros(8, 128, dtype=torch.long)}
    assert find_sequence(ids) == SequenceAxis(1, 128)
    assert find_sequence([torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)]) is None
    assert find_axis([torch.zeros(8, 256, 64), torch.zeros(8)], [256]) == SequenceAxis(1, 256)
    assert find_sequence(torch.ones(2, 7, 5), 1) == SequenceAxis(1, 7)
    with pytest.raises(ConfigurationError, match="sequence_axis=3"):
        find_sequence(torch.ones(2, 7, 5), 3)


def test_tokens_are_cut_and_repeated():
    ids = torch.arange(4).view(1, 4)
    sequence = SequenceAxis(1, 4)
    assert with_length(ids, sequence, 3).tolist() == [[0, 1, 2]]
    assert with_length(ids, sequence, 5).tolist() == [[0, 1, 2, 3, 0]]
