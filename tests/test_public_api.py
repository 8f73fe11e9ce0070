import inspect
import subprocess
import sys

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
