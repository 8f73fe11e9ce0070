"""`memsave plan` on projects as users have them: text, JSON, YAML, page, GPUs, and wrong input."""

import json
import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # it comes without types
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_memsave import MemSaveCallback, MemSaveCLI, plan_memory
from lightning_memsave.cli.main import main
from lightning_memsave.targets.find import load_target
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from tests.cli.shell import BATCH, TINY_GPT2, json_of, message_of
from tests.report.test_page import data_in

# Four blocks with activations of gigabytes: nothing of it is ever allocated.
TOKENS = "16384x32"
GPT2 = ("gpt2", "--batch", TOKENS, "--set=offload=null")
CODE = """
from transformers import GPT2Config, GPT2LMHeadModel

class Gpt2(GPT2LMHeadModel):
    def __init__(self):
        super().__init__(GPT2Config.from_pretrained("gpt2"))
"""
BITWISE = ("--exactness", "bitwise")
# Leaves the planner nothing but checkpointing, so that a search is short.
FIXED = (
    *("precision", "micro_batch_size", "chunked_cross_entropy", "low_precision_weights"),
    "offload",
)


@pytest.fixture(autouse=True)
def of_four_blocks(project):
    (project / "gpt2" / "config.json").write_text(json.dumps(TINY_GPT2 | {"n_layer": 4}))


def callbacks_of(config: Any, path: Any, monkeypatch: Any) -> list[MemSaveCallback]:
    """Let LightningCLI and MemSaveCLI read the YAML."""
    monkeypatch.setattr("sys.argv", ["train.py"])  # LightningCLI warns about those of pytest
    [callback] = config["trainer"]["callbacks"]
    found = []
    for cls, text in (
        (LightningCLI, config),
        (MemSaveCLI, {"memsave": callback["init_args"]}),
    ):
        path.write_text(yaml.safe_dump(text))
        args = ["--trainer.accelerator=cpu", "--trainer.logger=false", f"--config={path}"]
        cli: Any = cls(
            BoringModel, args=args, run=False, save_config_callback=None, seed_everything_default=0
        )
        [made] = [c for c in cli.trainer.callbacks if isinstance(c, MemSaveCallback)]
        found.append(made)
    return found


def without_time(found):
    return {name: value for name, value in found.items() if name != "seconds"}


