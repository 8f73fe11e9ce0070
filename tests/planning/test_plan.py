"""How plans are shown and written."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lightning_memsave import LowBitOptimizer, MemSaveCallback
from lightning_memsave.callbacks.settings import budget
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.planning.plan import MemoryPlan, Plan, short_settings
from lightning_memsave.prediction.cuda.gpus import parse_gpu
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import as_code
from lightning_memsave.prediction.work import Kernel, Work
from lightning_memsave.techniques.registry import entries, with_preset
from lightning_memsave.units import GIB, MIB


def made(device_gib: float, time_ratio: float, *, is_verified: bool = False, **on: object) -> Plan:
    off = dict.fromkeys(("activation_checkpointing", "optimizer"))
    settings = {**off, "micro_batch_size": "auto", "attention": "sdpa", **on}
    num_bytes = int(device_gib * GIB)
    how = f"MemSaveCallback({', '.join(f'{name}={value!r}' for name, value in settings.items())})"
    return Plan(settings, how, "rounding", num_bytes - MIB, num_bytes, time_ratio, is_verified)


ON_HEAD = LowBitOptimizer(force_8bit=("*head*",))
LARGE = made(8, 1.0)
MIDDLE = made(5.5, 1.1, is_verified=True, activation_checkpointing=3)
SMALL = made(4, 1.25, activation_checkpointing="all", optimizer=ON_HEAD)
FOUND = MemoryPlan(
    6 * GIB, 256 * MIB, MIDDLE, SMALL, (LARGE, MIDDLE, SMALL), unchanged_seconds=(0.4, 2.0)
)


def test_shows_the_frontier_the_call_and_the_next_best_plan():
    head, table, call, rest = str(FOUND).split("\n\n")
    assert " ".join(head.split()) == (
        "The fastest plan for 6.00 GiB, of which 256.00 MiB stay free: 5.50 GiB on the device, "
        "1.10 times the time of the unchanged step (0.44 to 2.2 s)"
    )
    rows = [line.split(maxsplit=6) for line in table.splitlines()[1:4]]
    assert rows[0] == ["about", "8.00", "GiB", "NO", "1.00", "rounding", "nothing else"]
    assert rows[1][:4] == [">", "5.50", "GiB", "yes"]
    assert rows[1][5:] == ["rounding", "activation_checkpointing=3"]
    assert rows[2][:4] == ["about", "4.00", "GiB", "yes"]
    assert table.splitlines()[-1] == "each with attention='sdpa'"
    assert eval(call, {"MemSaveCallback": dict}) == MIDDLE.settings
    rest = " ".join(rest.split())
    assert "Next best with other settings: about 4.00 GiB, 1.25 times the time, with " in rest
    assert "optimizer=LowBitOptimizer(force_8bit=('*head*',))" in rest
    assert "attention" not in rest
    assert "not measured" in rest
    assert max(map(len, str(FOUND).splitlines())) <= 100


def test_says_how_fast_the_plan_should_be():
    products = Kernel("forward", "product", "float16", 65_000_000_000, 1)
    work = Work(((products, 100.0),), 8, 4096, parse_gpu("T4").throughput)
    predicted = MemoryPrediction("cuda", "Net", MemoryBreakdown(), {}, work=work)
    found = replace(FOUND, plan=replace(MIDDLE, prediction=predicted))
    (head, *_) = str(found).split("\n\n")
    assert " ".join(head.split()).endswith(
        "(0.44 to 2.2 s): 1,900 to 9,300 tokens per second, 4.5 to 23 % of the GPU's dense peak"
    )


def test_what_is_off_in_both_is_no_other_setting():
    without = replace(FOUND, runner_up=made(5, 1.2, optimizer="8bit"))
    said = " ".join(str(without).split())
    assert "with activation_checkpointing=None, optimizer='8bit' Times are" in said


def test_of_one_plan_nothing_is_shared():
    alone = replace(FOUND, runner_up=None, frontier=(MIDDLE,), margin_bytes=0)
    assert alone.shared == {}
    shown = str(alone)
    (row,) = (line for line in shown.splitlines() if line.startswith(">"))
    assert "activation_checkpointing=3" in row
    assert "each with" not in shown
    assert "Next best" not in shown
    assert "stay free" not in shown


@pytest.mark.parametrize(("plan", "fits"), [(LARGE, False), (MIDDLE, True), (SMALL, True)])
def test_the_margin_counts(plan, fits):
    assert FOUND.fits(plan) == fits
    assert not replace(FOUND, margin_bytes=GIB * 5).fits(plan)


def test_json_and_notebook():
    shown: Any = FOUND
    found = json.loads(json.dumps(FOUND.to_dict()))
    assert [plan["fits"] for plan in found["frontier"]] == [False, True, True]
    assert found["runner_up"]["step_seconds"] == [0.5, 2.5]
    assert found["plan"]["device_bytes"] == MIDDLE.device_bytes
    assert found["runner_up"]["settings"]["optimizer"] == {
        "class_path": "lightning_memsave.LowBitOptimizer",
        "init_args": {"force_8bit": ["*head*"]},
    }
    assert "activation_checkpointing" in shown._repr_mimebundle_([], [])["text/html"]
    assert repr(FOUND).startswith("<MemoryPlan for 6.00 GiB: MemSaveCallback(")


@pytest.mark.parametrize(
    ("on", "exactness", "call"),
    [
        ({}, "bitwise",
         'preset="bitwise", activation_checkpointing=None, optimizer_in_backward=None'),
        ({"activation_checkpointing": 3, "optimizer_in_backward": True}, "bitwise",
         'preset="bitwise", activation_checkpointing=3, optimizer_in_backward=True'),
        ({"activation_checkpointing": "all", "optimizer": "8bit", "precision": "bf16-mixed"},
         "approximate",
         'activation_checkpointing="all", optimizer="8bit", precision="bf16-mixed"'),
        ({"micro_batch_size": 2, "attention": "sdpa"}, "rounding",
         'activation_checkpointing=None, optimizer=None, precision=None, micro_batch_size=2, '
         'attention="sdpa"'),
        ({"offload": "parameters", "low_precision_weights": "master", "precision": "bf16-mixed",
          "activation_checkpointing": "nested"}, "approximate",
         'activation_checkpointing="nested", optimizer=None, precision="bf16-mixed", '
         'low_precision_weights="master", offload="parameters"'),
    ],
)  # fmt: skip
def test_the_call_is_short_and_does_the_same(on, exactness, call):
    off = dict.fromkeys(entry.argument for entry in entries())
    settings = {**off, "micro_batch_size": "auto", **on}
    short = short_settings(MemSaveCallback, settings, exactness)
    assert as_code(MemSaveCallback, short) == f"MemSaveCallback({call})"

    def effective(of: dict[str, Any]) -> dict[str, Any]:
        found = with_preset(MemSaveCallback(**of).arguments)
        return {n: v for n, v in found.items() if n not in ("preset", "from_preset")}

    assert effective(short) == effective(settings)


def test_plans_of_checkpoints_are_read():
    made = MemoryPlan(9, 0, SMALL, None, (), ladder=(SMALL,))
    state = budget._state(made, SMALL, (SMALL,))
    found = budget.read_plan(state)
    assert found is not None
    assert (found.plan, found.ladder) == (SMALL, (SMALL,))
    old = {"optimizer": "8bit", "force_8bit": ("*",), "early_release": True, "attention": None}
    found = budget.read_plan({**state, "plan": {**state["plan"], "settings": old}})
    assert found is not None
    assert found.plan.settings == {
        "optimizer": LowBitOptimizer(force_8bit=("*",)),
        "attention": None,
    }


def test_text_says_that_the_host_is_assumed_to_have_the_memory_and_what_times_are_over():
    def text(**settings):
        plan = Plan(settings, "how", "rounding", 2**30, 2**30, 0.9, True, host_bytes=2**34)
        found = MemoryPlan(2**31, 0, plan, None, (plan,), precision="32-true")
        return " ".join(str(found).split())

    assert "Assumed: the host has the memory. `--set host_budget=32GiB` limits it." in text()
    assert "Assumed" not in text(host_budget="16GiB")
    assert "0.90 times the time of the unchanged step in float32" in text()
    assert "Times are ratios to the unchanged step in float32" in text()
