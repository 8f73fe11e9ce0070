"""Looking at the first batch must leave training bit for bit unchanged."""

import functools
import gc
import importlib
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    random_split,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_memsave.core.nested import leaves_of
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.trainer.first_batch import before_strategy_setup, first_batch
from tests.callbacks.lit import Vectors, make_lit, make_trainer
from tests.cases import WIDTH
from tests.helpers import seed_all


class Seen:
    """What a training saw and left behind; with a look at its first batch or not."""

    def __init__(self, package: ModuleType, looks: bool, look: Callable[..., Any] = first_batch):
        seen = self
        self.batches: list[list[Tensor]] = []
        self.losses: list[float] = []
        self.state: dict[str, Tensor] = {}
        self.looked_at: list[Any] = []
        self.draws: list[Any] = []
        self.calls = 0  # of `train_dataloader()`
        self.workers: list[psutil.Process] = []  # alive after the look

        class Callback(package.Callback):  # type: ignore[name-defined, misc]
            undo: Any = None

            def setup(self, trainer, pl_module, stage):
                if looks:
                    self.undo = before_strategy_setup(trainer, lambda: self.look(trainer))

            def look(self, trainer):
                before = psutil.Process().children()
                seen.looked_at.append(look(trainer))
                seen.workers += [p for p in psutil.Process().children() if p not in before]

            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                seen.batches.append([tensor.clone() for _, tensor in leaves_of(batch)])

            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                seen.losses.append(outputs["loss"].item())

            def teardown(self, trainer, pl_module, stage):
                if self.undo is not None:
                    self.undo()

            def on_exception(self, trainer, pl_module, exception):
                self.teardown(trainer, pl_module, "fit")

        self.callback = Callback()

    def finish(self, lit: Any) -> None:
        self.state = {name: tensor.clone() for name, tensor in lit.state_dict().items()}
        self.draws = [torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()]


def make_project(
    package: ModuleType, make_loader: Callable[[Any], Any], seen: Seen, **methods: Any
) -> Any:
    def train_dataloader(self: Any) -> Any:
        seen.calls += 1
        return make_loader(self)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = sum(self.model(leaf) for _, leaf in leaves_of(batch))
        return loss

    steps = {"train_dataloader": train_dataloader, "training_step": training_step}
    return make_lit(package, **(steps | methods))


def train(
    package: ModuleType,
    make_loader: Callable[[Any], Any],
    looks: bool,
    *others: Any,
    methods: Any = None,
    **settings: Any,
) -> Seen:
    seen = Seen(package, looks)
    lit = make_project(package, make_loader, seen, **(methods or {}))
    of_fit = {"ckpt_path", "datamodule", "train_dataloaders"} & settings.keys()
    fit = {key: settings.pop(key) for key in of_fit}
    defaults = {"max_epochs": 2, "limit_val_batches": 0}
    trainer = make_trainer(package, seen.callback, *others, **(defaults | settings))
    seed_all(2)
    random.seed(2)
    trainer.fit(lit, **fit)
    seen.finish(lit)
    assert "setup" not in vars(trainer.strategy)
    assert not [name for name in vars(trainer.strategy) if "memsave" in name]
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    return seen


def assert_unchanged(plain: Seen, looked: Seen, calls: int | None = None) -> None:
    assert looked.losses == plain.losses
    assert len(looked.batches) == len(plain.batches)
    for ours, theirs in zip(looked.batches, plain.batches, strict=True):
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert [k for k, v in plain.state.items() if not torch.equal(v, looked.state[k])] == []
    assert looked.draws == plain.draws
    assert looked.calls == (plain.calls if calls is None else calls)
    assert looked.workers == []


class Augmented(Vectors):
    """Draws from the global generators of torch, NumPy and Python."""

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index] * torch.rand(()) + float(np.random.rand()) + random.random()


class WithGenerators(Vectors):
    """Draws from generators of its own, and of an object that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)
        self.others: dict[str, Any] = {
            "python": random.Random(1),
            "old": [np.random.RandomState(1)],
        }
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> Tensor:
        shift = self.rng.random() + self.others["python"].random() + self.others["old"][0].rand()
        return self.data[index] + shift + torch.rand((), generator=self.generator)


class Counting(Vectors):
    """Counts what it is asked for, and opens something on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.cache: dict[int, int] = {}
        self.file: object = None

    def __getitem__(self, index: int) -> Tensor:
        self.file = self.file or object()
        self.count += 1
        self.cache.setdefault(index, self.count)
        return self.data[index] + self.cache[index] + self.count


