"""``python -m lightning_memsave`` is the command ``memsave``."""

import sys

from lightning_memsave.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