class TestOneBudget:
    # lightning 2.6.6 calls jsonargparse 4.53 by names of older releases.
    @pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
    def test_json_page_and_yaml_are_the_plan_of_python(self, capsys, project, monkeypatch):
        found = json_of(
            capsys, "plan", *GPT2, "--gpu", "T4", "--budget", "2GiB", *BITWISE, "--html", "p.html"
        )
        expected = plan_memory(
            load_target("gpt2"),
            TOKENS,
            settings={"offload": None},
            gpu="T4",
            budget="2GiB",
            exactness="bitwise",
        )
        plain = json.loads(json.dumps(without_time(expected.to_dict())))
        assert {name: found[name] for name in plain} == plain
        assert (found["target"], found["gpu"], found["exactness"]) == ("gpt2", "T4", "bitwise")
        assert (found["reason"], found["smallest"]) == (None, None)
        plan = found["plan"]
        assert plan["settings"]["activation_checkpointing"] is not None
        assert plan["device_bytes"] + found["margin_bytes"] <= 2 * 2**30 < found["unchanged_bytes"]
        [gpu] = found["gpus"]
        assert (gpu["name"], gpu["plan"]) == ("T4", plan)

        self.check_page(data_in(project / "p.html"), found)
        self.check_yaml(capsys, project, found, monkeypatch)

    def check_page(self, page, found):
        frontier = page["frontier"]
        assert (frontier["budget_bytes"], frontier["unchanged_bytes"]) == (
            2 * 2**30,
            found["unchanged_bytes"],
        )
        assert [(p["device_bytes"], p["time_ratio"], p["how"]) for p in frontier["plans"]] == [
            (p["device_bytes"], p["time_ratio"], p["how"]) for p in found["frontier"]
        ]
        [chosen] = [p for p in frontier["plans"] if p["is_chosen"]]
        assert chosen["how"] == found["plan"]["how"]
        assert [(p["name"], p["device_bytes"]) for p in page["predictions"]] == [
            ("the plan", found["plan"]["device_bytes"]),
            ("unchanged", found["unchanged_bytes"]),
        ]
        assert page["device_name"] == "budget"

    def check_yaml(self, capsys, project, found, monkeypatch):
        config = yaml.safe_load(found["yaml"])
        planned = repr(eval(found["plan"]["how"], {"MemSaveCallback": MemSaveCallback}))
        assert "activation_checkpointing=" in planned
        made = callbacks_of(config, project / "cli.yaml", monkeypatch)
        assert [repr(callback) for callback in made] == [planned, planned]
        (project / "models.py").write_text(CODE)
        config["model"] = {"class_path": "models.Gpt2"}
        (project / "planned.yaml").write_text(yaml.safe_dump(config))
        options = ("--batch", TOKENS, "--gpu", "T4")
        again = json_of(capsys, "predict", "planned.yaml", *options)
        assert again["device_bytes"] == found["plan"]["device_bytes"]

    @pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
    def test_techniques_of_a_yaml_file_are_fixed_and_written_as_they_were(
        self, capsys, project, monkeypatch
    ):
        path = project / "config.yaml"
        config = yaml.safe_load(path.read_text())
        technique = {
            "class_path": "lightning_memsave.ActivationCheckpointing",
            "init_args": {"which": 1},
        }
        [callback] = config["trainer"]["callbacks"]
        callback["init_args"] |= {"activation_checkpointing": technique, "budget": "8GiB"}
        path.write_text(yaml.safe_dump(config))
        printed = json_of(capsys, "plan", "config.yaml", "--batch", BATCH, *BITWISE)
        assert printed["budget_bytes"] == 8 * 2**30
        found = yaml.safe_load(printed["yaml"])
        [callback] = found["trainer"]["callbacks"]
        assert callback["init_args"]["activation_checkpointing"] == technique
        for made in callbacks_of(found, project / "cli.yaml", monkeypatch):
            assert made.arguments["activation_checkpointing"] == ActivationCheckpointing(which=1)

    def test_text_shows_the_frontier_and_what_to_type(self, capsys, project):
        arguments = ("plan", *GPT2, "--gpu", "2GiB,2560MiB", *BITWISE, "--html", "plan.html")
        assert main([*arguments]) == 1
        out = capsys.readouterr().out
        gpus, settings, verdict, head, table, *_ = out.split("\n\n")
        rows = [line.split()[:2] for line in gpus.splitlines()[1:]]
        assert rows == [["2GiB", "NO"], ["2560MiB", "yes"]]
        assert settings.startswith("2GiB: activation_checkpointing='nested'")
        assert verdict == "2560MiB is enough, the smallest of them. Its plan:"
        assert head.startswith("The fastest plan for 2.50 GiB, of which 256.00 MiB stay free: ")
        _, *rows = table.splitlines()
        chosen = [row.split()[1:] for row in rows if row.startswith(">")]
        assert [row[2:6] for row in chosen] == [["yes", *chosen[0][3:5], chosen[0][5]]]
        assert any(" NO " in row for row in rows)
        assert '\nMemSaveCallback(preset="bitwise", activation_checkpointing=' in out
        assert "=None" not in out.replace("optimizer_in_backward=None", "")
        assert "In the YAML file of LightningCLI:\n\ntrainer:\n  callbacks:\n" in out
        assert "The unchanged step does not fit: it needs 4." in out
        assert out.endswith("\npage: plan.html\n")
        assert max(map(len, out.splitlines())) <= 100

    @pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
    @pytest.mark.slow
    def test_the_memory_of_the_host_is_used_where_it_is_faster(self, capsys, project, monkeypatch):
        options = [f"--set={name}=null" for name in FIXED if name != "offload"]
        options += ["--set=optimizer=null", "--set=activation_checkpointing=all"]
        wide = ("plan", "gpt2", "--arg", "n_embd=512", "--batch", "64x32", "--budget", "1000MiB")
        found = json_of(capsys, *wide, *options, "--set=host_budget=8GiB")
        plan = found["plan"]
        assert plan["settings"]["offload"] == "parameters+activations"  # with no block resident
        assert plan["host_bytes"] > 12 * 4 * 12 * 512**2  # four blocks; updates in backward
        for made in callbacks_of(yaml.safe_load(found["yaml"]), project / "c.yaml", monkeypatch):
            assert repr(made) == repr(eval(plan["how"], {"MemSaveCallback": MemSaveCallback}))
            assert made.arguments["host_budget"] == "8GiB"
        assert main([*wide, *options, "--set=host_budget=100MiB"]) == 1
        out = " ".join(capsys.readouterr().out.split())
        assert re.search(r'`host_budget="\d+MiB"` if the host has it', out)


