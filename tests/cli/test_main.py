import subprocess
import sys
from pathlib import Path

import pytest

import lightning_memsave
from lightning_memsave.cli.main import COMMANDS, main


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_console_script_and_module_are_the_same_command():
    script = run(str(Path(sys.executable).with_name("memsave")), "--help")
    module = run(sys.executable, "-m", "lightning_memsave", "--help")
    assert script.returncode == module.returncode == 0, script.stderr
    assert script.stdout == module.stdout
    assert script.stdout.startswith("usage: memsave [-h]")


@pytest.mark.parametrize("command", ["predict", "explain", "compare", "convert"])
def test_help_loads_nothing_heavy(command):
    code = (
        "import sys; from lightning_memsave.cli.main import main\n"
        f"try: main(['{command}', '--help'])\n"
        "finally: assert not {'torch', 'lightning', 'rich', 'bitsandbytes'} & {*sys.modules}"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_status_of_the_process_says_what_happened():
    module = (sys.executable, "-m", "lightning_memsave")
    failed = run(*module, "convert", "missing.ckpt", "--to", "32bit")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("memsave convert: `missing.ckpt` does not exist. Give a file")


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lightning-memsave {lightning_memsave.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse_and_the_exit_statuses(name, capsys):
    from lightning_memsave.cli.main import _parser

    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    out = capsys.readouterr().out
    assert COMMANDS[name].SUMMARY in out
    assert f"examples:\n  memsave {name}" in out
    for line in COMMANDS[name].EXAMPLES.splitlines():
        words = line.partition("#")[0].partition(">")[0].replace("'", "").split()
        assert _parser().parse_args(words[1:]).command == name
    statuses = out.split("exit status:")[1]
    assert "0 done; 1 " in statuses
    assert ("3 the training step" in statuses) == (
        name in ("predict", "explain", "compare", "plan")
    )


def test_an_interruption_is_130(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_memsave.cli.env.run", interrupt)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == ""
