"""Python in a process of its own, on another virtual GPU."""

import json
import os
import subprocess
import sys
import textwrap
from typing import Any


def run_python(code: str, card: str = "rtx3060", timeout_s: float = 300, **variables: str) -> Any:
    """Run code on a card, with `VGPU_MEMORY="2GiB"` and so on; give what its last line prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"VGPU": card} | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
