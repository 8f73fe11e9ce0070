"""The arguments of `MemSaveCallback` are those of the registry."""

import inspect

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.settings.arguments import SETTINGS
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.registry import current_settings, entries


def test_signature_has_every_entry_and_its_details():
    known = inspect.signature(MemSaveCallback).parameters
    for entry in entries():
        assert known[entry.argument].default == "auto", entry.argument
        for name, off in entry.details.items():
            assert known[name].default == off, name


def test_settings_are_applied_in_the_order_of_the_registry():
    own = list(dict.fromkeys(cls.name for cls in SETTINGS))
    names = [entry.argument for entry in entries()]
    assert [name for name in own if name in names] == names


def test_plans_in_checkpoints_of_earlier_settings_are_read():
    old = {"optimizer": "8bit", "force_8bit": ["*"], "early_release": True, "offload": None}
    assert current_settings(old) == {
        "optimizer": LowBitOptimizer("8bit", force_8bit=("*",)),
        "offload": None,
    }
