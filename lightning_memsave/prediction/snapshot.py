"""Convert a predicted step to the format of torch's memory viewer."""

from dataclasses import dataclass
from typing import Any

from lightning_memsave.errors import ConfigurationError


@dataclass(slots=True)
class Origin:
    module: str = ""
    op: str = ""
    phase: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class StepTrace:
    storages: tuple[tuple[str, Origin], ...] = ()
    changes: tuple[tuple[int, int], ...] = ()
    places: tuple[tuple[str, str], ...] = ()

    def to_snapshot(self) -> dict[str, Any]:
        if not self.changes:
            raise ConfigurationError(
                "The prediction has no events to write: it was read from JSON. Predict again with "
                "`predict_memory`."
            )
        # The viewer colours by category and requires one called "unknown".
        start = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": []}
        events: list[dict[str, Any]] = [start | {"category": "unknown"}]
        alive: dict[int, dict[str, Any]] = {}
        address = 0  # the next one: none is used twice
        for index, change in self.changes:
            before = alive.pop(index, None)
            if before is not None:
                events += [before | {"action": f"free_{how}"} for how in ("requested", "completed")]
            size = change + (before["size"] if before else 0)
            if size:
                category, origin = self.storages[index]
                alive[index] = {
                    "action": "alloc",
                    "addr": address,
                    "size": size,
                    "stream": 0,
                    "frames": _frames(category, origin),
                    "category": category,
                }
                address += size
                events.append(alive[index])
        # No segments: each allocation is among the events.
        return {"device_traces": [events], "segments": []}


# The viewer shows each frame as `filename:line:name`.
def _frames(category: str, origin: Origin) -> list[dict[str, Any]]:
    tensor = f"{origin.dtype}[{','.join(map(str, origin.shape))}]" if origin.dtype else ""
    made_by = " ".join(filter(None, (origin.op, tensor)))
    lines = [(category, made_by), (origin.phase or "before the step", origin.module)]
    return [{"filename": where, "line": 0, "name": name} for where, name in lines]
