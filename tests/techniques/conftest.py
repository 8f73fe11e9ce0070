"""What several tests of techniques look at."""

from typing import Any

import pytest
from torch import Tensor

from lightning_memsave.techniques.chunked_cross_entropy.products import Product


@pytest.fixture
def num_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often logits were computed."""
    count, compute = [0], Product.compute

    def counting(product: Product, *args: Any) -> Tensor:
        count[0] += 1
        return compute(product, *args)

    monkeypatch.setattr(Product, "compute", counting)
    return count
