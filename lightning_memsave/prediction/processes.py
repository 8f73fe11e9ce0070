"""Simulate the first of several processes, without the others: in torch's fake process group."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_memsave.trainer.fsdp2 import strategy_class as fsdp2_class


@contextlib.contextmanager
def first_of(
    world_size: int, name: str, package: ModuleType, arguments: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Give the arguments of a Trainer that trains with processes that are not there."""
    with _own_world():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        strategy = _CLASSES[name](package.__name__)(**arguments)
        strategy.broadcast, strategy.barrier = _same, _nothing
        yield {
            "strategy": strategy,
            "devices": world_size,
            "plugins": [_environment(package, world_size)],
        }


_MANY = 10**6


# torch's is a view of tables of its module.
class _World(distributed_c10d._World):
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count = _MANY  # C++ knows groups by their numbers

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names = {}, {}
        self.pg_group_ranks, self.pg_backend_config = {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


# Beside the process groups of a process that trains with others.
@contextlib.contextmanager
def _own_world() -> Iterator[None]:
    module: Any = distributed_c10d  # it does not say what it exports
    before, own = module._world, _World()
    module._world = own
    debug._clear_sharding_prop_cache()
    try:
        yield
    finally:
        # What is known of operators on DTensors names a mesh, and meshes of equal ranks are equal.
        debug._clear_sharding_prop_cache()
        for name in own.pg_names.values():
            module._unregister_process_group(name)
        module._world = before


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

        def teardown(self) -> None: ...  # the others' number of processes is not its own

        node_rank = local_rank = global_rank

    return First()
