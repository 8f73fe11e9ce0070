"""``memsave doctor`` in projects as users have them."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lightning_memsave.cli.main import main
from tests.cli.shell import json_of, message_of

TRAPS = """
    import torch
    import torchmetrics
    from net import Lit

    class Keeping(Lit):
        def __init__(self, width: int = 64):
            super().__init__(width)
            self.scores = torchmetrics.CatMetric()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.scores.update(loss.detach())
            return loss

    class Broken(Lit):
        def __init__(self):
            raise KeyError("width")
"""


@pytest.fixture(autouse=True)
def traps(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "traps.py").write_text(textwrap.dedent(TRAPS))
    monkeypatch.syspath_prepend(str(project))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)


def checks_of(found: dict[str, Any]) -> list[str]:
    return [problem["check"] for problem in found["problems"]]


def test_a_project_without_problems(capsys: Any) -> None:
    assert main(["doctor", "net.py:Lit"]) == 0
    out, err = capsys.readouterr()
    assert out == "Lit: no problem found\n"
    assert "the user's own words" in err


def test_a_problem_says_what_why_and_what_to_type(capsys: Any) -> None:
    assert main(["doctor", "traps.py:Keeping"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Keeping: 1 problem\n\ngrowing_metric\n  `scores`, a `CatMetric`\n")
    assert out.endswith("or create it with `compute_on_cpu=True`.\n")


def test_json(capsys: Any) -> None:
    found = json_of(capsys, "doctor", "traps.py:Keeping", status=1)
    assert found.keys() == {"target", "model", "problems", "notes"}
    (problem,) = found["problems"]
    assert problem.keys() == {"check", "what", "why", "fix"}
    assert problem["what"] == "`scores`, a `CatMetric`"


def test_yaml_with_a_callback(capsys: Any, project: Path) -> None:
    found = json_of(capsys, "doctor", "config.yaml")
    assert (found["problems"], found["notes"]) == ([], [])
    text = (project / "config.yaml").read_text()
    (project / "traps.yaml").write_text(
        text.replace("net.Lit", "traps.Keeping").replace(
            "trainer:\n", "trainer:\n  accumulate_grad_batches: 2\n  detect_anomaly: true\n"
        )
    )
    found = json_of(capsys, "doctor", "traps.yaml", status=1)
    assert checks_of(found) == ["growing_metric", "debug_settings"]
    changed = ("--set", "accumulate_grad_batches=4")
    found = json_of(capsys, "doctor", "traps.yaml", *changed, status=1)
    assert checks_of(found) == ["growing_metric", "memsave_conflict", "debug_settings"]
    found = json_of(capsys, "doctor", "traps.yaml", "--no-memsave", status=1)
    assert checks_of(found) == ["growing_metric", "debug_settings"]


def test_settings_of_the_command_line(capsys: Any) -> None:
    refused = ("--set", "accumulate_grad_batches=4")
    found = json_of(capsys, "doctor", "net.py:Manual", *refused, status=1)
    assert checks_of(found) == ["memsave_conflict"]
    assert json_of(capsys, "doctor", "net.py:Manual", "--memsave")["problems"] == []
    assert json_of(capsys, "doctor", "net.py:Lit", "--precision", "bf16-mixed")["problems"] == []


def test_the_environment(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb=100")
    found = json_of(capsys, "doctor", "net.py:Lit", status=1)
    assert checks_of(found) == ["allocator_settings"]
    assert found["problems"][0]["fix"] == "Write `max_split_size_mb:100`."


def test_a_model_that_is_no_lightning_module(capsys: Any) -> None:
    assert json_of(capsys, "doctor", "net.py:Net")["model"] == "Net"
    assert json_of(capsys, "doctor", "gpt2/", "--memsave")["problems"] == []


def test_what_cannot_be_checked_is_an_error(capsys: Any, project: Path) -> None:
    assert "KeyError" in message_of(capsys, "doctor", "traps.py:Broken")
    assert "does not exist" in message_of(capsys, "doctor", "missing.yaml")
    assert "not an argument" in message_of(capsys, "doctor", "net.py:Lit", "--set", "optimiser=x")
    (project / "c.json").write_text(json.dumps({"model_type": "unknown"}))
    assert message_of(capsys, "doctor", "c.json")
