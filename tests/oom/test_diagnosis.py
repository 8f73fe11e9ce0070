import json

import pytest

from lightning_memsave.core.technique import Row
from lightning_memsave.oom.advice import RunFacts
from lightning_memsave.oom.diagnosis import CAUSES, diagnose
from lightning_memsave.oom.message import read_out_of_memory
from lightning_memsave.units import GIB
from tests.oom import messages as m


def diagnosis_of(text, allocator_settings=""):
    return diagnose(read_out_of_memory(text), allocator_settings)


def message(*, asked, free, allocated, unallocated, capacity=16.0):
    return (
        f"CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a total capacity of "
        f"{capacity:.2f} GiB of which {free:.2f} GiB is free. Of the allocated memory "
        f"{allocated:.2f} GiB is allocated by PyTorch, and {unallocated:.2f} GiB is reserved by "
        "PyTorch but unallocated."
    )


EXPECTED = {
    "TORCH_1_2": ("fragmentation", "expandable_segments:True"),
    "TORCH_1_8": ("full", "MemSaveCallback()"),
    "TORCH_1_12_LIMITED": ("too_large", "one allocation"),
    "TORCH_2_1": ("full", "MemSaveCallback()"),
    "FULL": ("full", "MemSaveCallback()"),
    "FRAGMENTED": ("fragmentation", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    "TWO_PROCESSES": ("other_process", "(process 2493055)"),
    "CONTAINER": ("full", "MemSaveCallback()"),
    "LIMITED": ("limit", "set_per_process_memory_fraction"),
    "WSL": ("refused", "nothing else on the device"),
    "GRAPHS": ("full", "MemSaveCallback()"),
    "TOO_LARGE": ("too_large", "one allocation"),
    "MALLOC_ASYNC": ("outside", "nvidia-smi"),
    "ROCM": ("outside", "nvidia-smi"),
    "CPU": ("host", "num_workers"),
    "CPU_WINDOWS": ("host", "num_workers"),
    "CUBLAS": ("library", "CUDA_LAUNCH_BLOCKING=1"),
    "DRIVER": ("unknown", "the whole message"),
    "CUBLAS_HANDLE": ("library", "CUDA_LAUNCH_BLOCKING=1"),
    "CUDNN_HANDLE": ("library", "CUDA_LAUNCH_BLOCKING=1"),
    "NCCL": ("nccl", "two ranks are on one device"),
    "BITSANDBYTES": ("bitsandbytes", "micro_batch_size=4"),
    "TRITON": ("kernel", 'attn_implementation="sdpa"'),
    "MPS": ("mps", "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"),
    "WORKER_KILLED": ("killed", "num_workers"),
    "RANK_KILLED": ("killed", "num_workers"),
    "SLURM": ("killed", "num_workers"),
    "BUS_ERROR": ("shared_memory", "--shm-size"),
    "SHM_FULL": ("shared_memory", "--shm-size"),
    "NUMPY": ("host", "num_workers"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_finds_the_cause_and_advises_first_what_helps_most(name):
    diagnosis = diagnosis_of(getattr(m, name))
    cause, first_advice = EXPECTED[name]
    assert diagnosis.cause == cause
    assert first_advice in diagnosis.advice[0]


def test_where_the_module_itself_does_not_fit_a_smaller_batch_is_no_advice():
    frame = '  File "/venv/torch/nn/modules/module.py", line 934, in _apply\n'
    diagnosis = diagnose(read_out_of_memory(frame + m.FULL), run=RunFacts(has_memsave=True))
    assert "where the module is moved" in diagnosis.summary
    assert 'offload="parameters"' in diagnosis.advice[0]
    # Nor is the table of the callback, which is printed after the module has moved.
    assert not any("accumulate_grad_batches" in a or "table" in a for a in diagnosis.advice)


def test_every_cause_has_an_example():
    assert {cause for cause, _ in EXPECTED.values()} == set(CAUSES)


@pytest.mark.parametrize(
    ("unallocated", "cause"), [(0.70, "full"), (0.80, "fragmentation"), (5.0, "fragmentation")]
)
def test_fragmentation_begins_at_five_percent_of_what_is_reserved(unallocated, cause):
    text = message(asked=0.5, free=0.1, allocated=15.0 - unallocated, unallocated=unallocated)
    diagnosis = diagnosis_of(text)
    assert diagnosis.cause == cause
    assert any("expandable_segments" in line for line in diagnosis.advice) == (cause != "full")


@pytest.mark.parametrize(("free", "cause"), [(2.0, "full"), (2.005, "full"), (2.5, "refused")])
def test_a_request_as_large_as_what_is_free_was_not_refused_but_is_rounded(free, cause):
    assert diagnosis_of(message(asked=2, free=free, allocated=13, unallocated=0.1)).cause == cause


def test_scattered_memory_that_is_too_little_is_not_the_cause_but_is_mentioned():
    diagnosis = diagnosis_of(message(asked=4, free=0.1, allocated=13, unallocated=2))
    assert diagnosis.cause == "full"
    assert "MemSaveCallback()" in diagnosis.advice[0]
    assert any("2.00 GiB (13% of what torch has reserved)" in line for line in diagnosis.advice)


@pytest.mark.parametrize(
    ("asked", "limit_mb"), [(0.04, 32), (0.3, 128), (0.5, 256), (1.0, 512), (6.0, 512)]
)
def test_the_split_limit_lies_below_the_request_and_above_what_torch_refuses(asked, limit_mb):
    diagnosis = diagnosis_of(message(asked=asked, free=0.01, allocated=7, unallocated=8))
    assert f"max_split_size_mb:{limit_mb}`" in diagnosis.advice[1]


def test_does_not_advise_what_is_switched_on():
    diagnosis = diagnosis_of(m.FRAGMENTED, "expandable_segments:True, max_split_size_mb:128")
    assert "Keep shapes steady" in diagnosis.advice[0]
    assert not any("max_split_size_mb" in line for line in diagnosis.advice)


def test_in_the_optimizers_step_advises_a_smaller_state():
    frame = '  File "/venv/torch/optim/adamw.py", line 230, in _init_group\n'
    diagnosis = diagnosis_of(frame + m.FULL)
    assert 'optimizer="8bit"' in diagnosis.advice[0]
    assert "Out of memory on cuda:0 in optimizer" in diagnosis.summary
    assert any("first" in finding for finding in diagnosis.findings)


def test_shares_add_up_to_the_device():
    for text in (m.FULL, m.FRAGMENTED, m.TWO_PROCESSES, m.CONTAINER, m.LIMITED, m.MALLOC_ASYNC):
        diagnosis = diagnosis_of(text)
        assert sum(diagnosis.shares.values()) == pytest.approx(
            diagnosis.oom.capacity_bytes, rel=0.02
        )


def test_in_a_container_the_process_with_a_foreign_number_is_this_one():
    diagnosis = diagnosis_of(m.CONTAINER)
    assert "others" not in diagnosis.shares
    assert diagnosis.shares["outside"] < GIB
    assert any("container" in finding for finding in diagnosis.findings)


def test_a_process_beside_this_one_in_a_container_is_another():
    text = m.TWO_PROCESSES.replace("Including non-PyTorch memory, this process", "Process 7")
    diagnosis = diagnosis_of(text)
    assert diagnosis.cause == "other_process"
    assert "(process 2493055)" in diagnosis.advice[0]


def test_a_small_process_beside_is_mentioned_and_not_blamed():
    text = m.FULL.replace("Including", "Process 12 has 300.00 MiB memory in use. Including")
    diagnosis = diagnosis_of(text)
    assert diagnosis.cause == "full"
    assert "Other processes hold 300.00 MiB on this device." in diagnosis.findings


def test_text_says_cause_figures_and_advice():
    text = str(diagnosis_of(m.FRAGMENTED))
    assert text.splitlines()[0] == (
        "Out of memory on cuda:0: free memory is scattered between tensors."
    )
    assert "3.24 GiB    6.8%  reserved by torch's allocator but unused" in text
    assert "1. Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`" in text


def test_becomes_json():
    found = json.loads(json.dumps(diagnosis_of(m.TWO_PROCESSES).to_dict()))
    assert found["cause"] == "other_process"
    assert found["oom"]["processes"][0]["pid"] == 2493055
    assert set(found["shares"]) == {"allocated", "unallocated", "outside", "others", "free"}


def test_evaluation_that_is_split_already_has_advice_that_can_be_typed():
    rows = (Row("evaluation", "True", status="on"),)
    run = RunFacts(has_memsave=True, rows=rows, is_evaluation=True, precision="bf16-mixed")
    (advice,) = diagnose(read_out_of_memory(m.FULL), run=run).advice[:1]
    assert "`compute_on_cpu=True`" in advice


def test_does_not_advise_to_add_the_callback_that_is_there():
    advice = diagnose(read_out_of_memory(m.FULL), run=RunFacts(has_memsave=True)).advice
    assert "the table that `MemSaveCallback` printed" in advice[0]
    assert not any("Add `MemSaveCallback()`" in line for line in advice)
