"""Hyper-parameters that load with ``weights_only=True``."""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, cast


class PlainHyperparameters:
    """Keeps plain values in the place of arguments that are none, in front of a LightningModule."""

    _plain: dict[str, Any]

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of a subclass; those that are ours stay saved as plain values.

        Args:
            args: As for any LightningModule.
            ignore: As for any LightningModule.
            frame: As for any LightningModule.
            logger: As for any LightningModule.
        """
        ignored = [ignore] if isinstance(ignore, str) else [*(ignore or ())]
        theirs = [a for a in args if not isinstance(a, str) or a not in self._plain]
        if theirs or not args:
            save = cast(Any, super()).save_hyperparameters
            frame = frame or _caller()
            save(*theirs, ignore=[*ignored, *self._plain], frame=frame, logger=logger)
        self._save_plain({n: v for n, v in self._plain.items() if n not in ignored}, logger)

    def _save_plain(self, plain: dict[str, Any], logger: bool = True) -> None:
        self._plain = plain
        # Lightning compares the dictionary with all arguments above the frame: there are none.
        frame = cast(types.FrameType, inspect.currentframe())
        while frame.f_back is not None:
            frame = frame.f_back
        cast(Any, super()).save_hyperparameters(plain, frame=frame, logger=logger)


def _caller() -> types.FrameType | None:
    of_caller = cast(types.FrameType, inspect.currentframe()).f_back
    return cast(types.FrameType, of_caller).f_back


def only_plain(memsave: Mapping[str, Any] | str | None) -> Any:
    """Leave out what cannot be loaded with ``weights_only=True``, such as technique objects.

    Args:
        memsave: Arguments of `MemSaveCallback`, or a word for all of them.

    Returns:
        The same without values that are no numbers, strings, or lists and dictionaries of those.
    """
    if not isinstance(memsave, Mapping):
        return memsave
    return {name: value for name, value in memsave.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str)