class ShufflesInPlace(Sampler[list[int]]):
    """Batches of which each epoch has another order, made from that of the last one."""

    def __init__(self) -> None:
        self.batches = [[i, i + 1, i + 2] for i in range(0, 24, 3)]
        self.order = np.arange(8)
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        np.random.shuffle(self.order)
        self.epoch += 1
        yield from (self.batches[i][: 1 + self.epoch] for i in self.order)

    def __len__(self) -> int:
        return len(self.batches)


class Stream(IterableDataset[Tensor]):
    """Begins anew with each iterator; counts those."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        yield from Vectors(24).data + self.begun + torch.rand(())


class LateCollator:
    """Makes its generator in the first batch, as collators of Hugging Face do."""

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self.rng = rng

    def collate(self, samples: list[Tensor]) -> Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(3)
        return torch.stack(samples) + float(self.rng.random())

    __call__ = collate


def behind_everything() -> Callable[[list[Tensor]], Tensor]:
    """Draws from a generator behind a closure, a partial and a method."""
    inner, late = functools.partial(LateCollator(np.random.default_rng(3)).collate), 0

    def collate(samples: list[Tensor]) -> Tensor:
        return inner(samples) if samples else torch.zeros(late)  # noqa: F821

    del late  # a closure may know of names without a value
    return collate


class LoaderOfUser:
    """No DataLoader: a list of batches in an order of its own, without a length."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)
        self.times = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.times += 1
        for i in torch.randperm(6, generator=self.generator).tolist():
            yield Vectors(24).data[i * 4 : i * 4 + 4] + self.times


def shuffled(dataset: Dataset[Any] | None = None, **settings: Any) -> DataLoader[Any]:
    dataset = Vectors() if dataset is None else dataset
    return DataLoader(dataset, **({"batch_size": 4, "shuffle": True} | settings))


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def combined(lit: Any, mode: str) -> Any:
    package = lit.trainer.__module__.partition(".trainer")[0]
    loaders = {"a": shuffled(), "b": [shuffled(Vectors(10), batch_size=3), shuffled()]}
    return importlib.import_module(f"{package}.utilities").CombinedLoader(loaders, mode)


