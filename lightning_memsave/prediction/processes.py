"""Simulate the first of several processes, without the others: in torch's fake process group."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_memsave.trainer.fsdp2 import strategy_class as fsdp2_class


@contextlib.contextmanager
def first_of(world_size: int, name: str, package: ModuleType) -> Iterator[dict[str, Any]]:
    """Give the arguments of a Trainer that trains with processes that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    strategy = _CLASSES[name](package.__name__)()
    strategy.broadcast, strategy.barrier = _same, _nothing
    try:
        yield {
            "strategy": strategy,
            "devices": world_size,
            "plugins": [_environment(package, world_size)],
        }
    finally:
        dist.destroy_process_group()


# DDP's reducer reads memory, which fake tensors do not have. All that it adds are its buckets.
def _ddp_class(package: str) -> type[Any]:
    parent: Any = importlib.import_module(f"{package}.strategies").DDPStrategy
    return type("DDPStrategy", (parent,), {"configure_ddp": lambda self: None})


_CLASSES: dict[str, Callable[[str], type[Any]]] = {"ddp": _ddp_class, "fsdp2": fsdp2_class}


# What processes tell each other are objects, for which they compute with real tensors.
def _same(value: Any, src: int = 0) -> Any:
    return value


def _nothing(name: str | None = None) -> None: ...


def _environment(package: ModuleType, world_size: int) -> Any:
    environments = importlib.import_module(f"{package.__name__}.plugins.environments")
    base: Any = environments.LightningEnvironment

    class First(base):  # type: ignore[misc]
        creates_processes_externally = True

        def world_size(self) -> int:
            return world_size

        def set_world_size(self, size: int) -> None: ...

        def set_global_rank(self, rank: int) -> None: ...

        def global_rank(self) -> int:
            return 0

        node_rank = local_rank = global_rank

    return First()
