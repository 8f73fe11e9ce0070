"""Times from kernels: the slowest of compute, bytes and launch, by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_memsave.planning.step_time import Rates, measure_cpu_rates, step_seconds
from lightning_memsave.prediction.cuda.gpus import GPUS
from lightning_memsave.prediction.work import Kernel, Phase, Work

RATES = Rates(
    {"float32": 100.0, "bfloat16": 400.0}, {"float32": 50.0}, 10.0, 2.0, 1.0, host_memory_bytes=4.0
)


@pytest.mark.parametrize(
    ("kernel", "seconds"),
    [
        (Kernel("forward", "product", "float32", 1000, 20), 10.0),
        (Kernel("forward", "product", "bfloat16", 1000, 20), 2.5),
        (Kernel("forward", "product", "float64", 1000, 20), 10.0),
        (Kernel("backward", "attention", "float32", 1000, 20), 20.0),
        (Kernel("backward", "product", "float32", 100, 50), 5.0),
        (Kernel("optimizer", "elementwise", "float32", 0, 1, 3), 3.0),
        (Kernel("recomputation", "elementwise", "float32", 0, 1), 3.0),
        (Kernel("optimizer", "to_host", "float32", 0, 8), 4.0),
        (Kernel("optimizer", "from_host", "float32", 0, 1), 1.0),
        (Kernel("optimizer", "host", "float32", 0, 8), 2.0),
    ],
)
def test_the_slowest_of_compute_bytes_and_launch(kernel, seconds):
    assert RATES.seconds(kernel) == pytest.approx(seconds)


def test_a_step_is_the_sum_of_its_kernels():
    forward = Kernel("forward", "product", "float32", 1000, 20)
    update = Kernel("optimizer", "elementwise", "float32", 0, 50)
    found = step_seconds(Work(((forward, 3), (update, 1))), RATES)
    assert found == {
        "forward": 30.0,
        "recomputation": 0.0,
        "backward": 0.0,
        "optimizer": 5.0,
    }


@pytest.mark.parametrize(
    ("to_host", "from_host", "has_lanes", "expected"),
    [
        (10, 20, True, 20.0),  # both are hidden
        (30, 20, True, 25.0),  # begins after the 20 s of its module, and takes 15
        (0, 80, True, 40.0),  # 40 s, which the last module waits for with its 10
        (30, 20, False, 45.0),
    ],
)
def test_copies_run_beside_the_modules_that_follow(to_host, from_host, has_lanes, expected):
    def product(phase: Phase, module: str) -> Kernel:
        return Kernel(phase, "product", "float32", 1000, 20, module=module)

    work = Work(
        (
            (product("forward", "first"), 1),
            (product("recomputation", "last"), 1),
            (product("backward", "last"), 1),
            (Kernel("backward", "to_host", "float32", 0, to_host, 0, "last"), 1),
            (product("backward", "first"), 1),
            (Kernel("backward", "from_host", "float32", 0, from_host, 0, "first"), 1),
        )
    )
    rates = replace(RATES, launch_s=0.0, has_lanes=has_lanes)
    found = step_seconds(work, rates)
    assert found == {
        "forward": 10.0,
        "recomputation": 10.0,
        "backward": expected,
        "optimizer": 0.0,
    }


def _of_modules(names: Sequence[str], *kernels: Kernel) -> list[tuple[Kernel, float]]:
    return [(kernel._replace(module=name), 1) for name in names for kernel in kernels]


@pytest.mark.parametrize(
    ("update", "has_lanes", "forward", "optimizer"),
    [
        # The first part waits 4 s for its half and 3 s for its copy, the second for nothing.
        (32, True, 7 + 20, 0),
        # The halves end after 16 and 32 s; then a copy of 3 s, and the second part.
        (128, True, 32 + 3 + 10, 0),
        (32, False, 20 + 6, 8),
    ],
)
def test_updates_on_the_host_run_beside_the_next_forward_pass(
    update, has_lanes, forward, optimizer
):
    parts = _of_modules(
        ("first", "last"),
        Kernel("forward", "product", "float32", 1000, 20),
        Kernel("forward", "from_host", "float32", 0, 6),
    )
    work = Work((*parts, (Kernel("optimizer", "host", "float32", 0, update), 1)))
    found = step_seconds(work, replace(RATES, launch_s=0.0, has_lanes=has_lanes))
    assert (found["forward"], found["optimizer"]) == (forward, optimizer)


def test_updates_in_backward_run_beside_it():
    parts = _of_modules(
        ("last", "first"),
        Kernel("backward", "product", "float32", 1000, 20),
        Kernel("backward", "to_host", "float32", 0, 4),
        Kernel("backward", "host", "float32", 0, 32),
    )
    norm = Kernel("forward", "host", "float32", 0, 4), 1  # clipping: nothing runs beside it
    found = step_seconds(Work((*parts, norm)), replace(RATES, launch_s=0.0))
    # Gradients of the last part are there after 12 s, those of the first after 22, updates take 8.
    assert (found["forward"], found["backward"]) == (1.0, 30.0)


def test_more_batches_repeat_all_but_the_update():
    forward = Kernel("forward", "product", "float32", 1000, 20)
    update = Kernel("optimizer", "elementwise", "float32", 0, 50)
    work = Work(((forward, 2), (update, 1))).for_batches(2.5)
    assert dict(work.kernels) == {forward: 5.0, update: 1}
    assert (work.flop, work.num_launches) == (5000, 6)


@pytest.mark.parametrize("name", ["A100-40GB", "T4"])
def test_a_gpu_without_bfloat16_is_as_slow_as_in_float32(name):
    throughput = GPUS[name].throughput
    assert throughput is not None
    products = Rates.of_gpu(throughput).products
    assert products["float16"] > products["float32"]
    assert (products["bfloat16"] == products["float32"]) == (name == "T4")


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_rates_that_can_be(name):
    found = GPUS[name].throughput
    assert found is not None
    assert 1e12 <= found.float32 <= found.float16 <= 3e15
    assert found.bfloat16 in (found.float16, found.float32)
    assert 1e11 <= found.memory_bytes <= 1e13
    assert found.host_bytes < found.memory_bytes


def test_rates_of_this_machine():
    rates = measure_cpu_rates()
    assert set(rates.products) == {"float32", "bfloat16"}
    assert all(1e8 < rate < 1e14 for rate in rates.products.values())
    assert 1e7 < rates.memory_bytes < 1e13
    assert 1e8 < rates.host_memory_bytes < 1e13
    assert 1e-8 < rates.launch_s < 1e-2
