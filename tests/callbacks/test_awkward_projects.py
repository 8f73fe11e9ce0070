"""Projects whose modules are awkward train bit for bit as without the callback, or are refused."""

import functools
import re
import time
from typing import Any

import pytest

from benchmarks.faults._modules import BAD, SETTINGS, Cells, judge, run
from lightning_memsave import MicroBatching, errors
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from tests.awkward_projects import all_projects

STATEFUL = [
    name for name, project in all_projects().items() if project.__module__.endswith("awkward_state")
]
"""State that torch does not count, and what public projects do between steps."""

OFFLOADED = (
    *("BoundedTable", "BoundedBlocks", "CodebooksInBlocks", "HiddenWrites"),
    *("AdaptiveWeight", "GradientInBlock", "GradientThenAnew", "PerSampleOfAll"),
    *("Recurrent", "RecurrentBlocks", "PackedRecurrent"),
)


@functools.cache
def plain(project: str) -> Any:
    return run(project, None, "plain", drops=True)["digest"]


@pytest.mark.parametrize("project", OFFLOADED)
@pytest.mark.parametrize("name", ["offload optimizer", "offload parameters"])
def test_offloaded(project, name):
    found = run(project, SETTINGS[name][0], "plain", drops=True)
    assert found["error"] is None
    assert found["digest"] == plain(project)


@pytest.mark.parametrize("project", ["BoundedTable", "CodebooksInBlocks"])
@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_what_a_proof_writes_into_offloaded_weights_is_put_back(project, what):
    settings = {"preset": "off", "offload": what, "micro_batch_size": MicroBatching("halve")}
    found = run(project, settings, "plain", drops=True)
    assert found["error"] is None
    assert found["digest"] == plain(project)


@pytest.mark.parametrize(
    ("project", "name", "why"),
    [
        ("StatefulRecurrent", "micro-batches", "previous micro-batch changed.*: `state.0.`"),
        ("ResetStates", "micro-batches", "an entry for each sample of the batch: `state.0.`"),
        ("StepCounts", "micro-batches", "its loss cannot be split: .*`average.bias`"),
        ("HooksOnGradients", "micro-batches", "`head.weight: a hook in backward` would run"),
        ("StepWrites", "micro-batches", "previous micro-batch changed"),
        ("SpectralNorm", "micro-batches", "previous micro-batch changed.*_u`"),
        ("CodebooksInBlocks", "block micro-batches", "it changes `codes`"),
        ("HiddenWrites", "block micro-batches", "it changes `down.weight`"),
        ("MaskedGradient", "single_gpu", "changed the type of value"),
        ("GradientInBlock", "offload", "not have been used in the graph"),
        ("LossOutside", "offload embeddings", "with the whole table"),
    ],
)
def test_refused_before_the_first_step(project, name, why):
    found = run(project, SETTINGS[name][0], "plain", drops=False)
    assert found["steps"] == 0
    assert found["has_advice"]
    assert re.search(why, found["error"])


@pytest.mark.parametrize(
    "project", ["BoundedTable", "MaskedGradient", "MomentumTeacher", "TwoOptimizers", "Project"]
)
def test_tables_on_the_host_train_as_on_the_device(project):
    cell = Cells().run(project, "offload embeddings", "plain")
    assert cell["outcome"] == "equal", cell


def test_weights_that_a_proof_replaces_keep_their_type():
    cell = Cells().run("BoundedBlocks", "single_gpu", "plain")
    assert cell["outcome"] == "as declared", cell


@pytest.mark.parametrize("project", ["CalledByHooks", "Generates"])
@pytest.mark.parametrize("name", ["single_gpu", "offload"])
def test_a_module_in_bfloat16_is_called_outside_of_steps(project, name):
    assert run(project, SETTINGS[name][0], "plain", drops=True)["error"] is None


@pytest.mark.parametrize("project", ["StepWrites", "SizedInTheFirstStep", "LazyHead", "StepCounts"])
@pytest.mark.parametrize("settings", [{}, {"preset": "bitwise"}, {"micro_batch_size": "halve"}])
def test_a_look_at_the_loss_changes_nothing(project, settings):
    given = {"preset": "off", **settings} if "micro_batch_size" in settings else settings
    found = run(project, {"precision": None, "optimizer": None, **given}, "plain", drops=True)
    assert found["error"] is None
    assert found["digest"] == plain(project)


@pytest.mark.parametrize("project", ["CountsBackward", "OptionalBatches"])
def test_in_micro_batches(project):
    cell = Cells().run(project, "micro-batches", "plain")
    assert cell["outcome"] == "as declared", cell


def _assert_right(project: str, name: str) -> None:
    """Trains as the setting declares, or is refused before the first step by an error of ours."""
    settings, tolerance = SETTINGS[name]
    expected, found = (run(project, each, "plain", drops=True) for each in (None, settings))
    if found["error"] is not None:
        assert found["steps"] == 0, found["error"]
        assert hasattr(errors, found["error"].partition(":")[0]), found["error"]
    judged = judge(found, expected, tolerance)
    assert judged["outcome"] not in BAD, judged


def test_a_look_at_the_loss_waits_for_updates_on_the_host(monkeypatch):
    # Batches without their optional part are looked at after the first optimizer step.
    work = HostWorker._run

    def work_late(worker, update):
        time.sleep(0.02)
        work(worker, update)

    monkeypatch.setattr(HostWorker, "_run", work_late)
    _assert_right("OptionalBatches", "offload in float32")


@pytest.mark.parametrize("project", STATEFUL)
@pytest.mark.parametrize(
    "name", ["bare in float32", "bitwise", "single_gpu in float32", "offload in float32"]
)
def test_state_that_torch_does_not_count_is_that_of_plain_training(project, name, request):
    if (project, name) == ("FrozenParameters", "offload in float32"):
        reason = "offloaded weights that a recomputed block writes: the block is the unit, issue 55"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    _assert_right(project, name)


@pytest.mark.parametrize(
    "project",
    [
        *("AssignedInSetup", "ScriptedHead", "ScriptedBlocks"),
        *("Sharpness", "ScheduleFree"),
    ],
)
@pytest.mark.parametrize("name", ["bare", "single_gpu", "offload"])
def test_presets_do_not_end_fits_that_run_without_them(project, name):
    settings, tolerance = SETTINGS[name]
    found = run(project, settings, "plain", drops=True)
    assert found["error"] is None
    assert judge(found, run(project, None, "plain", drops=True), tolerance)["outcome"] not in BAD


# What a hook reads by a name of torch, nothing shows before.
@pytest.mark.parametrize("name", ["bare", "single_gpu"])
def test_state_that_is_edited_under_a_name_of_torch_says_what_to_type(name):
    found = run("EditedState", SETTINGS[name][0], "plain", drops=True)
    assert "`exp_avg`" in found["error"]
    assert "optimizer=None" in found["error"]


@pytest.mark.parametrize(
    ("project", "name"),
    [
        (project, name)
        for project in (
            *("ResetRecurrent", "MissingBatches", "ResizedBuffers", "ResizedBuffer", "Observers"),
            *("Teacher", "SelfTeacher"),
        )
        for name in ("micro-batches", "chunked")
    ],
)
def test_steps_in_micro_batches_and_chunks_are_those_of_plain_training(project, name):
    cell = Cells().run(project, name, "plain")
    assert cell["outcome"] in ("equal", "as declared", "refused"), cell
