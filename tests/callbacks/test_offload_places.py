"""Weights that wait on the host, written between steps in every way and at every place.

A table has a row for each place and a column for each way: `.` is trained bit for bit as without
offloading, `W` is wrong today, `?` is wrong sometimes, `-` fails without offloading too.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback, Offloading
from tests.callbacks.lit import make_trainer

pytestmark = pytest.mark.usefixtures("no_prediction")

REASON = "the block is the unit, issue 55"
WIDTH, BATCHES = 8, 4
Tensors = list[Tensor]


def _each(write: Callable[[Any, Tensor], Any]) -> Callable[[Tensors, Tensors], None]:
    def write_all(params: Tensors, values: Tensors) -> None:
        for param, value in zip(params, values, strict=True):
            write(param, value)

    return write_all


def _exchange(param: Tensor, value: Tensor) -> None:
    param.data, value.data = value.data, param.data


WAYS: dict[str, Callable[[Tensors, Tensors], Any]] = {
    "copy_": _each(lambda param, value: param.copy_(value)),
    "data.copy_": _each(lambda param, value: param.data.copy_(value)),
    "data=": _each(lambda param, value: setattr(param, "data", value.clone())),
    "exchange": _each(_exchange),
    "numpy": _each(lambda param, value: param.detach().numpy().__setitem__(..., value.numpy())),
    "set_": _each(lambda param, value: param.set_(value.clone())),
}

# --- one write at a place of a fit ---

WRITES = {
    "optimizer": """
        training_step             . . . . . .
        after the model           - . . . . -
        on_before_backward        - . . . . -
        on_before_zero_grad       - . . . . -
        on_after_backward         . . W W . W
        on_before_optimizer_step  . . W W . W
        wrapper before            ? ? ? ? ? ?
        wrapper after             ? ? ? ? ? ?
        on_train_batch_end        . . . . . .
        on_train_epoch_end        . . . . . .
        loader                    ? ? ? ? ? ?
        on_validation_start       . . . . . .
        validation_step           . W . . W .
        on_validation_end         . . . . . .
        on_validation_model_train . . . . . .
        test_step                 . . . . . .
        predict_step              . . . . . .
    """,
    "parameters": """
        training_step             . . . . . .
        after the model           - W W W W -
        on_before_backward        - W W W W -
        on_before_zero_grad       - . W W . -
        on_after_backward         . . W W . W
        on_before_optimizer_step  . . W W . W
        wrapper before            ? ? ? ? ? ?
        wrapper after             ? ? ? ? ? ?
        on_train_batch_end        . . . . . .
        on_train_epoch_end        . . . . . .
        loader                    ? ? ? ? ? ?
        on_validation_start       . . . . . .
        validation_step           . W . . W .
        on_validation_end         . . . . . .
        on_validation_model_train . . . . . .
        test_step                 . . . . . .
        predict_step              . . . . . .
    """,
}

# --- averages are copied in for an evaluation, and what was there is copied back ---

_ROWS = """
        on_validation_start/on_validation_end              . . . W . .
        on_validation_epoch_start/on_validation_epoch_end  . . . W . .
        on_validation_batch_start/on_validation_batch_end  . . . W . .
        on_validation_model_eval/on_validation_model_train . . . W . .
        validation_step                                    . . . W . .
        on_test_start/on_test_end                          . . . . . .
        test_step                                          . . . . . .
        on_predict_start/on_predict_end                    . . . . . .
        predict_step                                       . . . . . .
    """
AVERAGES = {"optimizer": _ROWS, "parameters": _ROWS}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        return x + added


class Lit(pl.LightningModule):
    """Acts at places; what it computes in any stage is noted."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(WIDTH, 4)
        self.actions, self.noted = actions, cast(list[float], [])
        self.averages = [param.detach().clone() for param in self.parameters()]
        self.kept: Tensors = []

    def act(self, place: str) -> None:
        if (action := self.actions.get(place)) is not None:
            with torch.no_grad():
                action(self)

    def loss(self, batch: Tensor) -> Tensor:
        return functional.mse_loss(self.head(self.blocks(batch)), batch[:, :4])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.act("training_step")
        with torch.no_grad():  # no hook, which would make updates wait
            torch._foreach_lerp_(self.averages, [*self.parameters()], 0.3)
        loss = self.loss(batch)
        self.noted.append(loss.item())
        self.act("after the model")
        return loss

    def _evaluate(self, batch: Tensor, step: str) -> None:
        self.act(step)
        self.noted.append(self.loss(batch).item())
        self.act(f"{step} end")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "validation_step")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "test_step")

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[float]:
        self._evaluate(batch, "predict_step")
        return self.noted

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _with_hooks(actions: dict[str, Callable[[Any], None]]) -> type[Lit]:
    """Give the class that overrides the hooks of the actions only, as any project does."""
    methods: dict[str, Any] = {}
    for place in actions:
        parent = getattr(Lit, place, None)
        if parent is None or place in vars(Lit):
            continue

        def hook(
            self: Any, *args: Any, _place: str = place, _parent: Any = parent, **kwargs: Any
        ) -> Any:
            result = _parent(self, *args, **kwargs)
            self.act(_place)
            return result

        methods[place] = hook
    return type("Lit", (Lit,), methods)


