"""What a step asks of a GPU: limits for presets, and what is counted for operators one knows."""

import pytest
import torch
from torch import nn

from benchmarks.launches.__main__ import MODELS, ROWS, Found, check_claims, count_row, main
from benchmarks.launches._count import Counts, StepCounter
from lightning_memsave.core.memory import mark_as_host

pytestmark = pytest.mark.filterwarnings("ignore")  # of Hugging Face, about configs

LIMITED = [name for name, row in ROWS.items() if row.limit]


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """The presets on RoBERTa 84M, and what they are compared with; clipped and not."""
    (model,) = (model for name, model in MODELS.items() if "RoBERTa" in name)
    by_hand = {ROWS[name].reference for name in LIMITED}
    names = {*LIMITED, *by_hand, *(ROWS[name].reference for name in by_hand), "plain"}
    return {name: count_row(model, row) for name, row in ROWS.items() if name in names}


@pytest.mark.slow
def test_presets_are_within_their_limits(found):
    claims = check_claims("RoBERTa", found)
    assert len(claims) == len(LIMITED) + sum(bool(ROWS[name].reference) for name in found)
    assert [claim for claim, holds in claims.items() if not holds] == []


@pytest.mark.slow
def test_no_gradient_leaves_the_device_where_there_is_room(found):
    for name in ("bitwise, clipped", "classic, clipped"):
        assert found[name].counts.to_host_bytes == found[name].counts.from_host_bytes == 0
    # Its peak is at the end of backward: the first of the gradients must leave, and come back.
    moved = found["single_gpu, clipped"].counts
    assert 0 < moved.to_host_bytes == moved.from_host_bytes < 0.1 * 2 * 84e6


@pytest.mark.slow
def test_clipping_raises_no_peak(found):
    assert found["bitwise, clipped"].peak_bytes == found["bitwise"].peak_bytes
    # One gradient more is on its way.
    more = found["single_gpu, clipped"].peak_bytes - found["single_gpu"].peak_bytes
    assert 0 <= more < 0.01 * found["single_gpu"].peak_bytes


def test_a_limit_that_is_exceeded_is_told():
    reference, over = Counts(), Counts()
    reference.operators["mm"], over.operators["mm"] = 100, 126
    over.waits["nonzero"] = 1
    over.waits["tolist"] = 1
    names = ("plain", ROWS["bitwise"].reference)
    claims = check_claims(
        "m", dict.fromkeys(names, Found(reference, 0)) | {"bitwise": Found(over, 0)}
    )
    failed = [claim for claim, holds in claims.items() if not holds]
    assert len(failed) == 2
    assert failed[0].startswith("m: bitwise has at most 1.25 times the operators")
    assert failed[1] == "m: bitwise waits at most 1 times"


def test_counts_operators_waits_copies_and_flop():
    layer, x = nn.Linear(4, 8), torch.randn(2, 4)
    host = torch.empty(16)
    mark_as_host(host)
    with StepCounter() as counter:
        y = layer(x)
        y.view(4, 4).t()
        host.copy_(y.detach().flatten())
        y.detach().copy_(host.view(2, 8))
        y.sum().item()
        host[0].item()
    counts = counter.counts
    assert counts.operators == {"addmm": 1, "copy_": 2, "sum": 1}
    assert counts.waits == {"_local_scalar_dense": 1}
    assert (counts.to_host_bytes, counts.from_host_bytes) == (64, 64)
    assert counts.flop == 2 * 2 * 4 * 8


def test_recomputation_is_counted_apart():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with StepCounter() as plain:
        block(x).sum().backward()
    with StepCounter() as checkpointed:
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert plain.counts.recomputed == 0
    assert checkpointed.counts.recomputed == 2  # the last layer's output is not needed
    more = checkpointed.counts.operators - plain.counts.operators
    assert more.total() >= 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_runs_dry(tmp_path, capsys):
    assert main(["--dry", "--results", str(tmp_path)]) == 0
    assert (tmp_path / "launches_dry.md").read_text().count("| bitwise") == 3
