"""Look at the first training batch before the strategy is set up, and leave training unchanged."""

import contextlib
import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.core.saved_state import (
    CONTAINERS,
    RandomState,
    generator_state,
    is_same,
    refill,
    set_generator,
)
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.trainer.distributed import all_reduce_min
from lightning_memsave.trainer.trainer import data_connector_of

# Attributes of a strategy and of a data source, while a method of theirs is replaced.
_BEFORE_SETUP = "_memsave_before_setup"
_REQUESTED = "_memsave_requested"

_MODE = "max_size_cycle"
_MAX_ITEMS = 1000  # longer containers are assumed to be data
_MAX_OBJECTS = 100_000


def before_strategy_setup(trainer: Any, function: Callable[[], None]) -> Callable[[], None]:
    """Call a function once, immediately before Lightning sets up the strategy.

    All ``setup`` hooks and ``configure_model`` have run by then, the process group is there, and
    optimizers are not. A checkpoint has been restored into the module, except for strategies with
    ``restore_checkpoint_after_setup`` (FSDP, DeepSpeed, model parallel), which restore it later. An
    exception of the function ends the fit as one that a ``setup`` hook raises.
    """
    strategy, source = trainer.strategy, trainer.fit_loop._data_source
    undo_patch = patch_method(strategy, setup)
    vars(strategy)[_BEFORE_SETUP] = (function, undo_patch)

    def undo() -> None:
        undo_patch()
        vars(strategy).pop(_BEFORE_SETUP, None)
        _forget(source)

    return undo


def setup(strategy: Any, trainer: Any) -> None:
    """Run ``Strategy.setup`` after the function of `before_strategy_setup`."""
    original = previous_method(strategy, "setup")
    call_before_setup(strategy)
    original(trainer)


def call_before_setup(strategy: Any) -> None:
    """Call the function of `before_strategy_setup` now, if it is still to be called."""
    function, undo = vars(strategy).pop(_BEFORE_SETUP, (None, None))
    if function is not None:
        undo()
        function()


def first_batch(trainer: Any) -> Any:
    """Return a first batch of training, and leave training bit for bit unchanged.

    The batch is one of a separate iterator, which is closed: on the host, before any hook of batch
    transfer, and collated in the same way, by one worker where the loader has workers. Random
    states, and attributes of loaders, datasets and samplers, are restored. The loader for which
    ``train_dataloader()`` is called is kept, and Lightning gets it instead of a second call, unless
    that would return something else: a checkpoint restored another epoch or step, a number or text
    among the attributes of the module or the datamodule changed, or random numbers that it draws
    would be others.
    """
    if trainer.limit_train_batches == 0:
        return None
    before = _random_state()
    try:
        loader = trainer.fit_loop._combined_loader
        loader = _request(trainer, before) if loader is None else loader
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training warns of the same things
            batch = _look(trainer, loader)
    finally:
        before.restore()
    return batch if trainer.is_global_zero else None


def _random_state() -> RandomState:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return RandomState({torch.device("cuda", index) for index in devices})


def _request(trainer: Any, before: RandomState) -> Any:
    source = trainer.fit_loop._data_source
    facts = _facts(trainer)
    loader = data_connector_of(trainer)._request_dataloader(source)
    if source.is_module():
        after = _random_state() if before.has_changed() else None
        _forget(source)
        undo = patch_method(source, dataloader)
        vars(source)[_REQUESTED] = (trainer, loader, facts, (before, after), undo)
    return loader


def _forget(source: Any) -> None:
    *_, undo = vars(source).pop(_REQUESTED, (lambda: None,))
    undo()


def dataloader(source: Any) -> Any:
    """Return the loader that `first_batch` has requested, or request another one."""
    original = previous_method(source, "dataloader")
    if _REQUESTED not in vars(source):
        return original()
    trainer, loader, facts, (before, after), _ = vars(source)[_REQUESTED]
    _forget(source)
    now = _facts(trainer)
    is_current = all(now.get(name) == fact for name, fact in facts.items())
    is_current &= after is None or not before.has_changed()
    # If one rank requested a loader alone, it could wait for the others.
    if not all_reduce_min(trainer, int(is_current)):
        return original()
    if after is not None:
        after.restore()
    return loader


