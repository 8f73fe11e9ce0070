"""What README and docs show runs, and what they name exists."""

import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_memsave
from benchmarks import evidence
from benchmarks.readme import PICTURES, fill
from lightning_memsave import MemSaveCallback, predict_memory
from lightning_memsave.cli.main import main
from lightning_memsave.techniques.registry import entries
from lightning_memsave.units import GIB
from tests.helpers import return_free_memory

ROOT = Path(lightning_memsave.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page):
    return str(page.relative_to(ROOT))


BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the pages show what users see; warnings have own tests
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_on_the_page_runs_and_prints_what_is_shown(page, capsys, caplog, monkeypatch):
    # A loaded machine is no reason for a prediction not to be there.
    monkeypatch.setattr("lightning_memsave.callbacks.settings.arguments.TIME_LIMIT_S", 600.0)
    text = page.read_text()
    return_free_memory()  # the monitor shows how a process grows
    names: dict[str, object] = {}
    caplog.set_level("INFO")
    num_shown = 0
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match[1], str(page), "exec")
        exec(code, names)
        printed = capsys.readouterr().out
        if shown := SHOWN.match(text, match.end()):
            assert printed == shown[1]
            num_shown += 1
        # Each fit has its prediction: it prints, and logs, why there is none.
        said = printed + caplog.text
        reasons = [text for text in said.splitlines() if "not predicted" in text]
        assert reasons == [], f"{name_of(page)}, line {line}"
    assert num_shown == text.count("\n```text\n"), "output that follows no code is not compared"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_names_on_the_page_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"
    for path in re.findall(r"`((?:benchmarks|examples|docs|tests)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"
    for name in re.findall(r"`lightning_memsave\.(\w+)`", text):
        assert name in lightning_memsave.__all__, f"{name_of(page)} names {name}"


def links_that_lead_nowhere(text):
    """Of the absolute links to this project: pyproject.toml says where it is."""
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
    for link in re.findall(r"https?://github[^\s)\"'>`]*lightning-memsave[^\s)\"'>`#]*", text):
        path = re.match(rf"{home}/(?:blob|raw|tree)/main/(.+)", link)
        is_page = re.fullmatch(rf"{home}(\.git|/issues|/security/advisories/new|/releases)?", link)
        if not (is_page or (path and (ROOT / path[1]).exists())):
            yield link


def test_absolute_links_to_the_project_agree_with_pyproject_and_exist():
    tracked = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob(".github/**/*.*"), *ROOT.glob("*.toml")]
    tracked += [ROOT / "mkdocs.yml", ROOT / "CITATION.cff"]
    assert {name_of(page): [*links_that_lead_nowhere(page.read_text())] for page in tracked} == (
        {name_of(page): [] for page in tracked}
    )
    assert [*re.findall(r"\]\((?!https://)", (ROOT / "README.md").read_text())] == []  # on an index
    wrong = "https://github.com/lightning-memsave/lightning-memsave/blob/main/docs/gone.md"
    assert [*links_that_lead_nowhere(f"[gone]({wrong}#below)")] == [wrong]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_on_the_page_are_those_of_the_result_files(page):
    text = page.read_text()
    assert text == fill(text), "run `make readme`"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lists_follow_an_empty_line(page):
    # mkdocs makes one paragraph of both without it, unlike GitHub.
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(?!- |[#\s]).+\n- .*", text, re.MULTILINE) == []


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_pictures_are_those_of_the_result_files(picture):
    assert picture.read_text() == PICTURES[picture](), "run `make readme`"


RESULT = re.compile(r"\]\((?:\.\./)?(benchmarks/results/[\w/]+\.md)\)")
# With a fraction, or with thousands: sizes of batches are no figures.
FIGURE = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+)(?!\d| tokens)")
OF_OTHERS = ROOT / "docs" / "comparison.md"  # figures of other libraries, beside ours


def figures_that_are_not_in_their_files(text, figure=FIGURE):
    """Of each row of a table that links to result files, and of each other block that does."""
    for block in text.split("\n\n"):
        rows = block.splitlines()
        has_own_links = block.startswith("|") and any(map(RESULT.search, rows[1:]))
        for passage in rows if has_own_links else [block]:
            files = RESULT.findall(passage)
            found = " ".join((ROOT / file).read_text() for file in files)
            shown = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", passage)
            known = set(figure.findall(found))
            yield from (number for number in figure.findall(shown) if files and number not in known)


@pytest.mark.parametrize("page", [page for page in PAGES if page != OF_OTHERS], ids=name_of)
def test_figures_beside_a_link_are_in_the_result_file(page):
    assert [*figures_that_are_not_in_their_files(page.read_text())] == []


def test_all_numbers_of_the_evidence_are_in_the_result_files():
    text = (ROOT / "docs" / "evidence.md").read_text()
    rows = "\n\n".join(
        line.rpartition(" | ")[2] for line in text.splitlines() if line.startswith("| ")
    )
    numbers = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
    assert [*figures_that_are_not_in_their_files(rows, numbers)] == []
    wrong = "1.23 ([demo](../benchmarks/results/demo_cpu.md))"
    assert [*figures_that_are_not_in_their_files(wrong)] == ["1.23"]


class TestExactness:
    """The table of how exact training stays, on the evidence page."""

    TEXT = evidence.make_text()
    ROWS: ClassVar = {
        name: dict(zip(("fits", *evidence.COLUMNS), map(int, counts), strict=True))
        for name, *counts in re.findall(
            r"^\| ([^|]+?) +\|" + r" +(\d+) \|" * 6 + "$", TEXT, re.MULTILINE
        )
    }

    def test_is_that_of_the_result_files(self):
        written = (ROOT / "benchmarks/results/evidence.md").read_text()
        assert written == self.TEXT, "run `python -m benchmarks.evidence`"

    def test_nothing_is_wrong_or_lost(self):
        bad = {name: row["wrong or lost"] for name, row in self.ROWS.items()}
        # Rows without any fit in the result file are left out.
        assert bad == dict.fromkeys((name for name, *_ in evidence.ROWS if name in bad), 0)
        assert len(bad) >= 14
        assert self.ROWS["out of memory"]["fits"] == 1075
        assert self.ROWS["killed, resumed"]["bitwise"] == 109


def test_readme_and_docs_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
    assert len(PAGES) <= 1 + 16
    assert sum(len(page.read_text().split()) for page in PAGES) <= 22_000


def test_the_gpu_in_the_readme_is_that_of_the_result_file():
    rows = (ROOT / "benchmarks/results/gpu_nvidia_h200/fits.md").read_text()

    def of(fit):
        cells = re.search(rf"^\| {fit} +\|(.*)$", rows, re.MULTILINE)[1].split("|")
        return [float(cell.strip(" ").replace(",", "")) for cell in (cells[0], cells[2])]

    (plain_ms, plain_mib), (ms, mib) = of("gpt2_xl plain"), of("gpt2_xl single_gpu")
    shown = f"{mib / 1024:.1f} GiB instead of {plain_mib / 1024:.0f}, at {ms / plain_ms:.2f} times"
    assert shown in (ROOT / "README.md").read_text().replace("\n  ", " ")


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference.md").read_text()
    assert sorted(re.findall(r"^::: lightning_memsave\.(\w+)$", page, re.MULTILINE)) == (
        lightning_memsave.__all__
    )


def rows_below(page, heading, next_heading="\n## "):
    """Cells of each row of the tables in a section, the first without its link and quotes."""
    section = page.partition(f"\n## {heading}\n")[2].partition(next_heading)[0]
    for line in re.findall(r"^\| \[?`.*$", section, re.MULTILINE):
        first, *others = [cell.strip() for cell in line.strip("|").split(" | ")]
        yield re.search(r"`(.+?)`", first)[1], others


class TestArguments:
    PAGE = (ROOT / "docs" / "reference.md").read_text()
    PARAMETERS = inspect.signature(MemSaveCallback).parameters
    ENTRIES: ClassVar = {entry.argument: entry for entry in entries()}

    def test_each_is_in_one_table(self):
        in_presets = dict(rows_below(self.PAGE, "Settings of a preset"))
        others = dict(rows_below(self.PAGE, "All others"))
        assert in_presets.keys() == self.ENTRIES.keys()
        assert {*in_presets, *others} == {*self.PARAMETERS} - {"others"}  # those of a technique
        assert not in_presets.keys() & others.keys()

    @pytest.mark.parametrize(
        ("column", "preset"), [*enumerate(["classic", "bitwise", "single_gpu", "offload"])]
    )
    def test_values_are_those_of_the_presets(self, column, preset):
        for name, cells in rows_below(self.PAGE, "Settings of a preset"):
            value, cell = getattr(self.ENTRIES[name], preset), cells[column]
            if value == "auto":
                assert cell != "off", name
            else:
                shown = json.dumps(value) if isinstance(value, str) else repr(value)
                assert cell == ("off" if value is None else f"`{shown}`"), name

    def test_defaults_are_those_of_the_signature(self):
        for name, (default, *_) in rows_below(self.PAGE, "All others"):
            assert default.strip("`").replace('"', "'") == repr(self.PARAMETERS[name].default), name


@pytest.fixture(scope="module")
def prediction():
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    return predict_memory(torch.nn.Sequential(*layers), torch.ones(4, 8), gpu="T4").to_dict()


class TestJson:
    PAGE = (ROOT / "docs" / "reference.md").read_text()
    # Their keys are names, or have a table of their own.
    NAMES = ("settings", "versions", "ineffective", "by_category", "by_phase")
    # They have the keys of another one.
    LIKE_OTHERS = ("runner_up", "frontier", "gpus")

    def found(self, value, prefix=""):
        """All keys, with those that they are in."""
        if isinstance(value, list):
            return set().union(*(self.found(item, f"{prefix}[]") for item in value))
        keys = set()
        if isinstance(value, dict) and not prefix.endswith(self.NAMES):
            for name, item in value.items():
                key = f"{prefix}.{name}".removeprefix(".")
                keys |= {key} | self.found(item, key)
        return keys

    def documented(self, heading):
        keys = {key for key, _ in rows_below(self.PAGE, heading)}
        return keys | {re.sub(r"(\[\])?\.\w+$", "", key) for key in keys if "." in key}

    def test_report(self, prediction):
        trainer = Trainer(max_steps=2, callbacks=[MemSaveCallback()], logger=False)
        trainer.fit(BoringModel())
        report = json.loads(Path("memsave_report.json").read_text())
        assert report["changes"]
        assert report["refusals"]
        predicted = report.pop("predicted")
        assert predicted.keys() == {"error", *prediction}
        report["predicted"] = {"error": predicted["error"]}
        assert self.found(report) == self.documented("memsave_report.json")

    def test_prediction(self, prediction):
        assert self.found(prediction) == self.documented("A prediction")

    def test_categories(self, prediction):
        assert list(prediction["by_category"]) == [
            key for key, _ in rows_below(self.PAGE, "Categories")
        ]

    @pytest.mark.slow
    def test_memsave_predict(self, prediction, capsys):
        batch = [
            "--batch",
            "float32[4,32]",
            "--gpu",
            "T4",
            "--variant",
            "optimizer_in_backward=true",
        ]
        model = "lightning.pytorch.demos.boring_classes:BoringModel"
        assert main(["predict", model, *batch, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        (variant,) = printed["variants"]
        assert variant.keys() == {"name", "gpus", *prediction}
        more = {key: value for key, value in printed.items() if key not in prediction}
        assert self.found({**more, "variants": []}) == self.documented("memsave predict --json")

    def test_memsave_doctor(self, capsys, monkeypatch):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        model = "lightning.pytorch.demos.boring_classes:BoringModel"
        assert main(["doctor", model, "--json"]) == 1
        printed = json.loads(capsys.readouterr().out)
        assert self.found(printed) == self.documented("memsave doctor --json")

    @pytest.mark.slow
    def test_memsave_plan(self, capsys):
        model = "lightning.pytorch.demos.boring_classes:BoringModel"
        options = ["--gpu", "T4", "--exactness", "bitwise", "--json"]
        assert main(["plan", model, "--batch", "float32[4,32]", *options]) == 0
        printed = json.loads(capsys.readouterr().out)
        keys = list(printed)
        of_a_gpu = keys[keys.index("unchanged_bytes") : keys.index("smallest") + 1]
        [gpu] = printed["gpus"]
        assert list(gpu) == ["name", "total_bytes", "strategy", "world_size", *of_a_gpu]
        assert all(plan.keys() == printed["plan"].keys() for plan in printed["frontier"])
        top = {**printed, **dict.fromkeys(self.LIKE_OTHERS)}
        assert self.found(top) == self.documented("memsave plan --json")


def test_the_plan_in_the_readme_is_that_of_the_benchmark():
    found = json.loads((ROOT / "benchmarks" / "results" / "plan_host.json").read_text())
    case = "GPT-2 XL, 8 x 1024, RTX-3060-12GB, all, approximate, 16GiB on the host"
    plan = found["cases"][case]["plan"]
    on_host = f"{plan['host_bytes'] / GIB:.1f} GiB on the host"
    needed = f"{plan['device_bytes'] / GIB:.1f} GiB of an RTX 3060 and {on_host}"
    needed += f", at {plan['time_ratio']:.2f} times"
    assert f"to need {needed} the time" in (ROOT / "README.md").read_text().replace("\n", " ")
