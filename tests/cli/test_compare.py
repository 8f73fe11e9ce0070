"""`memsave compare` on models, predictions and reports of runs."""

import json
from pathlib import Path

import pytest
import torch

from lightning_memsave.api import compare_memory
from lightning_memsave.cli.main import main
from tests.cli.shell import BATCH, TINY_GPT2, json_of, message_of


@pytest.fixture(autouse=True)
def larger(project):
    (project / "larger").mkdir()
    config = json.dumps({**TINY_GPT2, "vocab_size": 90})
    (project / "larger" / "config.json").write_text(config)


@pytest.fixture
def saved(capsys):
    """Two predictions in files."""
    names = ("before.json", "after.json")
    for name, batch in zip(names, ("2x32", "8x32"), strict=True):
        capsys.readouterr()
        assert main(["predict", "gpt2", "--batch", batch, "--json"]) == 0
        Path(name).write_text(capsys.readouterr().out)
    return names


class TestModels:
    def test_json_is_what_python_gives(self, capsys):
        found = json_of(capsys, "compare", "gpt2", "larger/config.json")
        expected = compare_memory("gpt2", "larger/config.json").to_dict()
        assert found == json.loads(json.dumps(expected))
        assert found["total"]["difference"] == 40 * 16

    def test_text_names_what_grew(self, capsys):
        assert main(["compare", "gpt2", "larger"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("gpt2 -> larger\n")
        assert "transformer.wte" in out
        assert "weight 50 x 16 -> 90 x 16" in out

    def test_checkpoints(self, capsys, project):
        for name, size in (("a.pt", 10), ("b.pt", 30)):
            torch.save({"layer.weight": torch.ones(size, 4)}, project / name)
        found = json_of(capsys, "compare", "a.pt", "b.pt")
        assert found["total"] == {
            "name": "total",
            "before": 40,
            "after": 120,
            "difference": 80,
            "status": "grew",
            "detail": "",
        } | {"name": found["total"]["name"]}

    def test_arguments_are_those_of_both(self, capsys):
        found = json_of(capsys, "compare", "net.py:Lit", "net.py:Net", "--arg", "depth=3")
        assert found["total"]["difference"] == 0
        assert found["total"]["before"] == 3 * (64 * 64 + 64)


class TestSteps:
    def test_with_a_batch_the_steps_are_compared(self, capsys):
        found = json_of(capsys, "compare", "gpt2", "larger", "--batch", "4x32", "--gpu", "T4")
        assert found["kind"] == "predictions"
        assert found["total"]["difference"] > 0
        assert [fit["fits"] for fits in found["gpus"].values() for fit in fits] == [True, True]

    def test_status_is_about_the_second(self, capsys):
        arguments = ["compare", "gpt2", "larger", "--batch", "4x32"]
        assert main([*arguments, "--gpu", "256MiB"]) == 1
        assert "fits 256MiB" in capsys.readouterr().out

    def test_saved_predictions(self, capsys, saved, project):
        assert main(["compare", *saved, "--gpu", "T4,256MiB", "--html", "page.html"]) == 1
        out = capsys.readouterr().out
        assert "activation" in out
        assert "page: page.html" in out
        page = (project / "page.html").read_text()
        assert all(name in page for name in saved)

    def test_a_saved_prediction_and_a_model(self, capsys, saved):
        found = json_of(capsys, "compare", "before.json", "gpt2", "--batch", "2x32")
        assert found["total"]["difference"] == 0

    def test_the_same_one_twice(self, capsys, saved):
        assert main(["compare", "before.json", "before.json", "--html", "page.html"]) == 0
        assert "Both have" in capsys.readouterr().out


class TestReports:
    def test_a_run_is_compared_by_its_prediction(self, capsys, project, saved):
        predicted = json.loads((project / "after.json").read_text())
        report = {"settings": {}, "changes": [], "refusals": [], "predicted": predicted}
        # What a run measures on CUDA is in blocks of the allocator.
        report["measured"] = {"peak_bytes": 7, "allocated_bytes": 512}
        (project / "run.json").write_text(json.dumps(report))
        found = json_of(capsys, "compare", "before.json", "run.json", "--gpu", "T4")
        assert found["kind"] == "predictions"
        assert found["total"]["difference"] > 0
        assert (found["measured"]["before"], found["measured"]["after"]) == (None, 512)
        assert found["gpus"]["b"][0]["fits"]
        found = json_of(capsys, "compare", "run.json", "gpt2", "--batch", "8x32")
        assert found["total"]["difference"] == 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (("gpt2", "nowhere"), "`nowhere` does not exist"),
            (("gpt2", "broken.json"), "is not JSON"),
            (("before.json", "nofile.json"), "`nofile.json` does not exist"),
            (("gpt2", "before.json"), "add --batch with its sizes"),
            (("gpt2", "run.json"), "`memsave predict MODEL --batch SIZES --json`"),
            (("run.json", "gpt2", "--batch", "2x8"), "MemSaveCallback(predict=True)"),
            (("gpt2", "larger", "--gpu", "T4"), "--gpu needs a training step"),
            (("gpt2", "larger", "--html", "page.html"), "Add --batch"),
            (("gpt2", "net.py:fails"), "KeyError"),
            (("before.json", "cut.json"), "is an incomplete prediction"),
        ],
    )
    def test_one_line_says_what_to_do(self, args, said, capsys, project):
        (project / "broken.json").write_text("{")
        (project / "cut.json").write_text('{"by_phase": {}, "modules": []}')
        (project / "run.json").write_text('{"changes": [], "settings": {}}')
        if "before.json" in args:
            prediction = json_of(capsys, "predict", "gpt2", "--batch", "2x8")
            (project / "before.json").write_text(json.dumps(prediction))
        assert said in message_of(capsys, "compare", *args)

    def test_a_batch_that_a_model_rejects_is_3(self, capsys):
        arguments = ("compare", "net.py:Lit", "net.py:large", "--batch", BATCH)
        assert "`net.py:large` failed" in message_of(capsys, *arguments, status=3)

    def test_a_prediction_for_a_cpu_fits_no_gpu(self, capsys, project):
        found = json_of(capsys, "predict", "gpt2", "--batch", "2x8", "--device", "cpu")
        (project / "cpu.json").write_text(json.dumps(found))
        said = message_of(capsys, "compare", "cpu.json", "cpu.json", "--gpu", "T4")
        assert "is a prediction for cpu" in said
