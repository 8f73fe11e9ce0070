"""What README and docs show runs, and what they name exists."""

import re
from pathlib import Path

import pytest

import lightning_memsave
from benchmarks.readme import fill

ROOT = Path(lightning_memsave.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page):
    return str(page.relative_to(ROOT))


BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


# The second case on this page takes a minute: in `make test` only the first.
SECOND_CASE = "\n<!-- second case"
LONG = ROOT / "docs" / "where_did_my_memory_go.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the pages show what users see; warnings have own tests
@pytest.mark.parametrize(
    ("page", "end"),
    [
        *(pytest.param(page, SECOND_CASE, id=name_of(page)) for page in PAGES),
        pytest.param(LONG, None, id=f"whole {name_of(LONG)}", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.predicts
def test_code_on_the_page_runs(page, end, capsys, caplog, monkeypatch):
    # A loaded machine is no reason for a prediction not to be there.
    monkeypatch.setattr("lightning_memsave.callbacks.arguments.TIME_LIMIT_S", 600.0)
    text = page.read_text()
    text = text.partition(end)[0] if end else text
    names: dict[str, object] = {}
    caplog.set_level("INFO")
    num_shown = 0
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match[1], str(page), "exec")
        exec(code, names)
        printed = capsys.readouterr().out
        if page == LONG and (shown := SHOWN.match(text, match.end())):
            assert printed == shown[1]
            num_shown += 1
        # Each fit has its prediction: it prints, and logs, why there is none.
        said = printed + caplog.text
        reasons = [text for text in said.splitlines() if "not predicted" in text]
        assert reasons == [], f"{name_of(page)}, line {line}"
    assert num_shown == (0 if page != LONG else 2 if end else 4)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_names_on_the_page_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"
    for path in re.findall(r"`((?:benchmarks|examples|docs|tests)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"
    for name in re.findall(r"`lightning_memsave\.(\w+)`", text):
        assert name in lightning_memsave.__all__, f"{name_of(page)} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_on_the_page_are_those_of_the_result_files(page):
    text = page.read_text()
    assert text == fill(text), "run `make readme`"
