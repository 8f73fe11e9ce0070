"""Counts of a step on the virtual GPU: equal to the simulation's, and as they were."""

import pytest

from tests.virtual_gpu.processes import run_python

pytestmark = pytest.mark.gpu

# Kernels, products' library calls and waits of the host. The model itself waits once: it looks
# whether its attention mask is all ones.
GOLDEN = {
    "plain": (0, 0, 0),
    "plain, bf16": (0, 0, 0),
    "bitwise": (0, 0, 0),
    "classic": (0, 0, 0),
    "single_gpu": (0, 0, 0),
}


@pytest.fixture(scope="module")
def found():
    return run_python(
        f"""
        import functools, json
        from benchmarks.launches.__main__ import ROWS
        from benchmarks.virtual_gpu._setup import allow_forks
        from benchmarks.virtual_gpu.launches import DRY, compare, differences
        allow_forks()
        (model,) = DRY.values()
        rows = {{name: compare(model, ROWS[name], compiles=False) for name in {list(GOLDEN)}}}
        print(json.dumps({{n: [r["real"], differences(r)] for n, r in rows.items()}}))
        """,
        card="a100",
        VGPU_COMPUTE="int",
    )


@pytest.mark.parametrize("preset", GOLDEN)
def test_golden_counts(found, preset):
    real, _ = found[preset]
    assert (real["launches"], real["library"], sum(real["waits"].values())) == GOLDEN[preset]


@pytest.mark.parametrize("preset", [name for name in GOLDEN if name != "single_gpu"])
def test_the_simulation_counts_the_same(found, preset):
    assert found[preset][1] == []
