"""Fits in forks of a process that has imported everything and initialized CUDA."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from unittest import mock

import torch

from lightning_memsave.callbacks.settings import micro_batch_size
from lightning_memsave.techniques.chunked_cross_entropy import wide_products
from lightning_memsave.techniques.low_precision_weights import fused_steps


def allow_forks() -> None:
    """Let forks use CUDA: the virtual GPU has no context that a fork would lose."""
    torch.cuda.init()
    torch.cuda._is_in_bad_fork = lambda: False


def be_quiet() -> None:
    """Say nothing of each fit but errors."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def taken_to_work(*, compiles: bool = True) -> Iterator[None]:
    """Take what the product tries by value to work, where no kernel computes anything.

    Args:
        compiles: Whether compiled functions are among it, which takes a minute at first.

    Yields:
        Once.
    """
    add = wide_products._add_by_addmm
    with (
        mock.patch.object(wide_products, "find_product", return_value=add),
        mock.patch.object(fused_steps, "_is_proven", return_value=compiles),
        mock.patch.object(micro_batch_size, "is_fake", return_value=True),  # proofs of a loss
    ):
        yield
