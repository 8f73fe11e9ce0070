"""Samples that both trainers read through a DataLoader, as a project's own would be."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks._models import masked_batch
from benchmarks.ladder._rows import Workload

Sample = dict[str, list[int]]
NUM_BATCHES = 4
"""Different batches, shown again and again, so that the loss falls."""


class Samples(Dataset[Sample]):
    """Masked sequences of random tokens.

    Lists, not tensors: what is counted must be the batches alone, not a corpus behind them.

    Args:
        workload: Says how many and how long.
    """

    def __init__(self, workload: Workload) -> None:
        self.num_samples = workload.num_steps * workload.batch_size
        self.samples: list[Sample] = []
        for seed in range(NUM_BATCHES):
            batch = masked_batch(
                workload.sizes.vocab_size, workload.batch_size, workload.num_tokens, seed=seed
            )
            columns = {name: tensor.tolist() for name, tensor in batch.items()}
            self.samples += [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return self.samples[index % len(self.samples)]


class Collate:
    """Makes a batch of samples.

    Args:
        track: Told of each batch.
    """

    def __init__(self, track: Callable[[dict[str, Tensor]], None]) -> None:
        self.track = track

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        batch = {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}
        self.track(batch)
        return batch
