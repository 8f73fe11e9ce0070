"""Counts of labels that are read once, for views of the same entries."""

import torch

from lightning_memsave.core.label_counts import known_count, note_count
from lightning_memsave.prediction.fake.tensors import fake_tensors


def make_labels() -> torch.Tensor:
    return torch.tensor([[1, 2, -100], [3, -100, -100]])


def test_is_known_for_views_of_the_same_entries():
    labels = make_labels()
    first, second = labels.split(1)
    note_count(first, -100, 2)
    note_count(second, -100, 1)
    assert known_count(first.view(-1), -100) == 2
    assert known_count(second.flatten(), -100) == 1
    assert known_count(labels, -100) is None
    assert known_count(labels[0, :2], -100) is None
    assert known_count(first, 1) is None
    assert known_count(first.clone(), -100) is None


def test_is_forgotten_when_labels_change():
    labels = make_labels()
    part = labels[:1]
    note_count(part, -100, 2)
    labels[0, 0] = -100
    assert known_count(part, -100) is None
    note_count(part, -100, 1)
    assert known_count(part, -100) == 1


def test_views_with_gaps_have_no_count():
    labels = make_labels()
    note_count(labels[:, 1], -100, 1)
    assert known_count(labels[:, 1], -100) is None
    note_count(labels.flatten()[:2], -100, 2)
    assert known_count(labels[:, 0], -100) is None  # the same place and number of entries


def test_inference_tensors_do_not_show_changes():
    with torch.inference_mode():
        labels = make_labels()
        note_count(labels, -100, 3)
        assert known_count(labels, -100) is None


def test_fake_tensors_have_no_count():
    """It may be a guess."""
    with fake_tensors() as fakes:
        labels = fakes.copy_batch(make_labels())
        note_count(labels, -100, 3)
        assert known_count(labels, -100) is None
