"""Two trainers in two threads: what is replaced for the whole process comes back, in any order."""

import contextlib
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.measure.storages import on_storage_resize
from lightning_memsave.prediction.fake.tensors import allow_construction
from lightning_memsave.techniques.chunked_cross_entropy.deferred_logits import (
    materialize_referenced_logits,
)
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.micro_batching.technique import check_repeatable
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from lightning_memsave.trainer.nested_fit import quiet


@contextlib.contextmanager
def building() -> Iterator[None]:
    with FakeTensorMode(), allow_construction():
        yield


@contextlib.contextmanager
def hearing_of_sizes() -> Iterator[None]:
    stop = on_storage_resize(lambda storage: None)
    try:
        yield
    finally:
        stop()


def replaced() -> list[Any]:
    return [
        sys.stdout,
        [handler.filters[:] for handler in logging.root.handlers],
        vars(Tensor)["__deepcopy__"],
        vars(FakeTensorMode).get("__deepcopy__"),
        nn.init._no_grad_trunc_normal_,
        vars(torch.UntypedStorage).get("resize_"),
    ]


@pytest.mark.parametrize("context", [quiet, building, hearing_of_sizes])
def test_the_first_to_come_may_be_the_first_to_go(context):
    before = replaced()
    has_entered, may_leave = threading.Event(), threading.Event()

    def second() -> None:
        with context():
            has_entered.set()
            may_leave.wait(10)

    thread = threading.Thread(target=second)
    with context():
        thread.start()
        has_entered.wait(0.5)  # the second may wait until the first has left
    may_leave.set()
    thread.join(10)
    assert replaced() == before


def test_a_model_made_meanwhile_has_weights():
    drawn: list[Tensor] = []
    with building():
        thread = threading.Thread(
            target=lambda: drawn.append(nn.init.trunc_normal_(torch.zeros(100)))
        )
        thread.start()
        thread.join(10)
        fake = nn.init.trunc_normal_(torch.empty(100))  # it would draw for ever
    assert drawn[0].count_nonzero() == 100
    assert fake.shape == (100,)


def make_logits() -> Any:
    model = nn.Linear(4, 8)
    ChunkedCrossEntropy(heads="Linear").apply(model)
    return model, model(torch.ones(2, 4, requires_grad=True))


def make_updates() -> Any:
    model = nn.Linear(4, 4)
    return model, OptimizerInBackward().apply(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("make", "look"),
    [(make_logits, materialize_referenced_logits), (make_updates, check_repeatable)],
    ids=["logits", "updates"],
)
def test_looking_for_ones_own_while_another_thread_makes_its_own(
    make: Callable[[], Any], look: Callable[[nn.Module], None]
) -> None:
    interval, is_over = sys.getswitchinterval(), threading.Event()
    kept = [make() for _ in range(50)]

    def make_more() -> None:
        while not is_over.is_set():
            kept.append(make())
            del kept[50:]

    thread = threading.Thread(target=make_more)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(200):
            look(nn.Linear(2, 2))
    finally:
        is_over.set()
        thread.join(10)
        sys.setswitchinterval(interval)
        kept.clear()
        gc.collect()
