"""Take pictures of a page of predictions, light and dark, with an installed Chromium."""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image  # comes with matplotlib

_SCHEMES = {"dark": 0, "light": 1}  # Blink's numbers for `prefers-color-scheme`


def take_pictures(page: Path, folder: Path, *, width: int = 1200, height: int = 1420) -> list[Path]:
    """Show a page in a browser without a window and keep what it shows.

    Args:
        page: An HTML file that `write_page` wrote.
        folder: Where the pictures go, as ``NAME-light.png`` and ``NAME-dark.png``.
        width: Of the window, in CSS pixels; pictures have twice as many.
        height: Of the window: what is below is not in the picture.

    Returns:
        Paths of the pictures.

    Raises:
        FileNotFoundError: If there is no Chromium or no such page.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("No Chromium is installed. Run `apt-get install chromium`.")
    folder.mkdir(parents=True, exist_ok=True)  # Chromium writes nothing, and says nothing
    pictures = []
    for scheme, number in _SCHEMES.items():
        picture = folder.resolve() / f"{page.stem}-{scheme}.png"
        with tempfile.TemporaryDirectory() as profile:
            command = [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--force-device-scale-factor=2",
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={number}",
                f"--window-size={width},{height}",
                f"--screenshot={picture}",
                page.resolve(strict=True).as_uri(),
            ]
            subprocess.run(command, check=True, timeout=120, capture_output=True)
        with Image.open(picture) as image:
            few_colors = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        few_colors.save(picture, optimize=True)  # a third of the bytes, and looks the same
        pictures.append(picture)
    return pictures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for path in take_pictures(arguments.page, arguments.folder):
        print(path)
