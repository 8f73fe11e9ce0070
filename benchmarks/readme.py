"""Bring README and docs up to date with the result files: `make readme`."""

import json
import re
from pathlib import Path

from benchmarks.offloading._timeline import plot
from benchmarks.peak_picture import draw

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PICTURE = ROOT / "docs" / "images" / "peak_memory.svg"
TIMELINE = ROOT / "docs" / "images" / "offloading_timeline.svg"
_PLACE = re.compile(
    r"(<!-- (benchmarks/results/[\w/]+\.md)(, first table)? -->\n).*?(<!-- end -->)", re.DOTALL
)
_TO_FIRST_TABLE = re.compile(r"\A.*?(?:^\|[^\n]*\n)+", re.DOTALL | re.MULTILINE)


def fill(text: str) -> str:
    """Put the result files into a page.

    Args:
        text: A page with places such as ``<!-- benchmarks/results/demo_cpu.md --> <!-- end -->``,
            each comment on a line of its own; with ``md, first table`` what comes after that is
            left out.

    Returns:
        The page with what the files hold now between the comments.

    Raises:
        FileNotFoundError: If a file that is named is not there.
    """

    def table(match: re.Match[str]) -> str:
        found = (ROOT / match[2]).read_text(encoding="utf-8")
        if match[3]:
            found = _TO_FIRST_TABLE.findall(found)[0]
        return f"{match[1]}\n{found}\n{match[4]}"

    return _PLACE.sub(table, text)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    results = (ROOT / "benchmarks" / "results" / "offloading_cpu.json").read_text(encoding="utf-8")
    plot(json.loads(results)["timeline"], TIMELINE)
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
