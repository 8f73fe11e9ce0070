"""Each script in examples/ runs, as a user starts it."""

import json
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"

# What runs in this process is to be what a user would see.


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "100",
            # Threads of several tests at once would wait for each other.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        },
    )


@pytest.fixture
def verses(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _verses

    yield _verses
    sys.modules.pop("_verses", None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_a_user")
def test_demo_saves_half(tmp_path, monkeypatch, capsys):
    """One pair of fits to time, and no fits with a part of the settings."""
    import demo

    monkeypatch.setattr(demo, "NUM_PAIRS", 1)
    monkeypatch.setattr(demo, "ALONE", {})
    results = tmp_path / "results.json"
    sizes = ["--steps", "2", "--batch-size", "7", "--num-validation", "6"]

    assert demo.main([*sizes, "--output", str(tmp_path), "--results", str(results)]) == 0

    printed = capsys.readouterr().out
    assert printed.count("holds:") == 3
    for row in ("activation", "optimizer state", "peak", "time of a step", "validation accuracy"):
        assert re.search(rf"^\s*{row}\s", printed, re.MULTILINE), row
    plain, saving = json.loads(results.read_text())["runs"]
    assert saving["peak_bytes"] <= plain["peak_bytes"] / 2
    assert saving["time_ratio"] > 0.0
    assert sum(plain["by_category"].values()) == plain["peak_bytes"]


def test_demo_says_when_a_claim_does_not_hold(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _table

    plain = _table.Run("without memsave", 100, {}, accuracy=0.70)
    too_large = _table.Run("one line added", 51, {}, accuracy=0.70)
    too_bad = _table.Run("one line added", 40, {}, accuracy=0.67)
    good = _table.Run("one line added", 40, {}, accuracy=0.69)

    assert not _table.judge([plain, too_large], is_same=True)
    assert not _table.judge([plain, too_bad], is_same=True)
    assert not _table.judge([plain, good], is_same=False)
    assert capsys.readouterr().out.count("FAILS:") == 3
    assert _table.judge([plain, good], is_same=True)


def test_the_project_in_the_demo_does_not_know_memsave():
    source = (EXAMPLES / "demo.py").read_text()
    project = source.partition("# --- The project")[2].partition("# --- The comparison")[0]

    assert "LightningModule" in project
    assert not re.search("memsave|monitor|checkpoint|8bit", project, re.IGNORECASE)


def test_no_verse_of_a_held_out_chapter_is_trained_on(verses):
    train, validation = verses.load_passages(2400, 480)
    text_of: dict[str, str] = {}
    for verse in verses._read_verses():
        chapter = f"{verse['book']} {verse['chapter']}"
        text_of[chapter] = f"{text_of.get(chapter, '')} {verse['text']}"

    for passage in train + validation:
        assert passage.text in " ".join(text_of[passage.chapter].split())
    held_out = {passage.chapter for passage in validation}
    assert len(held_out) > 50
    assert not held_out & {passage.chapter for passage in train}


def test_passages_are_balanced_and_the_same_each_time(verses):
    train, validation = verses.load_passages(100, 60)

    assert (train, validation) == verses.load_passages(100, 60)
    assert train != verses.load_passages(100, 60, seed=1)[0]
    counts = [sum(p.group == group for p in train) for group in range(len(verses.GROUPS))]
    assert (sum(counts), min(counts), max(counts)) == (100, 16, 17)
    assert {p.group for p in validation} == set(range(len(verses.GROUPS)))


def _run_small(*command: str) -> str:
    """Run an example to its end, and give what it has printed."""
    done = _run(*command, "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not predicted" not in done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def as_a_user(monkeypatch, caplog):
    """Let examples run in this process, which has imported all that takes a new one seconds."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "transformers"):
        caplog.set_level(logging.getLogger(name).level, name)  # which the test ends with, too
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("COLUMNS", "100")
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # `seed_everything` leaves them
        monkeypatch.setenv(variable, "0")
    # A loaded machine is no reason for a prediction not to be there.
    monkeypatch.setattr("lightning_memsave.callbacks.settings.arguments.TIME_LIMIT_S", 600.0)
    modules = {*sys.modules}
    yield
    for name in {*sys.modules} - modules:
        if getattr(sys.modules[name], "__file__", None) == str(EXAMPLES / f"{name}.py"):
            del sys.modules[name]


@pytest.fixture
def run_here(as_a_user, monkeypatch, capsys, caplog):
    """Give a function that runs an example, and gives what it has printed."""

    def run(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with caplog.at_level("INFO"):
            try:
                runpy.run_path(str(EXAMPLES / script), run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
        printed: str = capsys.readouterr().out
        assert "not predicted" not in printed + caplog.text
        return printed

    return run


def _number_after(text: str, printed: str) -> float:
    return float(printed.partition(text)[2].split()[0])


@pytest.mark.slow
def test_plain_callback():
    printed = _run_small("plain_callback.py")

    assert "activation_checkpointing='all': on (bitwise). 4 of 4 blocks recomputed" in printed
    assert "`AdamW` stays 32-bit: 8 bits would save 1.12 MiB; less than 20.00 MiB" in printed
    assert 1.0 < _number_after("loss after 4 steps: ", printed) < 3.0
    measured = json.loads(Path("memsave_report.json").read_text())["measured"]
    assert measured["num_steps"] == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_subclass(run_here):
    printed = run_here("subclass.py", "--small")

    assert "2 of 2 blocks recomputed" in printed
    assert "micro_batch_size=8: on" in printed
    assert 1.0 < _number_after("bits per byte of held-out text: ", printed) < 8.5
    assert "the same weights: True" in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_command_line_with_yaml(run_here):
    small = ("--trainer.max_steps=2", "--model.num_layers=2", "--data.length=32")
    config = str(EXAMPLES / "cli" / "config.yaml")
    printed = run_here("cli/train.py", "fit", "--config", config, *small)

    assert "micro_batch_size=4: on" in printed  # of the file, as the next ones
    assert "activation_checkpointing='every:2': on (bitwise). 1 of 2 blocks" in printed
    assert "AdamW -> 8-bit AdamW" in printed
    report = json.loads(Path("memsave_report.json").read_text())
    assert report["measured"]["num_steps"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_masked_language_model(run_here):
    printed = run_here("masked_lm.py", "--small")

    assert "2 of 2 blocks recomputed: 2 x BertLayer" in printed
    assert "micro_batch_size=4: on" in printed
    assert 1.0 < _number_after("perplexity of held-out chapters: ", printed) < 1000.0
    assert 1.0 < _number_after("perplexity of word frequencies: ", printed) < 500.0
    assert re.search(r"there was light \. -> .+, .+, .+, .+, .+", printed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_offloading(run_here):
    printed = run_here("offloading.py", "--small")
    assert "low_precision_weights='split': on" in printed
    assert "updated in backward, gradients 1.28 MiB -> 512.00 KiB at a time on the host" in printed
    assert 7.0 < _number_after("loss of the last batch: ", printed) < 8.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_llama_8b_on_a_desktop(run_here):
    printed = run_here("llama_8b_desktop.py", "--small")
    assert "30 weights, their gradients and optimizer state on the host" in printed
    assert 6.0 < _number_after("losses of 2 steps: ", printed.replace(",", "")) < 8.0
    assert "the same losses with the preset, bit for bit: True" in printed
    assert "weights, bit for bit: True" in printed


@pytest.mark.slow
@pytest.mark.exhaustive
def test_resume_after_a_kill():
    printed = _run_small("resume.py")

    assert "not interrupted: exit status 0" in printed
    assert "killed at step 6: exit status -9" in printed  # SIGKILL
    assert "last checkpoint: step 4" in printed
    assert "resumed: exit status 0" in printed
    for what in ("global_step", "state_dict", "optimizer_states"):
        assert f"{what}: the same" in printed


@pytest.mark.slow
def test_resume_sees_a_difference(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import resume

    one: dict[str, object] = {"state": [torch.ones(2), {"step": 1}]}
    assert resume.is_same(one, {"state": [torch.ones(2), {"step": 1}]})
    assert not resume.is_same(one, {"state": [torch.tensor([1.0, 2.0]), {"step": 1}]})
    assert not resume.is_same(one, {"state": [torch.ones(2), {"step": 2}]})
    assert not resume.is_same(one, {"state": [torch.ones(2)]})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_optimizer_formats(run_here):
    printed = run_here("optimizer_formats.py", "--small")

    assert "AdamW: 16 of 52 tensors were 8-bit, optimizer state 436.08 KiB -> 1.54 MiB" in printed
    assert "AdamW -> 8-bit AdamW: 16 of 52 tensors" in printed
    assert printed.count("same True") == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes():
    printed = _run_small("ddp.py")

    assert printed.count("MemSaveCallback:") == 1  # the table is shown by one of them
    assert "4 steps in 2 processes" in printed
    assert "the same weights in both: True" in printed


@pytest.mark.slow
@pytest.mark.exhaustive
def test_shards_in_two_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = _run("fsdp2.py", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout

    assert "optimizer='8bit': on" in printed
    assert "4 steps in 2 processes" in printed
    assert "the checkpoint loads in one process, with exp_avg, exp_avg_sq, step" in printed


@pytest.mark.slow
@pytest.mark.exhaustive
def test_splits_layers_in_two_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = _run("tensor_parallel.py", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "optimizer='8bit': on" in done.stdout
    assert "4 steps in 2 processes" in done.stdout
    assert "the checkpoint loads in one process" in done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_stages_of_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = _run("pipeline.py", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 steps in 2 stages" in done.stdout
    assert 1.0 < _number_after("loss of the last batch: ", done.stdout) < 4.0
    assert "the checkpoint loads in one process" in done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_share_the_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = _run("two_gpus_of_a_desktop.py", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout

    assert "2 processes share weights and optimizer state" in printed
    assert "4 steps in 2 processes" in printed
    assert "largest difference to DDP without offloading: 0.0" in printed
    assert "the checkpoint has the state of 52" in printed


# All but the lines with `%`: what they install is there.
RUN_NOTEBOOK = """
import json, sys, types
sys.modules["IPython.display"] = display = types.ModuleType("IPython.display")
display.HTML = lambda text: print("shown:", text[:15])
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        lines = (line for line in cell["source"] if not line.startswith("%"))
        exec(compile("".join(lines), cell["id"], "exec"), names)
"""


@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom(monkeypatch):
    notebook = EXAMPLES / "colab.ipynb"
    Path("run_notebook.py").write_text(RUN_NOTEBOOK)
    monkeypatch.setenv("MPLBACKEND", "agg")

    done = _run(str(Path.cwd() / "run_notebook.py"), str(notebook))

    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert "shown: <iframe srcdoc=" in printed
    assert "peak_memory=" in printed
    assert "steps with those of the first session: 6" in printed
    assert "the same weights, bit for bit: True" in printed
    peaks = [int(n.replace(",", "")) for n in re.findall(r"recomputed: .*peak (\S+) ", printed)]
    assert len(peaks) == 3
    assert peaks == sorted(peaks, reverse=True)
    for cell in json.loads(notebook.read_text())["cells"]:
        assert not cell.get("outputs")  # they would grow old


def test_every_example_is_in_the_list():
    page = (EXAMPLES / "README.md").read_text()

    for path in EXAMPLES.rglob("*"):
        if path.suffix in {".py", ".yaml", ".ipynb"} and "checkpoint" not in str(path):
            assert f"`{path.relative_to(EXAMPLES)}`" in page, path
