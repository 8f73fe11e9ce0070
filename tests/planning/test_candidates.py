from dataclasses import replace

import pytest

from lightning_memsave import LowBitOptimizer, MemSaveCallback
from lightning_memsave.planning.candidates import (
    Candidate,
    CurrentSettings,
    host_candidates,
    joint_candidates,
    micro_batch_candidates,
    single_candidates,
)
from lightning_memsave.techniques.registry import values_of, with_stack


def situation(precision="32-true", has_bf16=True, num_samples=8, **settings):
    arguments = with_stack(MemSaveCallback(**({"stack": "off"} | settings)).arguments)
    return CurrentSettings(arguments, precision, has_bf16, num_samples)


def names(candidates):
    return [candidate.name for candidate in candidates]


def all_candidates(now):
    found = [*single_candidates(now), *micro_batch_candidates(now)]
    return [*found, *joint_candidates(now, found), *host_candidates(now)]


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2}, {"optimizer": "8bit"}])
def test_each_is_something_that_the_callback_takes(settings):
    now = situation(**settings)
    for candidate in all_candidates(now):
        MemSaveCallback(**{**({"stack": "off"} | settings), **candidate.changes})


def test_every_technique_is_among_them():
    found = single_candidates(situation()) + host_candidates(situation())[:2]
    changed = {name for one in found for name in one.changes}
    others = {"micro_batch_size"}
    others |= {"block_micro_batch_size"}  # it pays beside what waits on the host
    assert set(values_of("single_gpu")) - others == changed


def test_a_dominating_embedding_can_have_8_bits_too():
    now = replace(situation(), embedding="embed.weight")
    found = [c.changes for c in single_candidates(now) if "also for" in c.name]
    assert found == [{"optimizer": LowBitOptimizer(force_8bit=("*embed.weight",))}]
    MemSaveCallback(**({"stack": "off"} | found[0]))
    assert not any("also for" in c.name for c in single_candidates(situation()))


def test_8_bits_have_a_price():
    (found,) = (c for c in single_candidates(situation()) if c.name == "8-bit optimizer")
    assert "slower steps on a CPU" in found.cost


def test_what_is_on_is_not_offered():
    assert single_candidates(situation(stack="single_gpu", precision="bf16-mixed")) == []


def test_models_that_overflow_are_not_offered_float16():
    old = situation(has_bf16=False)
    assert "precision 16-mixed" in names(single_candidates(old))
    assert not any("precision" in c.changes for c in all_candidates(replace(old, overflows=True)))
    assert "precision bf16-mixed" in names(single_candidates(replace(situation(), overflows=True)))


def test_devices_without_bf16_are_offered_none_of_it():
    found = all_candidates(situation(has_bf16=False))
    assert "precision 16-mixed" in names(found)
    assert "bf16" not in repr(found)


def test_parts_are_smaller_than_those_in_force():
    assert names(micro_batch_candidates(situation())) == [
        f"micro-batches of {n}" for n in (4, 2, 1)
    ]
    assert names(micro_batch_candidates(situation(micro_batch_size=2))) == ["micro-batches of 1"]
    assert micro_batch_candidates(situation(num_samples=0)) == []


def test_together_is_what_helped_and_then_the_stack():
    helpful = [
        Candidate("a", {"activation_checkpointing": "all"}, "bitwise", ""),
        Candidate("b", {"micro_batch_size": 4}, "rounding", ""),
        Candidate("c", {"low_precision_weights": "stochastic"}, "approximate", ""),
    ]
    first, of_one, stack, stack_of_one = joint_candidates(situation(), helpful)
    assert first.changes == {"activation_checkpointing": "all"}
    assert of_one.changes == {"activation_checkpointing": "all", "micro_batch_size": 1}
    assert stack.changes["stack"] == stack_of_one.changes["stack"] == "single_gpu"
    assert stack_of_one.changes["micro_batch_size"] == 1
    # What is switched on decides how far numbers move, not what is offered later.
    assert [first.exactness, of_one.exactness, stack.exactness] == [
        "rounding",
        "rounding",
        "approximate",
    ]


def test_the_memory_of_the_host_is_offered_where_there_is_another():
    found = host_candidates(situation())
    assert [c.changes.get("offload") for c in found] == ["optimizer", "parameters", "auto", "auto"]
    assert [c.changes.get("stack") for c in found] == [None, None, "offload", "offload"]
    assert [c.changes.get("micro_batch_size") for c in found[2:]] == ["auto", 1]
    assert host_candidates(situation(offload="optimizer")) == []
    assert host_candidates(replace(situation(), device="cpu")) == []
    assert len(host_candidates(situation(has_bf16=False))) == 2


def test_one_alone_is_joined_with_nothing():
    assert joint_candidates(situation(), single_candidates(situation())[:1]) == []


def test_a_size_that_is_set_stays():
    now = situation(micro_batch_size=2)
    found = joint_candidates(now, [*single_candidates(now), *micro_batch_candidates(now)])
    assert [one.changes.get("micro_batch_size") for one in found] == [None, 2]
