"""Hook of mkdocs: result files that pages link to, outside of docs/, are pages of the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

_LINK = re.compile(r"\]\(\.\./(benchmarks/results/[\w/]+\.md)(?=[)#])")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add each result file that a page links to, with its path as the title."""
    root = Path(config.docs_dir).parent
    linked = {
        path for page in files.documentation_pages() for path in _LINK.findall(page.content_string)
    }
    for path in sorted(linked):
        text = (root / path).read_text(encoding="utf-8")
        files.append(
            File.generated(
                config, path, content=f"# {path}\n\n{text}", inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links of pages lead there: in the repository they begin with `../`."""
    return _LINK.sub(r"](\1", markdown)
