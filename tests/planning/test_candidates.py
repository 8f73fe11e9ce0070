from dataclasses import replace

import pytest

from lightning_memsave import LowBitOptimizer, MemSaveCallback
from lightning_memsave.planning.candidates import CurrentSettings, single_candidates
from lightning_memsave.techniques.registry import values_of, with_preset


def situation(precision="32-true", has_bf16=True, num_samples=8, **settings):
    arguments = with_preset(MemSaveCallback(**({"preset": "off"} | settings)).arguments)
    return CurrentSettings(arguments, precision, has_bf16, num_samples)


def names(now):
    return [candidate.name for candidate in single_candidates(now)]


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2}, {"optimizer": "8bit"}])
def test_each_is_something_that_the_callback_takes(settings):
    for candidate in single_candidates(situation(**settings)):
        MemSaveCallback(**{**({"preset": "off"} | settings), **candidate.changes})


def test_every_technique_is_among_them():
    changed = {name for one in single_candidates(situation()) for name in one.changes}
    assert set(values_of("single_gpu")) == changed


def test_a_dominating_embedding_can_have_8_bits_too_though_that_is_advised_against():
    found = single_candidates(replace(situation(), embedding="embed.weight"))
    assert found[-1].changes == {"optimizer": LowBitOptimizer(force_8bit=("*embed.weight",))}
    assert [one.is_advised_against for one in found] == [False] * (len(found) - 1) + [True]
    MemSaveCallback(**({"preset": "off"} | found[-1].changes))
    assert not any("also for" in c.name for c in single_candidates(situation()))


def test_8_bits_have_a_price():
    (found,) = (c for c in single_candidates(situation()) if c.name == "8-bit optimizer")
    assert "slower steps on a CPU" in found.cost


def test_what_is_on_is_not_offered():
    now = situation(preset="single_gpu", precision="bf16-mixed", micro_batch_size=1)
    assert {candidate.argument for candidate in single_candidates(now)} == {"offload"}


def test_float16_comes_last_and_not_for_models_that_overflow_in_it():
    old = situation(has_bf16=False)
    assert names(old)[-1] == "precision 16-mixed"
    assert single_candidates(old)[-1].is_advised_against
    assert not any("precision" in name for name in names(replace(old, overflows=True)))
    assert "precision bf16-mixed" in names(replace(situation(), overflows=True))


def test_devices_without_bf16_are_offered_none_of_it():
    assert "bf16" not in repr(single_candidates(situation(has_bf16=False)))


def test_parts_are_smaller_than_those_in_force():
    def parts(now):
        return [name for name in names(now) if name.startswith("micro-batches")]

    assert parts(situation()) == [f"micro-batches of {n}" for n in (4, 2, 1)]
    assert parts(situation(micro_batch_size=2)) == ["micro-batches of 1"]
    assert parts(situation(num_samples=0)) == []


def test_the_memory_of_the_host_comes_after_the_rest_and_where_there_is_another():
    found = single_candidates(situation())
    assert [c.changes.get("offload") for c in found[-2:]] == ["optimizer", "parameters"]
    assert {c.exactness.value for c in found[-2:]} == {"rounding"}
    for now in (situation(offload="optimizer"), replace(situation(), device="cpu")):
        assert not any("offload" in c.changes for c in single_candidates(now))


def test_what_is_exact_and_cheap_comes_first():
    found = [c for c in single_candidates(situation()) if c.argument != "offload"]
    order = [(c.exactness.value == "approximate", c.slowdown) for c in found]
    assert order == sorted(order)
