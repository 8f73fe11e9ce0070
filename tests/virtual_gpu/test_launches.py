"""Counts of a step on the virtual GPU: equal to the simulation's, and as they were."""

import pytest

from tests.virtual_gpu.processes import run_python

pytestmark = pytest.mark.gpu

# Kernels, calls of cuBLAS and waits of the host. The model itself waits once, to see whether its
# attention mask is all ones; `single_gpu` once more, for the labels that count.
GOLDEN = {
    "plain": (110, 42, 1),
    "plain, bf16": (192, 42, 1),
    "bitwise": (158, 54, 1),
    "classic": (274, 54, 1),
    "single_gpu": (483, 65, 2),
}
# Waits of the host, and copies to and from page-locked memory.
OFFLOADED = {'offload="optimizer"': (2, 4, 3), 'offload="parameters"': (2, 4, 4)}


@pytest.fixture(scope="module")
def found():
    return run_python(
        f"""
        import json
        from benchmarks.launches.__main__ import ROWS
        from benchmarks.virtual_gpu._setup import allow_forks
        from benchmarks.virtual_gpu.launches import DRY, OFFLOADED, compare, copied, differences
        allow_forks()
        (model,) = DRY.values()
        found = {{}}
        for name in {[*GOLDEN, *OFFLOADED]}:
            one = compare(model, {{**ROWS, **OFFLOADED}}[name], compiles=False)
            real, waits = one["real"], sum(one["real"]["waits"].values())
            found[name] = {{
                "counts": [real["launches"], real["library"], waits],
                "copies": [waits, *(copied(real, f"{{way}} pinned")[0] for way in ("d2h", "h2d"))],
                "differences": differences(one),
            }}
        print(json.dumps(found))
        """,
        card="a100",
        VGPU_COMPUTE="int",
    )


@pytest.mark.parametrize("preset", GOLDEN)
def test_golden_counts(found, preset):
    assert tuple(found[preset]["counts"]) == GOLDEN[preset]


@pytest.mark.parametrize("setting", OFFLOADED)
def test_copies_are_of_whole_blocks_and_waits_are_few(found, setting):
    assert tuple(found[setting]["copies"]) == OFFLOADED[setting]


# `single_gpu` reads from the call before which labels count.
@pytest.mark.parametrize("preset", [n for n in (*GOLDEN, *OFFLOADED) if n != "single_gpu"])
def test_the_simulation_counts_the_same(found, preset):
    assert found[preset]["differences"] == []
