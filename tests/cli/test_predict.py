"""`memsave predict` on projects as users have them."""

import itertools
import json
import pickle
import shlex

import pytest
import yaml  # type: ignore[import-untyped] # it comes without types

from lightning_memsave import LowBitOptimizer, MemSaveCallback, explain_memory, predict_memory
from lightning_memsave.cli.main import main
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.targets.find import load_target
from lightning_memsave.targets.target import make_batch_spec
from tests.callbacks.lit import LIGHTNING, loader_of, make_trainer
from tests.cli.shell import BATCH, json_of, message_of

pytestmark = pytest.mark.usefixtures("project")


def without_time(found):
    return {name: value for name, value in found.items() if name != "seconds"}


class TestFigures:
    def test_json_is_what_python_gives(self, capsys):
        found = json_of(capsys, "predict", "net.py:Lit", "--batch", BATCH)
        target = load_target("net.py:Lit")
        batch = make_batch_spec(BATCH, target).build()
        expected = predict_memory(target.build, batch).to_dict()
        expected = json.loads(json.dumps(without_time(expected)))
        assert {name: found[name] for name in expected} == expected
        assert found["target"] == "net.py:Lit"
        assert found["batch"] == BATCH
        assert (found["gpus"], found["variants"], found["notes"]) == ([], [], [])
        assert MemoryPrediction.from_dict(found).peak_bytes == found["peak_bytes"]

    def test_optimizer_of_a_plain_module(self, capsys):
        arguments = ("predict", "net.py:Net", "--batch", "x=float32[8,64]", "--device", "cpu")
        num_bytes = 4 * 2 * (64 * 64 + 64)
        momentum = ("--optimizer", "SGD", "--optimizer-arg", "momentum=0.9")
        for optimizer, times in (
            ((), 2),
            (("--optimizer", "torch.optim.SGD"), 0),
            (momentum, 1),
            (("--optimizer", "net.py:make_optimizer"), 1),
            (("--optimizer", "net:make_optimizer"), 1),
        ):
            state = json_of(capsys, *arguments, *optimizer)["by_category"]["optimizer_state"]
            assert state == pytest.approx(times * num_bytes, abs=4 * 4), optimizer

    def test_a_batch_of_gigabytes_is_not_made(self, capsys):
        arguments = ("predict", "net.py:Net", "--batch", "x=float32[80000000,64]")
        found = json_of(capsys, *arguments)
        assert found["by_category"]["input"] == 4 * 64 * 80_000_000


class TestLightningCLI:
    def test_settings_and_precision_of_the_file_are_used(self, capsys):
        found = json_of(capsys, "predict", "config.yaml", "--batch", BATCH, "--gpu", "A100-40GB")
        assert found["settings"]["activation_checkpointing"] == "'all'"
        assert "optimizer" not in found["settings"]
        assert found["settings"]["precision"] == "16-mixed"

    def test_off_is_no_boolean(self, capsys, project):
        arguments = ("predict", "config.yaml", "--batch", BATCH)
        plain = json_of(capsys, *arguments, "--no-memsave")
        path = project / "config.yaml"
        config = yaml.safe_load(path.read_text())
        config["trainer"]["callbacks"][0]["init_args"] = {"preset": False}
        path.write_text(yaml.safe_dump(config).replace("preset: false", "preset: off"))
        for options in ([], ["--no-memsave", "--set", "preset=off"]):
            found = json_of(capsys, *arguments, *options)
            assert found["peak_bytes"] == plain["peak_bytes"]
            assert found["settings"] == plain["settings"]

    def test_the_shell_wins(self, capsys):
        arguments = ("predict", "config.yaml", "--batch", BATCH)
        found = json_of(capsys, *arguments, "--precision", "bf16-true", "--set", "optimizer=8bit")
        assert found["settings"]["precision"] == "bf16-true"
        assert "optimizer" in found["settings"]
        assert found["settings"]["activation_checkpointing"] == "'all'"
        found = json_of(capsys, *arguments, "--no-memsave")
        assert found["settings"] == {"precision": "16-mixed"}

    def test_says_that_one_device_holds_all(self, capsys, project):
        path = project / "config.yaml"
        path.write_text(path.read_text().replace("devices: 4\n", "devices: 4\n  strategy: fsdp\n"))
        found = json_of(capsys, "predict", "config.yaml", "--batch", BATCH)
        assert found["notes"] == [
            "`strategy: fsdp` is ignored: everything is assumed to be on one device"
        ]