class TestGpus:
    def test_names_the_smallest_that_is_enough(self, capsys):
        gpus = ["--gpu", "4GiB,2GiB", "--gpu", "3GiB"]
        found = json_of(capsys, "plan", *GPT2, *BITWISE, *gpus, status=1)
        assert found["gpu"] == "3GiB"
        by_name = {gpu["name"]: gpu for gpu in found["gpus"]}
        assert list(by_name) == ["4GiB", "2GiB", "3GiB"]
        assert found["plan"] == by_name["3GiB"]["plan"]
        # With less memory, more is recomputed.
        assert by_name["4GiB"]["plan"]["time_ratio"] < by_name["3GiB"]["plan"]["time_ratio"]
        small = by_name["2GiB"]
        assert (small["plan"], small["runner_up"], small["frontier"]) == (None, None, [])
        needed = small["smallest"]["device_bytes"] + small["margin_bytes"]
        assert needed > small["budget_bytes"] == 2 * 2**30
        assert "No settings fit a budget of 2.00 GiB" in small["reason"]

    def test_each_has_its_own_kernels_and_throughput(self, capsys):
        arguments = ("plan", "gpt2", "--batch", "4x32", *BITWISE)
        found = json_of(capsys, *arguments, "--gpu", "T4,H200")
        old, new = found["gpus"]
        assert old["unchanged_bytes"] != new["unchanged_bytes"]
        assert old["plan"]["settings"] == new["plan"]["settings"]
        assert found["gpu"] == "T4"


@pytest.mark.slow
class TestProcesses:
    def test_ways_to_use_two_gpus_are_compared(self, capsys):
        options = [f"--set={name}=null" for name in FIXED]
        arguments = ("plan", *GPT2, *options, "--gpu", "3GiB", "--world-size", "2")
        found = json_of(capsys, *arguments)
        ways = [(one["strategy"], one["world_size"]) for one in found["gpus"]]
        assert ways == [(None, 1), ("ddp", 2), ("fsdp2", 2)]
        assert main([*arguments]) == 0
        table, plans, verdict, *_ = capsys.readouterr().out.split("\n\n")
        names = ["3GiB", "2 x 3GiB, ddp", "2 x 3GiB, fsdp2"]
        assert [line[:15].strip() for line in table.splitlines()[1:]] == names
        assert [line.partition(":")[0] for line in plans.splitlines()] == names
        fastest = [
            line[:15].strip() for line in table.splitlines() if re.search(r" 1\.00 +\w+$", line)
        ]
        assert verdict == f"{fastest[0]} is enough, the fastest of them. Its plan:"
        expected = {"2 x 3GiB, ddp": "ddp", "2 x 3GiB, fsdp2": "memsave_fsdp2"}
        trainer = yaml.safe_load(found["yaml"])["trainer"]
        assert trainer.get("strategy") == expected.get(fastest[0])

    def test_the_plan_of_one_way_is_that_of_python(self, capsys):
        options = ("--set=optimizer_in_backward=null", "--world-size", "4", "--strategy", "fsdp2")
        found = json_of(capsys, "plan", *GPT2, "--gpu", "3GiB", *BITWISE, *options)
        expected = plan_memory(
            load_target("gpt2"),
            TOKENS,
            settings={"offload": None, "optimizer_in_backward": None},
            gpu="3GiB",
            exactness="bitwise",
            strategy="fsdp2",
            world_size=4,
        )
        assert found["plan"]["how"] == expected.plan.how
        assert 'Trainer(strategy="memsave_fsdp2", devices=4)' in str(expected)
        trainer = yaml.safe_load(found["yaml"])["trainer"]
        assert (trainer["strategy"], trainer["devices"]) == ("memsave_fsdp2", 4)

    def test_an_unknown_way_is_refused(self, capsys):
        arguments = ("plan", *GPT2, "--gpu", "T4", "--strategy", "fsdp,ddp")
        assert "Use one or several of one, ddp, fsdp2" in message_of(capsys, *arguments)


