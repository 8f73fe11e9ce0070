"""Files that are replaced when they are complete, on real and full file systems."""

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_memsave.core.files import replacing, write_file
from tests.helpers import full_disk


def test_the_older_file_is_there_until_the_new_one_is_complete():
    path = Path("x.json")
    path.write_text("older")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "older"
    assert path.read_text() == "new"
    assert [p.name for p in Path.cwd().iterdir()] == ["x.json"]


@pytest.mark.parametrize("older", ["older", None])
def test_a_full_disk_keeps_the_older_file(older):
    path = Path("x.json")
    if older:
        path.write_text(older)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_file(".", "x.json", "x" * 100_000)
    assert [p.read_text() for p in Path.cwd().iterdir()] == ([older] if older else [])


def test_an_exception_in_the_middle_leaves_nothing():
    with suppress(ZeroDivisionError), replacing("x.json") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert list(Path.cwd().iterdir()) == []


def test_permissions_stay_or_are_those_of_any_new_file():
    Path("older").write_text("")
    Path("older").chmod(0o604)
    Path("plain").write_text("")
    for name in ("older", "new"):
        write_file(".", name, "text")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in Path.cwd().iterdir()}
    assert modes == {"older": 0o604, "plain": modes["plain"], "new": modes["plain"]}


def test_a_link_stays_a_link_and_a_device_a_device():
    Path("real").write_text("older")
    Path("link").symlink_to("real")
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "pipe"):
        with replacing(name) as file:
            file.write(b"new")
    assert (Path("link").is_symlink(), Path("real").read_text()) == (True, "new")
    assert (Path("pipe").is_fifo(), os.read(reader, 10)) == (True, b"new")
    os.close(reader)


def test_folders_are_made():
    write_file("some/where", "x.bin", b"\x00")
    assert Path("some/where/x.bin").read_bytes() == b"\x00"