class TestCards:
    def test_status_says_whether_it_fits(self, capsys):
        arguments = ("predict", "net.py:Lit", "--batch", BATCH)
        found = json_of(capsys, *arguments, "--gpu", "T4", "--gpu", "256MiB,12GiB", status=1)
        assert [(gpu["name"], gpu["fits"]) for gpu in found["gpus"]] == [
            ("T4", True),
            ("256MiB", False),
            ("12GiB", True),
        ]
        small = found["gpus"][1]
        assert small["spare_bytes"] == 256 * 2**20 - small["needed_bytes"] < 0
        assert main([*arguments, "--gpu", "T4"]) == 0

    def test_text_says_it_too(self, capsys):
        assert main(["predict", "net.py:Lit", "--batch", BATCH, "--gpu", "256MiB"]) == 1
        out = capsys.readouterr().out
        line = next(line for line in out.splitlines() if line.startswith("256MiB"))
        assert line.split()[:4] == ["256MiB", "NO", "256.00", "MiB"]

    def test_each_generation_has_its_own_precision(self, capsys):
        arguments = ("predict", "gpt2", "--batch", "2x16", "--memsave")
        old = json_of(capsys, *arguments, "--gpu", "T4")
        new = json_of(capsys, *arguments, "--gpu", "L4")
        assert old["settings"]["precision"] == "32-true"
        assert new["settings"]["precision"] == "bf16-mixed"


class TestText:
    def test_shows_categories_phases_modules_and_tensors(self, capsys):
        assert main(["predict", "gpt2", "--batch", "4x32", "--depth", "3", "--tensors", "3"]) == 0
        out = capsys.readouterr().out
        assert "GPT2LMHeadModel, 8,032 parameters: " in out
        for heading in (
            "device memory needed",
            "category         at the peak  share",
            "module ",
            "largest tensors",
            "assumed: The CUDA context needs",
        ):
            assert heading in out
        tensors = out.split("largest tensors")[1].split("\n\n")[0]
        assert len(tensors.splitlines()) >= 4
        assert max(map(len, out.splitlines())) <= 110

    def test_depth(self, capsys):
        shown = []
        for depth in ("0", "4"):
            main(["predict", "gpt2", "--batch", "4x32", "--depth", depth, "--tensors", "0"])
            shown.append(capsys.readouterr().out)
        assert "2 x GPT2Block" not in shown[0]
        assert "2 x GPT2Block" in shown[1]
        assert "largest tensors" not in shown[0]

    def test_variants_side_by_side(self, capsys, project):
        variant = "precision=bf16-mixed activation_checkpointing=all"
        arguments = ["predict", "gpt2", "--batch", "4x32", "--variant", variant]
        assert main([*arguments, "--gpu", "T4", "--html", "page.html"]) == 0
        out = capsys.readouterr().out
        rows = [line for line in out.splitlines() if line.startswith(("as given", variant))]
        assert len(rows) == 2
        assert rows[0].rstrip().endswith("yes")
        page = (project / "page.html").read_text()
        assert variant in page
        assert "page: page.html" in out

    def test_writes_a_snapshot_for_torchs_viewer(self, capsys, project):
        arguments = ["predict", "net:Lit", "--batch", "float32[8,64],int64[8]<10", "--json"]
        assert main([*arguments, "--snapshot", "snapshot.pickle"]) == 0
        [events] = pickle.loads((project / "snapshot.pickle").read_bytes())["device_traces"]
        signs = {"alloc": 1, "free_completed": -1}
        changes = (signs.get(event["action"], 0) * event["size"] for event in events)
        peak_bytes = json.loads(capsys.readouterr().out)["peak_bytes"]
        assert max(itertools.accumulate(changes)) == peak_bytes

    def test_refuses_what_has_no_effect_and_says_why(self, capsys):
        options = ("--set", "optimizer=8bit", "--set", "activation_checkpointing=selective")
        small = ("net:Lit", "--arg", "width=4", "--arg", "depth=1")
        arguments = ("predict", *small, "--batch", "float32[8,4],int64[8]<4", *options)
        assert main([*arguments]) == 2
        said = capsys.readouterr().err
        assert "`activation_checkpointing='selective'`: no repeated block" in said

    def test_accumulation_of_the_file_is_named(self, capsys, project):
        (project / "accumulating.yaml").write_text(
            "trainer: {accumulate_grad_batches: 4}\nmodel: {class_path: net.Lit}\n"
        )
        found = json_of(capsys, "predict", "accumulating.yaml", "--batch", BATCH)
        assert found["settings"]["accumulate_grad_batches"] == "4"

    def test_says_that_made_up_numbers_decide(self, capsys):
        found = json_of(capsys, "predict", "net:Choosing", "--batch", BATCH)
        (guess,) = found["guesses"]
        assert guess.startswith("net.py, line ")
        assert "random" in guess

    # Gradients of the last step at the forward peak are what the bare callback alone frees.
    def test_memsave_is_the_bare_callback_of_a_trainer(self, capsys, project):
        batch = "float32[512,64],int64[512]<64"
        (project / "listed.yaml").write_text(
            "model: {class_path: net.Unlogged}\n"
            "trainer: {precision: null, callbacks: [lightning_memsave.MemSaveCallback]}\n"
        )
        (project / "flags.yaml").write_text(
            "model: {class_path: net.Unlogged}\nmemsave: {enabled: true}\n"
        )
        common = ("--batch", batch, "--device", "cpu")
        found = [
            json_of(capsys, "predict", "net.py:Unlogged", *common, "--memsave"),
            json_of(capsys, "predict", "listed.yaml", *common),
            json_of(capsys, "predict", "flags.yaml", *common),
            json_of(capsys, "explain", "net.py:Unlogged", *common, "--memsave", "--no-remedies")[
                "prediction"
            ],
            explain_memory("listed.yaml", batch, device="cpu", remedies=False).prediction.to_dict(),
            predict_memory(
                load_target("net.py:Unlogged").build,
                make_batch_spec(batch).build(),
                settings=MemSaveCallback(),
                device="cpu",
            ).to_dict(),
        ]
        callback = MemSaveCallback()
        batches = loader_of([make_batch_spec(batch).build()] * 4)
        make_trainer(LIGHTNING, callback).fit(load_target("net.py:Unlogged").build(), batches)
        summary = callback.monitor.summary
        found.append(summary.prediction.to_dict())
        for name in ("peak_bytes", "by_category", "by_phase", "settings"):
            assert [each[name] for each in found] == [found[0][name]] * len(found), name
        assert summary.peak_bytes == found[0]["peak_bytes"]
        assert found[0]["settings"]["early_release"] == "True"

    def test_precision_of_the_bare_callback_on_cuda(self, capsys, project):
        wanted = {"null": "bf16-mixed", "32-true": "bf16-mixed", "16-mixed": "16-mixed"}
        for name, precision in wanted.items():
            (project / "listed.yaml").write_text(
                f"model: {{class_path: net.Lit}}\ntrainer: {{precision: {name}, "
                "callbacks: [lightning_memsave.MemSaveCallback]}\n"
            )
            found = json_of(capsys, "predict", "listed.yaml", "--batch", BATCH)
            assert found["settings"]["precision"] == precision
            explained = explain_memory("listed.yaml", BATCH, factors=[], remedies=False).prediction
            assert explained.settings["precision"] == precision

    def test_techniques_are_json_with_a_class_path(self, capsys):
        batch = "float32[8,256],int64[8]<256"
        config = {
            "class_path": "lightning_memsave.LowBitOptimizer",
            "init_args": {"keep_32bit": ["net.layers.0.*"]},
        }
        change = f"optimizer={json.dumps(config)}"
        found = json_of(
            *(capsys, "predict", "net.py:large", "--batch", batch, "--device", "cpu"),
            *("--set", change, "--variant", shlex.quote(change)),
        )
        states = [
            found["by_category"]["optimizer_state"],
            found["variants"][0]["by_category"]["optimizer_state"],
            predict_memory(
                load_target("net.py:large").build,
                make_batch_spec(batch).build(),
                settings={"optimizer": LowBitOptimizer(keep_32bit=("net.layers.0.*",))},
                device="cpu",
            ).peak.optimizer_state_bytes,
        ]
        assert states == [states[0]] * 3
        assert states[0] > 8 * 256 * 256  # of one layer in 32 bits

    def test_help_says_how_techniques_are_written(self, capsys):
        with pytest.raises(SystemExit):
            main(["predict", "--help"])
        assert "lightning_memsave.LowBitOptimizer" in capsys.readouterr().out.replace("\n", " ")


