"""A fit that nobody sees or hears of, inside one that goes on."""

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
_LOGGERS = (
    *("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"),
    "lightning",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's messages and all warnings; what was said once is not said for good.

    Lightning remembers which warnings it has given. What it remembers afterwards is what it
    remembered before, so that the next fit says what it has to say.
    """
    levels = [(logger, logger.level) for logger in map(logging.getLogger, _LOGGERS)]
    caches = [(cache, set(cache)) for cache in _warning_caches()]
    try:
        for logger, _ in levels:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
        for cache, said in caches:
            cache.intersection_update(said)


def silent_logger(package: ModuleType) -> Any:
    """Make a logger that takes everything and keeps nothing, for modules that expect to have one.

    Args:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.

    Returns:
        A logger of that package.
    """
    return importlib.import_module(f"{package.__name__}.loggers.logger").DummyLogger()


def _warning_caches() -> list[set[str]]:
    caches: dict[int, set[str]] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _ROOTS:
            continue
        for value in [*vars(module).values()]:
            holders = [value, vars(value).get("warning_cache") if isinstance(value, type) else None]
            for holder in holders:
                if type(holder).__name__ == "WarningCache":
                    caches[id(holder)] = holder
    return list(caches.values())