# What `train_dataloader` may depend on and a fit may have changed by the time Lightning calls it:
# a checkpoint that is restored, a tuner of batch sizes, the user's hooks.
def _facts(trainer: Any) -> dict[Any, Any]:
    facts: dict[Any, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    for owner in (trainer.lightning_module, trainer.datamodule):
        attributes = {} if owner is None else vars(owner)
        for values in (attributes, attributes.get("_hparams", {})):
            facts |= {
                (id(values), name): value
                for name, value in values.items()
                if isinstance(value, bool | int | float | str) and not name.startswith("_")
            }
    return facts


def _look(trainer: Any, loader: Any) -> Any:
    connector: Any = data_connector_of(trainer)
    is_combined = isinstance(loader, connector.CombinedLoader)
    # The mode of Lightning for loaders that are not combined.
    combined = copy.copy(loader) if is_combined else connector.CombinedLoader(loader, _MODE)
    loaders = combined.flattened
    if problems := [problem for each in loaders for problem in _problems(each)]:
        raise IncompatibleError("MemSaveCallback(budget=...)", problems)
    fitting, training = connector.TrainerFn.FITTING, connector.RunningStage.TRAINING
    with _restored(trainer, loaders):
        if trainer.overfit_batches > 0:
            connector._resolve_overfit_batches(combined, mode=training)
        combined.flattened = [
            _in_one_worker(connector._process_dataloader(trainer, fitting, training, each))
            for each in combined.flattened
        ]
        iter(combined)
        try:
            return next(combined, (None,))[0]
        finally:
            combined.reset()


# Loads nothing but the batch and the next one, and starts no thread that pins them.
# `CombinedLoader.reset` ends persistent workers at once; others end when they are collected.
def _in_one_worker(loader: Any) -> Any:
    if isinstance(loader, DataLoader):
        has_workers = loader.num_workers > 0
        vars(loader).update(
            _iterator=None,
            num_workers=int(has_workers),
            persistent_workers=has_workers,
            prefetch_factor=1 if has_workers else None,
            pin_memory=False,
        )
    return loader


def _problems(loader: Any) -> Iterator[Problem]:
    what = f"the training data, a `{type(loader).__name__}`"
    fix = (
        "Take a batch by hand, call `plan_memory(model, batch, budget=...)`, and pass the settings "
        "that it prints to `MemSaveCallback` in place of `budget`."
    )
    dataset = getattr(loader, "dataset", None)
    streams = [loader, dataset] if isinstance(dataset, IterableDataset) else [loader]
    stateful = next((one for one in streams if _keeps_position(one)), None)
    if stateful is not None:
        whose = "it" if stateful is loader else f"its `{type(dataset).__name__}`"
        why = f"{whose} keeps its position, so looking at the first batch could skip it in training"
        yield Problem(what, why, fix)
    elif (once := _find_iterator(loader)) is not None:
        why = "it can be read only once" if once is loader else f"it reads from {_named(once)}"
        why += ", so looking at the first batch would remove it from training"
        yield Problem(what, why, fix)


# Streams of Hugging Face are known to begin anew with each iterator.
def _keeps_position(one: Any) -> bool:
    is_known = type(one).__module__.startswith("datasets.")
    return not is_known and hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _named(iterator: Any) -> str:
    return f"an iterator that can be read only once (`{type(iterator).__name__}`)"


# Map-style datasets may hold files, which are iterators: they are read by index.
def _find_iterator(loader: Any) -> Any:
    roots, seen = [loader], []
    if isinstance(loader, DataLoader) and not isinstance(loader, Iterator):
        names = {"_iterator", "collate_fn", "worker_init_fn"}
        if not isinstance(loader.dataset, IterableDataset):
            names.add("dataset")
            seen.append(loader.dataset)  # of which samplers know
        roots = [value for name, value in vars(loader).items() if name not in names]
    found = _objects(roots, seen, lambda one: isinstance(one, Iterable))
    return next((one for one in found if isinstance(one, Iterator)), None)


def _objects(
    roots: Iterable[Any], seen: Iterable[Any], enters: Callable[[Any], bool]
) -> Iterator[Any]:
    """Give objects and those that they hold in attributes and short containers, each once."""
    known, left = {id(one) for one in seen}, list(roots)
    while left and len(known) < _MAX_OBJECTS:
        one = left.pop()
        if id(one) not in known:
            known.add(id(one))
            yield one
            left += _held_by(one) if enters(one) else []


def _held_by(one: Any) -> list[Any]:
    if isinstance(one, list | tuple | set | frozenset | dict):
        values = one.values() if isinstance(one, dict) else one
        return list(values) if len(one) <= _MAX_ITEMS else []
    if isinstance(one, types.MethodType):
        return [one.__self__]
    if isinstance(one, functools.partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, types.FunctionType):
        return [c.cell_contents for c in one.__closure__ or () if c != types.CellType()]
    return list(getattr(one, "__dict__", {}).values())


@contextlib.contextmanager
def _restored(trainer: Any, loaders: list[Any]) -> Iterator[None]:
    """Restore generators, and attributes of loaders, datasets, samplers and collators."""
    generators: list[tuple[Any, Any]] = []
    containers: list[tuple[Any, Any]] = []
    arrays: list[tuple[Any, Any]] = []
    names = ("sampler", "batch_sampler", "collate_fn")
    own = {id(getattr(each, name, None)) for each in loaders for name in names}
    own |= {id(each) for each in loaders}
    for one in _objects(loaders, [trainer, None], lambda one: True):
        if (state := generator_state(one)) is not None:
            generators.append((one, state))
        elif id(one) in own or isinstance(one, Dataset | Sampler | DataLoader):
            attributes = getattr(one, "__dict__", {})
            values = list(attributes.values())
            kept = [attributes, *(v for v in values if type(v) in CONTAINERS)]
            containers += [(value, copy.copy(value)) for value in kept]
            if isinstance(one, Sampler):
                arrays += [(v, copy.deepcopy(v)) for v in values if _is_array(v)]
    try:
        yield
    finally:
        for container, contents in containers:
            if not is_same(container, contents):
                refill(container, contents)
        for array, before in arrays:
            array[...] = before
        for generator, state in generators:
            set_generator(generator, state)


def _is_array(value: Any) -> bool:
    is_writable = getattr(getattr(value, "flags", None), "writeable", False)
    return isinstance(value, torch.Tensor) or bool(is_writable)
