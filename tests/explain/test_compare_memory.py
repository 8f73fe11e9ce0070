import json
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_memsave import MemoryBreakdown, MemSaveCallback, compare_memory, predict_memory
from lightning_memsave.callbacks.run_prediction import RunPrediction
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.parameters import parameter_table
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory
from tests.callbacks.lit import LIGHTNING, make_trainer

PEAK = MemoryBreakdown(parameter_bytes=100)
PREDICTION = MemoryPrediction(
    "cpu", "M", PEAK, {"forward": PEAK}, (ModuleMemory("", "M", 25, PEAK),)
)


class Small(nn.Sequential):
    def __init__(self, size=4):
        super().__init__(nn.Linear(3, size), nn.Linear(size, 2))


class Later(LightningModule):
    layer: nn.Module | None = None

    def configure_model(self):
        if self.layer is None:
            self.layer = Small(5)


def test_forms_of_models_mix(tmp_path):
    model = Small(5)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save({"state_dict": {f"net.{n}": t for n, t in model.state_dict().items()}}, "l.ckpt")
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    for other in (
        model,
        lambda: Small(5),
        parameter_table(model),
        model.state_dict(),
        shapes,
        tmp_path / "weights.pt",
        "l.ckpt",
        Later,
    ):
        found = compare_memory(Small, other)
        assert (found.total.before, found.total.after) == (26, 32)
        assert [c.difference for c in found.modules] == [4, 2]


def test_labels_are_classes_paths_or_what_is_said(tmp_path):
    torch.save(Small().state_dict(), "weights.pt")
    found = compare_memory(Small(), "weights.pt")
    assert (found.a, found.b) == ("Small", "weights.pt")
    assert compare_memory(Small, Small, labels=("x", "y")).b == "y"


def test_predictions_also_as_json(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(PREDICTION.to_dict()))
    found = compare_memory(PREDICTION, tmp_path / "p.json")
    assert (found.kind, found.total.difference) == ("predictions", 0)
    assert compare_memory(PREDICTION.to_dict(), PREDICTION).kind == "predictions"


def test_reports_of_real_runs(tmp_path):
    for name, accumulated in (("a", None), ("b", 2)):
        off: dict[str, Any] = dict.fromkeys(("optimizer", "micro_batch_size"))
        callback = MemSaveCallback(None, **off, accumulate_grad_batches=accumulated)
        settings = {"max_steps": 2, "limit_val_batches": 0, "default_root_dir": tmp_path / name}
        make_trainer(LIGHTNING, callback, **settings).fit(BoringModel())
    paths = [tmp_path / name / "memsave_report.json" for name in ("a", "b")]
    found = compare_memory(*paths)
    assert found.kind == "predictions"
    assert found.settings == (("accumulate_grad_batches", "-", "2"),)
    assert "parameter" in {c.name for c in found.categories}
    assert str(paths[1]) in str(found).replace("\n", "")
    peaks = [json.loads(path.read_text())["measured"]["peak_bytes"] for path in paths]
    assert [found.measured.before, found.measured.after] == peaks
    beside = compare_memory(PREDICTION, paths[0])
    assert (beside.kind, beside.measured.before, beside.measured.after) == (
        "predictions",
        None,
        peaks[0],
    )


class TestBadInput:
    def test_refuses_what_has_no_figure_in_common(self):
        with pytest.raises(ConfigurationError, match=r"cannot be compared.*predict_memory"):
            compare_memory(Small(), PREDICTION)

    @pytest.mark.parametrize(
        ("predicted", "why"), [(None, ","), ({"note": "no batch"}, r" \(no batch\),")]
    )
    def test_refuses_a_run_without_a_prediction(self, predicted, why):
        report = {"changes": [], "settings": {}, "predicted": predicted}
        said = rf"a run without a prediction{why}.*MemSaveCallback\(predict=True\)"
        with pytest.raises(ConfigurationError, match=said):
            compare_memory(report, PREDICTION)


def test_reports_say_which_modules_grew():
    def report(features):
        run = RunPrediction(1.0)
        module = nn.Sequential(nn.Linear(8, features), nn.ReLU(), nn.Linear(features, 8))
        run.prediction = predict_memory(module, torch.ones(4, 8), device="cpu")
        predicted = json.loads(json.dumps(run.to_dict(None)))
        return {"settings": {}, "changes": [], "device": "cpu", "predicted": predicted}

    found = compare_memory(report(16), report(64))
    assert {"0", "2"} <= {change.name for change in found.modules}
    assert sum(change.difference for change in found.modules) == found.total.difference