class Wrapped(torch.optim.Optimizer):
    """An optimizer around the one of the module."""

    def __init__(self, inner: Any, module: Any) -> None:
        self.inner, self.module = inner, [module]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    param_groups: Any = property(lambda self: self.inner.param_groups)
    state: Any = property(lambda self: self.inner.state)

    def zero_grad(self, *args: Any) -> None:
        self.inner.zero_grad(*args)

    def step(self, closure: Any = None) -> Any:
        self.module[0].act("wrapper before")
        loss = self.inner.step(closure)
        self.module[0].act("wrapper after")
        return loss


class Wrap(pl.Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers = [Wrapped(each, pl_module) for each in trainer.optimizers]


class Batches:
    """What a loader gives; it acts in its iterator."""

    def __init__(self, module: Lit) -> None:
        self.module = module
        self.batches = torch.randn(BATCHES, 4, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            self.module.act("loader")
            yield batch


def _train(
    place: str, actions: dict[str, Callable[[Any], None]], offload: str | None
) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    module = _with_hooks(actions)(actions)
    callbacks: list[Any] = [Wrap()] if "wrapper" in place else []
    if offload is not None:
        technique = Offloading(cast(Any, offload), min_bytes=4)
        callbacks.insert(0, MemSaveCallback(preset="off", offload=technique, report=False))
    trainer = make_trainer(pl, *callbacks, max_epochs=2, num_sanity_val_steps=0)
    batches: Any = torch.ones(2, 4, WIDTH)
    loader = DataLoader(batches, batch_size=None)
    trainer.fit(module, Batches(module), loader)
    if "test" in place:
        trainer.test(module, loader, verbose=False)
    if "predict" in place:
        trainer.predict(module, loader, return_predictions=False)
    return module.noted, [param.detach().clone() for param in module.parameters()]


def _write(module: Any, way: str) -> None:
    params = [*module.blocks[1].parameters(), *module.head.parameters()]
    WAYS[way](params, [param.detach() * 0.9 + 0.01 for param in params])


def _copy_in(module: Any, way: str) -> None:
    params = [*module.parameters()]
    module.kept = [param.detach().clone() for param in params]
    WAYS[way](params, module.averages)


def _copy_back(module: Any, way: str) -> None:
    kept = module.averages if way == "exchange" else module.kept
    WAYS[way]([*module.parameters()], kept)


def _actions(place: str, way: str, *, is_average: bool) -> dict[str, Callable[[Any], None]]:
    if not is_average:
        return {place: functools.partial(_write, way=way)}
    first, _, last = place.partition("/")
    copy_in, copy_back = (functools.partial(act, way=way) for act in (_copy_in, _copy_back))
    return {first: copy_in, last or f"{first} end": copy_back}


@functools.cache
def _plain(place: str, way: str, *, is_average: bool) -> Any:
    return _train(place, _actions(place, way, is_average=is_average), None)


def _assert_same(what: str, place: str, way: str, *, is_average: bool) -> None:
    noted, weights = _plain(place, way, is_average=is_average)
    found, own = _train(place, _actions(place, way, is_average=is_average), what)
    assert found == noted
    assert all(torch.equal(*pair) for pair in zip(own, weights, strict=True))


def _cells(tables: dict[str, str]) -> list[Any]:
    cells = []
    for what, table in tables.items():
        for line in table.strip().splitlines():
            place, marks = line.strip()[: -2 * len(WAYS)].strip(), line.split()[-len(WAYS) :]
            for way, mark in zip(WAYS, marks, strict=True):
                wrong = pytest.mark.xfail(reason=REASON, strict=mark == "W")
                own, name = [wrong] if mark in "W?" else [], f"{what}-{place}-{way}"
                if mark != "-":
                    cells.append(pytest.param(what, place, way, marks=own, id=name))
    return cells


@pytest.mark.parametrize(("what", "place", "way"), _cells(WRITES))
def test_a_weight_is_written_between_steps(what, place, way):
    _assert_same(what, place, way, is_average=False)


@pytest.mark.parametrize(("what", "place", "way"), _cells(AVERAGES))
def test_averages_are_evaluated(what, place, way):
    _assert_same(what, place, way, is_average=True)
