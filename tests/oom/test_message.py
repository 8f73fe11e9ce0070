import dataclasses
import json
import textwrap

import pytest

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.oom.message import ProcessOnDevice, read_out_of_memory
from lightning_memsave.units import GIB, MIB
from tests.oom import messages as m


def gib(number):
    return round(number * GIB)


def mib(number):
    return round(number * MIB)


def figures(text):
    """What the text tells: fields with a value, apart from the words themselves."""
    fields = dataclasses.asdict(read_out_of_memory(text))
    for name in ("message", "allocator_variable", "num_messages", "processes", "told"):
        fields.pop(name)
    return {name: value for name, value in fields.items() if value not in {None, ""}}


CUDA = {"device": "cuda", "device_index": 0}
UNITS = {"B": 1, "MiB": MIB, "GiB": GIB}


def on_cuda(text, **others):
    """Read a line of figures; what is reserved has what is allocated in it."""
    found = {}
    for part in text.split(", "):
        name, number, unit = part.split()
        found[f"{name}_bytes"] = round(float(number) * UNITS[unit])
    if "reserved_bytes" in found:
        found["unallocated_bytes"] = found.pop("reserved_bytes") - found["allocated_bytes"]
    return CUDA | found | others


_TORCH_1_8 = "requested 20 MiB, capacity 31.75 GiB, free 3.75 MiB, allocated 30.29 GiB"
EXPECTED = {
    "TORCH_1_2": on_cuda(
        "requested 3.86 GiB, capacity 10.92 GiB, free 1.52 GiB, allocated 5.17 GiB, "
        "unallocated 3.72 GiB"
    ),
    "TORCH_1_8": on_cuda(f"{_TORCH_1_8}, reserved 30.40 GiB", device_index=4),
    "TORCH_1_12_LIMITED": on_cuda(
        "requested 5.59 GiB, capacity 11.17 GiB, free 10.91 GiB, allowed 5.58 GiB, allocated 0 B, "
        "unallocated 0 B"
    ),
    "TORCH_2_1": on_cuda(
        "requested 20 MiB, capacity 8 GiB, free 0 B, allocated 14.51 GiB, unallocated 15.90 MiB"
    ),
    "FULL": on_cuda(
        "requested 170 MiB, capacity 31.37 GiB, free 30.19 MiB, process 31.33 GiB, "
        "allocated 30.81 GiB, unallocated 33.90 MiB"
    ),
    "LIMITED": on_cuda(
        "requested 996 MiB, capacity 44.43 GiB, free 9.06 GiB, process 17.81 GiB, "
        "allowed 17.69 GiB, allocated 17.44 GiB, unallocated 59.88 MiB"
    ),
    "WSL": on_cuda(
        "requested 1.74 GiB, capacity 23.99 GiB, free 5.05 GiB, allocated 17.60 GiB, "
        "unallocated 34.80 MiB"
    ),
    "GRAPHS": on_cuda(
        "requested 40 MiB, capacity 23.50 GiB, free 31.19 MiB, allocated 21.18 GiB, "
        "unallocated 856.57 MiB"
    ),
    "MALLOC_ASYNC": on_cuda("requested 10.12 GiB, capacity 24 GiB, free 0 B, allocated 4.86 GiB"),
    "ROCM": on_cuda(
        "requested 978 MiB, capacity 15.98 GiB, free 630 MiB, allocated 0 B, unallocated 0 B"
    ),
    "CPU": {"device": "cpu", "requested_bytes": 2_359_296},
    "CPU_WINDOWS": {"device": "cpu", "requested_bytes": 911_360},
    "CUBLAS": {"device": "cuda", "library": "CUBLAS"},
    "DRIVER": {"device": "cuda"},
    "CUBLAS_HANDLE": {"device": "cuda", "library": "CUBLAS"},
    "NCCL": {"device": "cuda", "library": "NCCL"},
    "BITSANDBYTES": {"device": "cuda", "library": "bitsandbytes"},
    "TRITON": {"device": "cuda"},
    "MPS": {
        "device": "mps",
        "allocated_bytes": gib(5.05),
        "allowed_bytes": gib(6.80),
        "requested_bytes": 512 * MIB,
    },
    "WORKER_KILLED": {"device": "cpu"},
    "RANK_KILLED": {"device": "cpu"},
    "BUS_ERROR": {"device": "cpu"},
    "NUMPY": {"device": "cpu", "requested_bytes": gib(7.45)},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_reads_every_figure(name):
    assert figures(getattr(m, name)) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize(
    "around",
    [
        lambda text: (
            f"Epoch 0: 12%|#  | 1/8 [00:00<00:00]\nTraceback ...\n{text}\n\nsrun: error: 1"
        ),
        lambda text: "\n".join(text[i : i + 37] for i in range(0, len(text), 37)),
        lambda text: "\n".join(f"# {line}" for line in textwrap.wrap(text, 60)),
        lambda text: "\n".join(f"> [rank2]: {line}" for line in text.splitlines()),
        lambda text: "\n".join(f"│ {line:<70} │" for line in textwrap.wrap(text, 70)),
        lambda text: f"\x1b[31m{text}\x1b[0m",
    ],
    ids=["in a log", "hard wraps", "comment", "quoted rank", "frame", "colours"],
)
def test_reads_the_same_whatever_is_around(name, around):
    assert figures(around(getattr(m, name))) == EXPECTED[name]


def test_a_process_that_is_killed_after_another_has_failed_is_not_the_cause():
    assert read_out_of_memory(f"{m.DRIVER}\n{m.RANK_KILLED}").told == ""


def test_a_lost_context_is_no_lack_of_memory():
    """As in a fit: a handle that cannot be made is then the first to show it."""
    text = f"CUDA error: an illegal memory access was encountered\n{m.CUBLAS_HANDLE}"
    with pytest.raises(ConfigurationError, match="CUDA_LAUNCH_BLOCKING=1"):
        read_out_of_memory(text)


def test_reads_other_processes():
    oom = read_out_of_memory(m.TWO_PROCESSES)
    assert oom.processes == (ProcessOnDevice(2493055, gib(12.02)),)
    assert oom.process_bytes == 966 * MIB


def test_a_process_whose_memory_is_not_told_has_none():
    text = m.WSL.replace(
        "Including", "Process 9132 has 17179869184.00 GiB memory in use. Including"
    )
    assert read_out_of_memory(text).processes == (ProcessOnDevice(9132, None),)


def test_takes_the_last_message_that_has_figures():
    text = f"{m.FULL}\n{m.TWO_PROCESSES}\nOut of memory with one sample at once.\n{m.DRIVER}"
    oom = read_out_of_memory(text)
    assert oom.requested_bytes == gib(1.95)
    assert oom.num_messages == 2


def test_gives_the_message_alone_on_one_line():
    text = f"Traceback\n  File 'x.py'\n{m.FULL[:100]}\n{m.FULL[100:]}\nEpoch 0"
    message = read_out_of_memory(text).message
    assert message.startswith("CUDA out of memory. Tried to allocate 170.00 MiB.")
    assert message.endswith("reserved by PyTorch but unallocated.")


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("TORCH_1_8", "PYTORCH_CUDA_ALLOC_CONF"),
        ("FULL", "PYTORCH_ALLOC_CONF"),
        ("ROCM", "PYTORCH_HIP_ALLOC_CONF"),
    ],
)
def test_names_the_variable_that_this_torch_reads(name, variable):
    assert read_out_of_memory(getattr(m, name)).allocator_variable == variable


