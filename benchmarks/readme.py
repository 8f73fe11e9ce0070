"""Bring README and docs up to date with the result files: `make readme`."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import peak_picture, step_picture
from benchmarks.offloading._timeline import plot

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
IMAGES = ROOT / "docs" / "images"
PICTURES: dict[Path, Callable[[], str]] = {
    IMAGES / "peak_memory.svg": peak_picture.draw,
    IMAGES / "training_step.svg": step_picture.draw,
}
TIMELINE = IMAGES / "offloading_timeline.svg"
_PLACE = re.compile(
    r"(<!-- (benchmarks/results/[\w/]+\.md)(, first table|, code)? -->\n).*?(<!-- end -->)",
    re.DOTALL,
)
_TO_FIRST_TABLE = re.compile(r"\A.*?(?:^\|[^\n]*\n)+", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^```\n.*?^```\n", re.DOTALL | re.MULTILINE)


def fill(text: str) -> str:
    """Put the result files into a page.

    Args:
        text: A page with places such as ``<!-- benchmarks/results/demo_cpu.md --> <!-- end -->``,
            each comment on a line of its own; with ``md, first table`` what comes after that is
            left out, with ``md, code`` all but the first block of code.

    Returns:
        The page with what the files hold now between the comments.

    Raises:
        FileNotFoundError: If a file that is named is not there.
    """

    def table(match: re.Match[str]) -> str:
        found = (ROOT / match[2]).read_text(encoding="utf-8")
        if match[3] == ", code":  # on a page that has few lines
            return f"{match[1]}{_CODE.findall(found)[0]}{match[4]}"
        if match[3]:
            found = _TO_FIRST_TABLE.findall(found)[0]
        return f"{match[1]}\n{found}\n{match[4]}"

    return _PLACE.sub(table, text)


if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw(), encoding="utf-8")
    results = (ROOT / "benchmarks" / "results" / "offloading_cpu.json").read_text(encoding="utf-8")
    plot(json.loads(results)["timeline"], TIMELINE)
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