LOADERS: dict[str, Callable[[Any], Any]] = {
    "shuffled": lambda lit: shuffled(),
    "seeded": lambda lit: shuffled(generator=seeded()),
    "sampler": lambda lit: shuffled(
        shuffle=False, sampler=RandomSampler(Vectors(), True, 20, generator=seeded())
    ),
    "augmented": lambda lit: shuffled(Augmented()),
    "own_generators": lambda lit: shuffled(WithGenerators()),
    "own_generators_in_parts": lambda lit: shuffled(random_split(WithGenerators(), [20, 4])[0]),
    "counting": lambda lit: shuffled(Counting()),
    "workers": lambda lit: shuffled(num_workers=2),
    "augmented_in_workers": lambda lit: shuffled(Augmented(), num_workers=2),
    "persistent_workers": lambda lit: shuffled(Counting(), num_workers=2, persistent_workers=True),
    "in_place": lambda lit: DataLoader(Vectors(), batch_sampler=ShufflesInPlace()),
    "in_place_in_workers": lambda lit: DataLoader(
        Vectors(), batch_sampler=ShufflesInPlace(), num_workers=1
    ),
    "stream": lambda lit: DataLoader(Stream(), batch_size=5),
    "stream_in_workers": lambda lit: DataLoader(Stream(), batch_size=5, num_workers=2),
    "late_collator": lambda lit: shuffled(collate_fn=LateCollator()),
    "behind_everything": lambda lit: shuffled(collate_fn=behind_everything()),
    "own_loader": lambda lit: LoaderOfUser(),
    "dict": lambda lit: {"a": shuffled(), "b": shuffled(Augmented(10))},
    "list": lambda lit: [shuffled(), shuffled(Augmented(10), num_workers=1)],
    "min_size": lambda lit: combined(lit, "min_size"),
    "max_size": lambda lit: combined(lit, "max_size_cycle"),
}
# `fork` in a process with threads, such as those of other tests.
pytestmark = [
    pytest.mark.usefixtures("no_prediction"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


@pytest.mark.parametrize("name", LOADERS)
def test_training_is_unchanged(package, name):
    plain, looked = (train(package, LOADERS[name], looks) for looks in (False, True))
    assert len(plain.batches) > 6
    assert plain.calls == 1
    assert_unchanged(plain, looked)
    assert looked.looked_at[0] is not None
    # Nothing was drawn in between, so that it is the very batch that training begins with.
    if name not in {"stream_in_workers"}:
        shown = [tensor for _, tensor in leaves_of(looked.looked_at[0])]
        assert all(torch.equal(a, b) for a, b in zip(shown, looked.batches[0], strict=True))


def split_at_random(lit: Any) -> Any:
    return shuffled(random_split(Vectors(), [20, 4])[0])


def draws_in_configure_optimizers(self: Any) -> Any:
    torch.rand(1)
    return torch.optim.AdamW(self.parameters(), lr=self.lr)


def asks_for_steps(self: Any) -> Any:
    assert self.trainer.estimated_stepping_batches == 12
    return torch.optim.AdamW(self.parameters(), lr=self.lr)


def asks_for_steps_in_setup(self: Any, stage: str) -> None:
    assert self.trainer.estimated_stepping_batches == 12


def changes_batch_size_in_fit(self: Any) -> None:
    self.batch_size = 6


def of_batch_size(lit: Any) -> Any:
    return shuffled(batch_size=lit.batch_size)


CASES: dict[str, dict[str, Any]] = {
    "draws_before": {"methods": {"configure_optimizers": draws_in_configure_optimizers}},
    "loader_draws": {"make_loader": split_at_random},
    # What it draws is something else by the time that Lightning asks.
    "both_draw": {
        "make_loader": split_at_random,
        "methods": {"configure_optimizers": draws_in_configure_optimizers},
        "calls": 2,
    },
    "steps": {"methods": {"configure_optimizers": asks_for_steps}},
    "steps_in_setup": {"methods": {"setup": asks_for_steps_in_setup}},
    "steps_in_setup_workers": {
        "methods": {"setup": asks_for_steps_in_setup},
        "make_loader": LOADERS["persistent_workers"],
    },
    "batch_size": {
        "methods": {"on_fit_start": changes_batch_size_in_fit},
        "make_loader": of_batch_size,
        "calls": 2,
    },
    "overfit": {"overfit_batches": 2},
    "overfit_workers": {"overfit_batches": 2, "make_loader": LOADERS["workers"]},
    "fast_dev_run": {"fast_dev_run": True},
    "limit": {"limit_train_batches": 0.5},
    "limit_one": {"limit_train_batches": 1},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "sanity": {"limit_val_batches": 2, "num_sanity_val_steps": 1},
    "max_steps": {"max_steps": 7, "max_epochs": -1},
}


OF_SETUP = {"steps_in_setup", "steps_in_setup_workers"}


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("name", CASES)
def test_training_is_unchanged_where(package, name):
    case = {"make_loader": LOADERS["shuffled"], **CASES[name]}
    calls, make_loader = case.pop("calls", None), case.pop("make_loader")
    plain, looked = (train(package, make_loader, looks, **case) for looks in (False, True))
    assert_unchanged(plain, looked, calls)
    is_shown = torch.equal(looked.looked_at[0], looked.batches[0][0])
    # Else random numbers are drawn, or the batch size is set, after the look.
    assert is_shown == (name not in {"draws_before", "both_draw", "batch_size"} | OF_SETUP)


def test_batch_size_finder_finds_the_same(package):
    found = []
    for looks in (False, True):
        tuner = package.callbacks.BatchSizeFinder(max_trials=2, init_val=2, steps_per_trial=1)
        seen = train(package, of_batch_size, looks, tuner, max_epochs=1)
        found.append((tuner.optimal_batch_size, seen.losses))
    assert found[0] == found[1]


@pytest.mark.parametrize("is_mid_epoch", [False, True])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.filterwarnings("ignore:.*`weights_only`:FutureWarning")
def test_resumed_training_is_unchanged(package, is_mid_epoch, tmp_path):
    first = Seen(package, False)
    trainer = make_trainer(
        package,
        max_epochs=1,
        max_steps=3 if is_mid_epoch else -1,
        limit_val_batches=0,
    )
    trainer.fit(make_project(package, LOADERS["shuffled"], first))
    path = tmp_path / "it.ckpt"
    trainer.save_checkpoint(path)
    asked_at: list[int] = []

    def by_step(lit: Any) -> Any:
        asked_at.append(lit.trainer.global_step)
        return shuffled(Vectors(24 + lit.trainer.global_step))

    plain, looked = (train(package, by_step, looks, ckpt_path=path) for looks in (False, True))
    # The loader may be another one after the checkpoint is restored.
    assert asked_at == [3, 0, 3] if is_mid_epoch else [6, 0, 6]
    assert_unchanged(plain, looked, calls=2)


class StatefulLoader:
    """Has a position that is saved in checkpoints, as torchdata's ``StatefulDataLoader``."""

    position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 6:
            self.position += 1
            yield Vectors().data[self.position : self.position + 2]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class StatefulStream(StatefulLoader, IterableDataset[Tensor]):
    """The same as a dataset."""


class Infinite(DataLoader[Any]):
    """Keeps one iterator for all epochs, as well-known loaders do."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        return (next(self.iterator) for _ in range(len(self)))


class OneShot(IterableDataset[Tensor]):
    """Reads on from where it is."""

    def __init__(self, source: Any) -> None:
        self.sources = [source]

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.sources[0]


class ItsOwnIterator(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Tensor:
        return torch.zeros(WIDTH)


ONE_SHOT: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (lambda: (row for row in Vectors().data.split(4)), "can be read only once"),
    "in_dataset": (lambda: DataLoader(OneShot(iter(Vectors().data))), "reads from an iterator"),
    "in_dataset_workers": (
        lambda: DataLoader(OneShot(iter(Vectors().data)), num_workers=1),
        "reads from an iterator",
    ),
    "dataset": (lambda: DataLoader(ItsOwnIterator()), "`ItsOwnIterator`"),
    "sampler": (lambda: DataLoader(Vectors(), sampler=iter(range(9))), "`range_iterator`"),
    "infinite": (lambda: Infinite(Vectors()), "`_SingleProcessDataLoaderIter`"),
    "stateful": (StatefulLoader, "it keeps its position"),
    "stateful_stream": (
        lambda: DataLoader(StatefulStream()),
        "`StatefulStream` keeps its position",
    ),
}


@pytest.mark.parametrize("name", ONE_SHOT)
def test_refuses_what_a_look_would_take_from_training(package, name):
    make_loader, why = ONE_SHOT[name]
    seen = Seen(package, looks=True)
    loader = make_loader()
    lit = make_project(package, lambda lit: {"a": shuffled(), "b": loader}, seen)
    trainer = make_trainer(package, seen.callback)
    with pytest.raises(IncompatibleError, match=why) as error:
        trainer.fit(lit)
    assert "MemSaveCallback(budget=...)" in str(error.value)
    assert "call `plan_memory(model, batch, budget=...)`" in str(error.value)
    if name == "generator":
        assert len(list(loader)) == 6  # nothing was taken
    assert "setup" not in vars(trainer.strategy)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)


class WithFile(Dataset[Tensor]):
    """Reads a file by position; files are iterators of lines. What it counts can be saved."""

    def __init__(self, path: Any) -> None:
        self.file = path.open("rb")

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        self.file.seek(index)
        return torch.full((WIDTH,), float(self.file.read(1)[0]))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(24))

    def state_dict(self) -> dict[str, int]:
        return {}

    load_state_dict = state_dict


def test_files_that_are_read_by_position_are_no_obstacle(package, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(24)))
    datasets = [WithFile(path), WithFile(path)]
    left = iter(datasets)
    plain, looked = (
        train(package, lambda lit: shuffled(next(left)), looks) for looks in (False, True)
    )
    assert_unchanged(plain, looked)
    for dataset in datasets:
        dataset.file.close()


@pytest.mark.filterwarnings("ignore:.*returned 0 length")
@pytest.mark.filterwarnings("ignore:Total length of .* is zero")
@pytest.mark.parametrize("name", ["empty", "no_batches", "empty_stream"])
def test_without_batches_there_is_none(package, name):
    empty = {"empty": TensorDataset(torch.zeros(0, WIDTH)), "empty_stream": OneShot(())}
    dataset = empty.get(name, Vectors())
    limit = 0 if name == "no_batches" else 1.0
    plain, looked = (
        train(package, lambda lit: DataLoader(dataset), looks, limit_train_batches=limit)
        for looks in (False, True)
    )
    assert looked.looked_at == [None]
    assert_unchanged(plain, looked)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize("name", ["datamodule", "loader", "loaders"])
def test_training_is_unchanged_with_data_given_to_fit(package, name):
    calls: list[int] = []

    class Data(package.LightningDataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self):
            calls.append(1)
            return shuffled(Augmented())

    def run(looks: bool) -> Seen:
        data = {"loader": shuffled(Augmented()), "loaders": [shuffled(), shuffled()]}
        given = (
            {"datamodule": Data()} if name == "datamodule" else {"train_dataloaders": data[name]}
        )
        return train(package, LOADERS["shuffled"], looks, **given)

    plain, looked = run(False), run(True)
    assert_unchanged(plain, looked)
    assert plain.calls == 0
    assert len(calls) == (2 if name == "datamodule" else 0)


def test_no_iterator_or_thread_is_left(package):
    alive: list[Any] = []
    threads = set(threading.enumerate())

    def look(trainer: Any) -> Any:
        batch = first_batch(trainer)
        gc.collect()
        alive.extend(o for o in gc.get_objects() if isinstance(o, _BaseDataLoaderIter))
        for thread in set(threading.enumerate()) - threads:
            thread.join(5)  # what a queue has been told to send may still be on its way
            alive.extend([thread] if thread.is_alive() else [])
        return batch

    seen = Seen(package, True, look)
    loaders: list[Any] = []

    def make_loader(lit: Any) -> Any:
        loaders.append(LOADERS["persistent_workers"](lit))
        return loaders[0]

    trainer = make_trainer(package, seen.callback, limit_val_batches=0)
    trainer.fit(make_project(package, make_loader, seen))
    assert alive == []
    assert seen.workers == []
    assert loaders[0]._iterator is None
    # Nor is the loader kept beyond the fit by what was looked at.
    reference = weakref.ref(loaders.pop())
    trainer.fit_loop._combined_loader = None
    gc.collect()
    assert reference() is None


def test_function_runs_once_after_setup_and_before_optimizers(package):
    order: list[str] = []

    class Callback(package.Callback):  # type: ignore[name-defined, misc]
        def setup(self, trainer, pl_module, stage):
            order.append("setup")
            self.undo = before_strategy_setup(trainer, lambda: order.append("function"))

        def teardown(self, trainer, pl_module, stage):
            self.undo()
            order.append("teardown")

    class Later(package.Callback):  # type: ignore[name-defined, misc]
        def setup(self, trainer, pl_module, stage):
            order.append("later setup")

        def on_fit_start(self, trainer, pl_module):
            order.append("on_fit_start")

    def configure_model(self: Any) -> None:
        order.append("configure_model")

    def configure_optimizers(self: Any) -> Any:
        order.append("configure_optimizers")
        assert "setup" not in vars(self.trainer.strategy)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        order.append("weights")

    lit = make_lit(
        package,
        configure_model=configure_model,
        configure_optimizers=configure_optimizers,
        on_load_checkpoint=on_load_checkpoint,
    )
    trainer = make_trainer(package, Callback(), Later(), max_steps=1, limit_val_batches=0)
    trainer.fit(lit)
    begin = ["setup", "later setup", "configure_model"]
    end = ["function", "configure_optimizers", "on_fit_start", "teardown"]
    assert order == [*begin, *end]
    trainer.save_checkpoint("it.ckpt")
    order.clear()
    trainer.fit(lit, ckpt_path="it.ckpt")
    assert order == [*begin, "weights", *end]


def test_undo_before_it_ran_leaves_nothing(package):
    trainer = make_trainer(package)
    before = dict(vars(trainer.strategy))
    called: list[int] = []
    undo = before_strategy_setup(trainer, lambda: called.append(1))
    assert vars(trainer.strategy) != before
    undo()
    undo()
    assert vars(trainer.strategy) == before
    trainer.fit(make_lit(package))
    assert called == []


def test_an_error_ends_the_fit_as_one_of_setup(package):
    seen = Seen(package, True, look=lambda trainer: first_batch(trainer) and 1 / 0)
    caught: list[BaseException] = []

    class Other(package.Callback):  # type: ignore[name-defined, misc]
        def on_exception(self, trainer, pl_module, exception):
            caught.append(exception)

    lit = make_project(package, lambda lit: {"a": shuffled()}, seen)
    trainer = make_trainer(package, seen.callback, Other())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(lit)
    assert [type(error) for error in caught] == [ZeroDivisionError]
    assert "setup" not in vars(trainer.strategy)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)


def test_an_error_of_the_data_is_raised_and_workers_end(package):
    class Broken(Vectors):
        def __getitem__(self, index):
            raise KeyError(index)

    seen = Seen(package, True)
    lit = make_project(package, lambda lit: shuffled(Broken(), num_workers=1), seen)
    before = psutil.Process().children()
    with pytest.raises(KeyError):
        make_trainer(package, seen.callback).fit(lit)
    assert [worker for worker in psutil.Process().children() if worker not in before] == []


def test_warnings_of_lightning_come_once(package):
    counts = []
    for looks in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(package, LOADERS["shuffled"], looks, overfit_batches=2)
        counts.append(sorted(str(warning.message) for warning in caught))
    assert counts[0] == counts[1]
    assert any("requested to overfit" in message for message in counts[0])
