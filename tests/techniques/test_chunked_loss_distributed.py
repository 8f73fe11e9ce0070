"""The loss without logits under DistributedDataParallel.

`ranks` runs every scenario on both.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lightning_memsave.techniques.chunked_cross_entropy.products import Product
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from tests.callbacks.ranks import Notes, Report, make_report

WIDTH, WORDS = 16, 1200


class Model(nn.Module):
    """Gives loss and logits, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embedding(ids)))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def train(*, chunked: bool, finds_unused: bool, has_loss_outside: bool) -> Model:
    torch.manual_seed(0)
    model = Model()
    if not finds_unused:
        model.unused.requires_grad_(False)
    if chunked:
        ChunkedCrossEntropy().apply(model)
    wrapped = DistributedDataParallel(model, find_unused_parameters=finds_unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, WORDS, (4, 8), generator=generator)
        output = wrapped(ids)
        loss = output["loss"]
        if has_loss_outside:
            loss = functional.cross_entropy(output["logits"].flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def compare(*, finds_unused: bool = False, has_loss_outside: bool = False) -> Notes:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    settings = {"finds_unused": finds_unused, "has_loss_outside": has_loss_outside}
    theirs = train(chunked=False, **settings)
    count, compute = [0], Product.compute

    def counting(product: Product, *args: Any) -> Tensor:
        count[0] += 1
        return compute(product, *args)

    Product.compute = counting  # type: ignore[method-assign,assignment]
    ours = train(chunked=True, **settings)
    Product.compute = compute  # type: ignore[method-assign]
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, msg=name)
    return {"sum": sum(float(p.detach().double().sum()) for p in ours.parameters()), "n": count}


SCENARIOS = {
    "plain": compare,
    "outside": lambda: compare(has_loss_outside=True),
    "unused": lambda: compare(finds_unused=True),
    "unused_outside": lambda: compare(finds_unused=True, has_loss_outside=True),
}


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Report:
    return make_report(request)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_as_without(report, name):
    ranks = report(name)  # each has compared already
    assert ranks[0] == ranks[1]
    if not name.startswith("unused"):  # there it copies the outputs, logits included
        assert ranks[0]["n"] == [0]
