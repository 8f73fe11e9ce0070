"""Requirements of pyproject.toml for other versions than those of constraints.txt.

``python .ci/versions.py lowest`` and ``newest`` print them; ``torch-bound VERSION`` lets users have
a version of torch that the tests have passed with.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
_TORCH = re.compile(r'(?<="torch>=)([\d.]+),<[\d.]+(?=")')


def requirements(which: str) -> list[str]:
    """Give the lowest versions that are claimed, or all packages without upper bounds."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    found: list[str] = project["dependencies"]
    extras = [one for extra in project["optional-dependencies"].values() for one in extra]
    if which == "lowest":  # of both packages of Lightning, as the first installs the second
        found += [one for one in extras if one.startswith("pytorch-lightning")]
        return [one.replace(">=", "==") for one in found]
    others = [one for one in extras if not one.startswith(project["name"])]
    return [re.sub(r",<[\d.]+", "", one) for one in found + others]


def raise_torch_bound(version: str) -> None:
    """Write the release after ``version`` as torch's upper bound, if that is higher."""
    text = PYPROJECT.read_text()
    major, minor = (int(number) for number in version.split(".")[:2])
    (bound,) = re.findall(r'"torch>=[\d.]+,<([\d.]+)"', text)
    if (major, minor + 1) > tuple(map(int, bound.split("."))):
        PYPROJECT.write_text(_TORCH.sub(rf"\1,<{major}.{minor + 1}", text))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "torch-bound":
        raise_torch_bound(*arguments)
    else:
        sys.stdout.write("\n".join([*requirements(command), ""]))