class TestBadInput:
    def test_nested_batches_come_from_a_function(self, capsys, project):
        said = message_of(capsys, "predict", "net:Lit", "--batch", "in={x=float32[8,64]}")
        assert 'name a function that returns the batch: "file.py:function"' in said
        code = "import torch\ndef make():\n    return torch.ones(8, 64), torch.zeros(8).long()\n"
        (project / "batches.py").write_text(code)
        made = json_of(capsys, "predict", "net:Lit", "--batch", "batches.py:make")
        assert made["batch"] == "batches.py:make"
        described = json_of(capsys, "predict", "net:Lit", "--batch", BATCH)
        assert made["by_category"] == described["by_category"]

    def test_a_batch_that_the_model_rejects_is_3(self, capsys):
        arguments = ("predict", "net.py:Lit", "--batch", "float32[8,65],int64[8]")
        said = message_of(capsys, *arguments, status=3)
        assert "The training step of `net.py:Lit` failed in " in said
        assert "net.py, line " in said
        assert "Check that --batch lists the tensors" in said

    @pytest.mark.parametrize("command", ["predict", "explain"])
    def test_a_step_that_never_ends_is_3(self, capsys, command):
        args = (command, "net:Endless", "--batch", BATCH, "--time-limit", "1")
        said = message_of(capsys, *args, status=3)
        assert "does not end: simulating the step takes more than 1 seconds" in said
        assert "net.py, line " in said
