"""`preset` of `MemSaveCallback`: its row in the table."""

from typing import Any

from lightning_memsave.callbacks.settings.setting import Arguments, Setting
from lightning_memsave.core.technique import Row
from lightning_memsave.techniques.micro_batching.technique import MicroBatching, size_of_batches
from lightning_memsave.techniques.registry import BARE, values_of

# The argument's default is "auto": whether it was written cannot be told.
_NOT_REPEATED = (
    '`micro_batch_size="auto"` is off, too, also where it is written: only `"halve"` repeats a '
    "batch that runs out of memory"
)


class PresetSetting(Setting):
    name = "preset"
    runs_in_stages = True

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.is_on, given = True, arguments["preset"]
        own = [n for n in values_of(given or BARE) if n not in arguments["from_preset"]]
        settings = {name: arguments[name] for name in arguments["from_preset"]}
        if MicroBatching.argument in settings:
            settings[MicroBatching.argument] = size_of_batches(arguments[MicroBatching.argument])
        on = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
        yielded = [name for name, why in arguments["from_preset"].items() if why]
        off = ", ".join(n for n, value in settings.items() if value is None and n not in yielded)
        beside = ", ".join(own)
        texts = {"": on, "off in this preset: ": off, "given beside it: ": beside}
        details = tuple(f"{prefix}{text}" for prefix, text in texts.items() if text)
        self._row = Row(self.name, repr(given), "on" if on else "off", details)
        if given is None:
            meaning = f'"auto" means the values of `preset={BARE!r}`'
            details = (f"{meaning}, without {off}" if off else meaning,)
            self._row = Row(self.name, "None", "unchanged", details)
        if given == "off":
            details = ("everything is off that is not given",)
            if "micro_batch_size" in arguments["from_preset"]:
                details += (_NOT_REPEATED,)
            self._row = Row(self.name, "'off'", "unchanged", details)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        self.rows = [self._row]
