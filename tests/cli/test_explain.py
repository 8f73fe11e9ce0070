"""`memsave explain` on models and on messages."""

import io
import json
import sys

import pytest
import torch

from lightning_memsave.cli.main import main
from lightning_memsave.oom.diagnosis import diagnose
from lightning_memsave.oom.message import read_out_of_memory
from tests.cli.shell import BATCH, json_of, message_of

FRAGMENTED = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 15.90 GiB total "
    "capacity; 9.00 GiB already allocated; 0.50 GiB free; 14.50 GiB reserved in total by PyTorch)"
)


pytestmark = pytest.mark.usefixtures("project")


class TestParameters:
    def test_text(self, capsys):
        assert main(["explain", "gpt2"]) == 0
        out = capsys.readouterr().out
        assert "GPT2LMHeadModel: 8,032 parameters" in out
        assert "2 x GPT2Block" in out

    def test_json(self, capsys):
        found = json_of(capsys, "explain", "net.py:Lit", "--arg", "depth=4")
        assert found["parameters"]["num_parameters"] == 4 * (64 * 64 + 64)
        assert found["prediction"] is None
        assert found["batch"] is None

    def test_a_checkpoint_without_code(self, capsys, project):
        torch.save({"table.weight": torch.ones(100, 4)}, project / "weights.pt")
        found = json_of(capsys, "explain", "weights.pt")
        assert found["parameters"]["num_parameters"] == 400
        assert "only names and shapes are known" in found["notes"][0]


class TestStep:
    @pytest.mark.slow
    def test_without_remedies(self, capsys):
        arguments = ("explain", "gpt2", "--batch", "4x32", "--gpu", "T4", "--no-remedies")
        found = json_of(capsys, *arguments)
        assert found["remedies"] is None
        assert found["gpus"][0]["fits"] is True
        assert found["prediction"]["peak_bytes"] > 0
        assert {"batch size", "sequence length"} <= {s["name"] for s in found["factors"]}

    def test_status(self, capsys):
        arguments = ["explain", "net.py:Lit", "--batch", BATCH, "--no-remedies"]
        assert main([*arguments, "--gpu", "256MiB"]) == 1
        assert "It does not fit 256MiB" in capsys.readouterr().out

    def test_settings_of_a_file_for_lightning_cli(self, capsys):
        found = json_of(capsys, "explain", "config.yaml", "--batch", BATCH, "--no-remedies")
        assert found["prediction"]["settings"]["precision"] == "16-mixed"


class TestMessages:
    def test_a_log(self, capsys, project):
        log = f"epoch 3\n{FRAGMENTED}\n\xff"
        (project / "run.log").write_bytes(log.encode("latin-1"))
        assert main(["explain", "--oom", "run.log"]) == 0
        assert capsys.readouterr().out == f"{diagnose(read_out_of_memory(FRAGMENTED))}\n"

    def test_json(self, capsys, project):
        (project / "run.log").write_text(FRAGMENTED)
        found = json_of(capsys, "explain", "--oom", "run.log")
        assert found["cause"] == "fragmentation"
        assert found["oom"]["requested_bytes"] == 2**30

    def test_pasted(self, capsys, monkeypatch):
        pasted = io.TextIOWrapper(io.BytesIO(FRAGMENTED.encode()))
        monkeypatch.setattr(sys, "stdin", pasted)
        assert json_of(capsys, "explain", "--oom", "-")["cause"] == "fragmentation"

    @pytest.mark.slow
    def test_with_a_model_what_helps_is_predicted(self, capsys, project):
        (project / "run.log").write_text(FRAGMENTED)
        arguments = ("explain", "--oom", "run.log", "net.py:Lit", "--batch", BATCH)
        found = json_of(capsys, *arguments)
        diagnosis = diagnose(read_out_of_memory(FRAGMENTED))
        assert found["out_of_memory"] == json.loads(json.dumps(diagnosis.to_dict()))
        assert all(remedy["device_bytes"] > 0 for remedy in found["remedies"])
        capacity = diagnosis.oom.capacity_bytes
        assert found["gpu"]["total_bytes"] == pytest.approx(capacity, abs=2**20)

    def test_with_a_model_both_are_shown(self, capsys, project):
        (project / "run.log").write_text(FRAGMENTED)
        arguments = ["explain", "--oom", "run.log", "net.py:Lit", "--batch", BATCH]
        assert main([*arguments, "--no-remedies", "--gpu", "T4"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{diagnose(read_out_of_memory(FRAGMENTED))}\n\n")
        assert "What the peak depends on" in out


class TestBadInput:
    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ((), "needs a model, or --oom"),
            (("gpt2", "--oom", "run.log"), "add --batch with the sizes that ran out"),
            (("--oom", "nowhere.log"), "`nowhere.log` does not exist"),
            (
                ("--oom", "gpt2"),
                "`gpt2` is a folder. Pass a text file with the message, or `--oom -`",
            ),
            (("--oom", "net.py"), "There is no out-of-memory error in this text"),
            (("--oom", "net.py", "--batch", "8x8"), "--batch needs a model"),
            (("gpt2", "--gpu", "T4"), "add --batch"),
            (("gpt2", "--batch", "4x8", "--gpu", "T4,L4"), "Pass --gpu once"),
        ],
    )
    def test_one_line_says_what_to_do(self, args, said, capsys):
        assert said in message_of(capsys, "explain", *args)

    def test_a_batch_that_the_model_rejects_is_3(self, capsys):
        arguments = ("explain", "net.py:Lit", "--batch", "float32[8,65],int64[8]")
        said = message_of(capsys, *arguments, "--no-remedies", status=3)
        assert "Check that --batch lists the tensors" in said
