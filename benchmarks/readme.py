"""Copy the tables of the result files to where README and docs show them: `make readme`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_PLACE = re.compile(r"(<!-- (benchmarks/results/\w+\.md) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """Put the result files into a page.

    Args:
        text: A page with places such as ``<!-- benchmarks/results/demo_cpu.md --> <!-- end -->``,
            each comment on a line of its own.

    Returns:
        The page with what the files hold now between the comments.

    Raises:
        FileNotFoundError: If a file that is named is not there.
    """

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{(ROOT / match[2]).read_text(encoding='utf-8')}\n{match[3]}"

    return _PLACE.sub(table, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
