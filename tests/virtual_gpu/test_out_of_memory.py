"""A few of the out-of-memory errors of `benchmarks.virtual_gpu.out_of_memory`, which has 300."""

import pytest
import torch

from lightning_memsave.core.out_of_memory import is_out_of_memory
from tests.virtual_gpu import counters
from tests.virtual_gpu.processes import run_python

pytestmark = pytest.mark.gpu

# Model, preset, place, owner of the rest, and the share of what is needed that is left.
CASES = {
    "the module does not fit": ("GPT-2", "classic", "start", "tensor", 0.05),
    "a longer batch, weights on the host": ("RoBERTa", "offload optimizer", "late", "tensor", 0.3),
    "updates in backward": ("GPT-2", "single_gpu", "late", "limit", 0.3),
    "validation": ("Llama", "bitwise", "validation", "card", 0.2),
    "after a backward pass": ("own", "without callback", "optimizer", "outside", 0.0),
}


@pytest.fixture(scope="module")
def found():
    cases = [(n, *case[:4], 8.0, case[4], 0.5) for n, case in enumerate(CASES.values())]
    results = run_python(
        f"""
        import json
        from benchmarks.virtual_gpu._setup import allow_forks
        from benchmarks.virtual_gpu.out_of_memory import Attack, Case
        allow_forks()
        attack = Attack()
        print(json.dumps([attack.run(Case(*case)) for case in {cases}]))
        """,
        VGPU_COMPUTE="1",
        VGPU_CONTEXT="8MiB",
    )
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_goes_on_with_the_right_values_or_says_what_to_do(found, name):
    one = found[name]
    assert one["ooms"]
    assert one["outcome"] in {"right", "ended with advice"}
    assert one.get("diagnosis", {}).get("wrong", []) == []


def test_recovers_where_a_smaller_micro_batch_fits(found):
    recovered = found["a longer batch, weights on the host"]
    assert recovered["outcome"] == "right"
    assert recovered["sizes"][-1] in {1, 2, 4}


def test_knows_that_the_module_itself_did_not_fit(found):
    report = found["the module does not fit"]["diagnosis"]["report"]
    assert report["phase"] == "setup"
    first, second, *_ = report["advice"]
    assert "Empty `_Phases.fit.taken`" in first  # what the test itself takes, in a callback
    assert 'offload="parameters"' in second


@pytest.mark.parametrize("words", ["cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "CUFFT_EXEC_FAILED"])
def test_words_that_have_other_reasons_count_where_the_gpu_is_full(words):
    """Seen on an H100 whose memory was taken: `benchmarks.gpu`, `words_of_a_full_gpu`."""
    held = torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info(held.device)
    assert not is_out_of_memory(RuntimeError(words))
    counters.set_memory(total - free + 2**22)
    try:
        assert is_out_of_memory(RuntimeError(words))
        assert not is_out_of_memory(ValueError(words))
    finally:
        counters.set_memory(total)