class TestNoPlan:
    ARGUMENTS = ("plan", *GPT2, "--budget", "1GiB", *BITWISE)

    def test_says_what_is_missing(self, capsys, project):
        assert main([*self.ARGUMENTS, "--html", "plan.html"]) == 1
        out = capsys.readouterr().out
        assert "No settings fit a budget of 1.00 GiB. The least found is " in out
        assert re.search(r"\bUse --budget \d+MiB, --exactness approximate, ", " ".join(out.split()))
        assert "`budget" not in out
        page = data_in(project / "plan.html")
        assert [p["name"] for p in page["predictions"]] == ["the smallest", "unchanged"]
        assert page["frontier"] is None
        assert any("No settings fit" in note for note in page["notes"])

    def test_a_gpu_without_room_for_a_context_is_too_small(self, capsys):
        arguments = ("net.py:Lit", "--batch", BATCH, "--gpu", "256MiB")
        assert main(["predict", *arguments]) == 1
        found = json_of(capsys, "plan", *arguments, *BITWISE, "--gpu", "2GiB", status=1)
        assert found["gpu"] == "2GiB"
        small, large = found["gpus"]
        assert (small["plan"], large["reason"]) == (None, None)
        assert "500.00 MiB of CUDA context" in small["reason"]
        assert "Use a GPU with " in small["reason"]

    def test_what_has_to_stay_free_does_not_fit_too(self, capsys):
        arguments = ("plan", "net.py:Lit", "--batch", BATCH, *BITWISE, "--budget", "600MiB")
        assert main([*arguments]) == 1
        out = " ".join(capsys.readouterr().out.split())
        unchanged = "The unchanged step fits only without the 256.00 MiB that stay free: it needs 5"
        assert unchanged in out

    def test_a_short_time_is_no_answer(self, capsys):
        # Not 1: that nothing was found in this time does not mean that nothing fits.
        said = message_of(capsys, *self.ARGUMENTS, "--time-limit", "0.2", status=3)
        assert "longer --time-limit" in said or "such as --time-limit 0.4" in said

    def test_a_step_that_fails_has_status_3(self, capsys):
        arguments = ("net.py:Leaves", "--batch", BATCH, "--gpu", "T4")
        assert "SystemExit: 5" in message_of(capsys, "plan", *arguments, status=3)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "Add --gpu, such as --gpu T4, or --budget 12GiB"),
        (["--device", "cpu"], "Add for example --budget 8GiB"),
        (["--device", "cpu", "--gpu", "T4"], "Remove one of the two"),
        (["--device", "cpu", "--budget", "0.9"], "Use a size, such as --budget 8GiB."),
        (["--budget", "0.9"], "or add --gpu, such as --gpu T4"),
        (["--budget", "free"], "--budget free is a part of a GPU, but there is none. Use a size"),
        (["--gpu", "T4", "--budget", "12"], "--budget 12 is neither a size of at least 1 MiB"),
        (["--gpu", "T4", "--budget", "so many"], "--budget 'so many' is neither a size of at"),
        (["--gpu", "T4", "--budget", "50%"], "--budget 50% is neither a size of at least"),
        (["--gpu", "T4", "--budget", ""], "--budget '' is neither a size of at least 1 MiB"),
        (["--gpu", "T4", "--budget", "5KiB"], "--budget 5KiB is neither a size of at least 1 MiB"),
        (["--gpu", "T4", "--budget=-5GiB"], "--budget -5GiB is neither a size of at least"),
        (["--gpu", "T4", "--budget", "-0.5"], "a share of the device such as --budget 0.9"),
        (
            ["--gpu", "T4", "--budget", "0.0"],
            "share above 0 and up to 1. Use a size such as --budget",
        ),
        (["--gpu", "T4", "--budget", "1.5"], "--budget 1.5 is neither a size of at least 1 MiB"),
        (["--gpu", "T4", "--budget", "99GiB"], "14.58 GiB of the T4. Use at most that"),
        (["--gpu", "T4,A100-40GB", "--budget", "20GiB"], "--budget 20GiB is more than the 14.58"),
        (["--gpu", "T4", "--precision", "f9"], "--precision f9 is not a precision"),
        (["--gpu", "T4", "--set", "preset=classic"], "Use `preset='off'`, and name"),
        (["--gpu", "T4", "--set", "budget=8GiB"], "Use --budget"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_wrong_arguments_say_what_to_type(arguments, remedy, capsys):
    said = message_of(capsys, "plan", "net.py:Lit", "--batch", BATCH, *BITWISE, *arguments)
    assert remedy in said
    assert "`budget" not in said


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({"budget": "99GiB"}, ["--gpu", "T4"], "`budget='99GiB'` is more than the 14.58 GiB"),
        ({"budget": "free"}, [], "Use also --gpu T4, or a size such as `budget"),
        (
            {"optimizer": "8bit", "exactness": "rounding"},
            ["--gpu", "T4"],
            "`exactness='rounding'` does not allow",
        ),
    ],
    ids=str,
)
def test_settings_of_a_file_are_called_as_in_the_file(settings, arguments, said, capsys, project):
    path = project / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["trainer"]["callbacks"][0]["init_args"] = settings
    path.write_text(yaml.safe_dump(config))
    arguments = [f"--gpu={name}" for name in arguments[1:]]
    assert said in message_of(capsys, "plan", "config.yaml", "--batch", BATCH, *arguments)
