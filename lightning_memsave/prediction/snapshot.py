"""Convert a predicted step to the format of torch's memory viewer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.cuda.allocator import rounded_up

# torch's allocator rounds up to this; `requested_size` is the tensor's own size.
_ALIGNMENT = 512


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
        addresses = _Addresses()
        # The viewer colours by category and requires one called "unknown".
        start = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": []}
        events: list[dict[str, Any]] = [start | {"category": "unknown"}]
        alive: dict[int, dict[str, Any]] = {}
        for index, change in self.changes:
            before = alive.pop(index, None)
            if before is not None:
                events += [before | {"action": f"free_{how}"} for how in ("requested", "completed")]
                addresses.give_back(before["addr"], before["size"])
            size = change + (before["size"] if before else 0)
            if size:
                category, origin = self.storages[index]
                alive[index] = {
                    "action": "alloc",
                    "addr": addresses.take(size),
                    "size": size,
                    "stream": 0,
                    "frames": _frames(category, origin),
                    "category": category,
                }
                events.append(alive[index])
        blocks = list(_blocks(list(alive.values()), addresses.end))
        active_bytes = sum(block["size"] for block in blocks if block["state"] != "inactive")
        segment = {
            "device": 0,
            "address": 0,
            "total_size": addresses.end,
            "allocated_size": active_bytes,
            "active_size": active_bytes,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": True,
            "frames": [],
            "blocks": blocks,
        }
        return {"device_traces": [events], "segments": [segment]}


class _Addresses:
    def __init__(self) -> None:
        self.end = 0
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        if free := self._free.get(rounded_up(size, _ALIGNMENT)):
            return free.pop()
        self.end += rounded_up(size, _ALIGNMENT)
        return self.end - rounded_up(size, _ALIGNMENT)

    def give_back(self, address: int, size: int) -> None:
        self._free.setdefault(rounded_up(size, _ALIGNMENT), []).append(address)


# The viewer shows each frame as `filename:line:name`.
def _frames(category: str, origin: Origin) -> list[dict[str, Any]]:
    tensor = f"{origin.dtype}[{','.join(map(str, origin.shape))}]" if origin.dtype else ""
    made_by = " ".join(filter(None, (origin.op, tensor)))
    lines = [(category, made_by), (origin.phase or "before the step", origin.module)]
    return [{"filename": where, "line": 0, "name": name} for where, name in lines]


def _blocks(alive: list[dict[str, Any]], end: int) -> Iterator[dict[str, Any]]:
    address = 0
    for event in sorted(alive, key=lambda event: int(event["addr"])):
        if address < event["addr"]:
            yield _block(address, event["addr"] - address)
        size = rounded_up(event["size"], _ALIGNMENT)
        yield _block(event["addr"], size) | {
            "state": "active_allocated",
            "requested_size": event["size"],
            "frames": event["frames"],
        }
        address = event["addr"] + size
    if address < end:
        yield _block(address, end - address)


def _block(address: int, size: int) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }
