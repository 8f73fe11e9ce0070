"""The arguments of `MemSaveCallback` are those of the registry."""

import inspect

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.techniques.registry import entries


def test_signature_has_every_entry_and_its_details():
    known = inspect.signature(MemSaveCallback).parameters
    for entry in entries():
        assert known[entry.argument].default == "auto", entry.argument
        for name, off in entry.details.items():
            assert known[name].default == off, name