LIGHTNING = """\
  File "/venv/lightning/pytorch/loops/fit_loop.py", line 123, in advance
  File "/venv/torch/optim/adamw.py", line 230, in step
    loss = closure()
  File "/venv/lightning/pytorch/loops/optimization/automatic.py", line 129, in closure
"""
STEP = '  File "project/train.py", line 10, in training_step\n'
BACKWARD = '  File "/venv/torch/autograd/graph.py", line 865, in _engine_run_backward\n'
FORWARD = '  File "project/model.py", line 3, in forward\n'
MOVE = """\
  File "/venv/lightning/pytorch/strategies/strategy.py", line 155, in model_to_device
  File "/venv/torch/nn/modules/module.py", line 1384, in to
  File "/venv/torch/nn/modules/module.py", line 934, in _apply
"""


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (LIGHTNING + STEP + FORWARD, "forward"),
        (LIGHTNING + BACKWARD, "backward"),
        (LIGHTNING + BACKWARD + FORWARD, "backward"),
        (LIGHTNING.splitlines(keepends=True)[1], "optimizer"),
        ("/usr/lib/python3/dist-packages/model.py in forward(self, x)\n", "forward"),
        ("File /usr/lib/model.py:250, in Model.forward(self, x)\n", "forward"),
        (MOVE, "setup"),
        (LIGHTNING + STEP + MOVE, "forward"),
        ("", ""),
    ],
    ids=[
        *("forward", "backward", "recomputed", "optimizer", "ipython", "method"),
        *("moved", "moved in a step", "no traceback"),
    ],
)
def test_tells_the_phase_from_the_traceback(frames, phase):
    assert read_out_of_memory(frames + m.FULL).phase == phase


@pytest.mark.parametrize(
    "text",
    ["", "my job ran out of memory", "RuntimeError: CUDA error: an illegal memory access", "OOM"],
)
def test_refuses_a_text_without_such_a_message(text):
    with pytest.raises(ConfigurationError, match="Pass the message"):
        read_out_of_memory(text)


def test_becomes_json():
    found = json.loads(json.dumps(read_out_of_memory(m.TWO_PROCESSES).to_dict()))
    assert found["requested_bytes"] == gib(1.95)
    assert found["reserved_bytes"] == mib(734.07) + mib(33.93)
    assert found["processes"] == [{"pid": 2493055, "used_bytes": gib(12.02)}]
