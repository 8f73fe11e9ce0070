import pytest
import torch


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert "resize_" not in vars(torch.UntypedStorage)
