import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_memsave


def test_all_names_exist_and_are_sorted():
    assert lightning_memsave.__all__ == sorted(set(lightning_memsave.__all__))
    assert dir(lightning_memsave) == lightning_memsave.__all__


@pytest.mark.parametrize("name", lightning_memsave.__all__)
def test_each_public_name_is_documented(name):
    value = getattr(lightning_memsave, name)
    assert value.__name__ == name
    assert inspect.getdoc(value)
    if (
        inspect.isclass(value)
        and not issubclass(value, Exception)
        and "Enum" not in str(type(value))
    ):
        takes_arguments = len(inspect.signature(value).parameters) > 0
        assert not takes_arguments or "Args:" in inspect.getdoc(value)
        assert "Example:" in inspect.getdoc(value)


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'MemSave'"):
        _ = lightning_memsave.MemSave


@pytest.mark.slow
def test_importing_the_package_loads_nothing_heavy():
    """Lightning itself loads transformers, through torchmetrics; we load no more than it does."""
    heavy = "{'torch', 'lightning', 'bitsandbytes', 'transformers', 'pynvml'} & set(sys.modules)"
    code = (
        f"import sys, lightning_memsave; assert not {heavy}; "
        "import lightning.pytorch, pytorch_lightning; "
        f"before = {heavy}; "
        "lightning_memsave.MemSaveCallback(); lightning_memsave.GPUMemoryMonitor(); "
        f"assert {heavy} == before and 'bitsandbytes' not in before, before"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_imports_from_a_copy_without_metadata(tmp_path: Path) -> None:
    (tmp_path / "lightning_memsave").symlink_to(Path(lightning_memsave.__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import lightning_memsave; print(lightning_memsave.__version__)"
    )
    done = subprocess.run(  # -I and -S: no installed package is seen
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "0+unknown\n", done.stderr
