"""One entry is enough: a technique that is registered for a moment is found everywhere."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_memsave.analysis.explain import explain_memory
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.cli.main import main
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.techniques.registry import (
    STACKS,
    Entry,
    entries,
    registered,
    values_of,
)
from tests.callbacks.lit import loader, make_lit, make_trainer
from tests.cases import CASES, MODELS, WIDTH, Case
from tests.techniques import test_contract as contract


@dataclass(frozen=True)
class InPlace(Technique[nn.Module]):
    """Write the outputs of leaky ReLUs over their inputs."""

    name: ClassVar[str] = "in_place"
    argument: ClassVar[str] = "in_place"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    source: ClassVar[str] = "torch.nn.LeakyReLU(inplace=True)"
    offers: ClassVar[tuple[Offer, ...]] = (Offer("leaky ReLU in place", True),)

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        if not facts.is_strategy("SlowStrategy"):
            return []
        return [Problem(written, f"not with {facts.strategy}", "Train in one process.")]

    def check(self, target: nn.Module) -> list[Problem]:
        return []

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        found = [m for m in target.modules() if isinstance(m, nn.LeakyReLU) and not m.inplace]
        for module in found:
            module.inplace = True

        def undo() -> None:
            for module in found:
                module.inplace = False

        changes = [f"{len(found)} layers write over their inputs"] if found else []
        return Handle(target, changes, ["no leaky ReLU was found"] if not found else [], [undo])


ON = ("classic", "single_gpu")
IN_PLACE: dict[str, Any] = {"in_place": True}  # type checkers know no such argument


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = [m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.LeakyReLU())]
        self.layers = nn.Sequential(*wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class SlowStrategy(SingleDeviceStrategy):
    pass


@pytest.fixture
def toy() -> Iterator[type[InPlace]]:
    with registered(Entry.of(InPlace, classic=True, single_gpu=True)):
        yield InPlace


def settings_of(callback: MemSaveCallback) -> dict[str, str]:
    return {row.name: row.status for row in callback.rows}


class TestToy:
    def test_is_in_the_table_and_undone_after_fit(self, toy):
        lit = make_lit(lightning.pytorch, Net())
        during = []

        class Look(lightning.pytorch.Callback):
            def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
                during.append([m.inplace for m in lit.modules() if isinstance(m, nn.LeakyReLU)])

        callback = MemSaveCallback(**IN_PLACE, report=False)
        make_trainer(lightning.pytorch, callback, Look(), max_steps=2).fit(lit, loader())
        row = next(row for row in callback.rows if row.name == "in_place")
        assert (row.value, row.status, row.exactness) == ("True", "on", "bitwise")
        assert row.details == ("3 layers write over their inputs",)
        assert during == [[True] * 3] * 2
        assert not any(m.inplace for m in lit.modules() if isinstance(m, nn.LeakyReLU))

    def test_is_refused_where_it_was_asked_for_and_changes_nothing(self, toy):
        lit = make_lit(lightning.pytorch, nn.Linear(WIDTH, 1))
        trainer = make_trainer(lightning.pytorch, MemSaveCallback(**IN_PLACE))
        with pytest.raises(Exception, match="no leaky ReLU was found"):
            trainer.fit(lit, loader())
        with pytest.raises(ConfigurationError, match="`in_place=3` is not a valid value"):
            MemSaveCallback(**(IN_PLACE | {"in_place": 3}))

    def test_says_itself_which_trainers_it_conflicts_with(self, toy):
        def trainer_with(callback: MemSaveCallback) -> Any:
            return make_trainer(lightning.pytorch, callback, strategy=SlowStrategy(), max_steps=1)

        with pytest.raises(IncompatibleError, match="`in_place=True`: not with SlowStrategy"):
            trainer_with(MemSaveCallback(**IN_PLACE)).fit(make_lit(lightning.pytorch, Net()))
        callback = MemSaveCallback(report=False)
        trainer_with(callback).fit(make_lit(lightning.pytorch, Net()), loader())
        assert settings_of(callback)["in_place"] == "off"

    @pytest.mark.parametrize("stack", STACKS)
    def test_is_in_stacks(self, toy, stack):
        assert values_of(stack)["in_place"] == (True if stack in ON else None)
        lit = make_lit(lightning.pytorch, Net())
        callback = MemSaveCallback(stack=stack, precision=None, optimizer=None, report=False)
        make_trainer(lightning.pytorch, callback, max_steps=1).fit(lit, loader())
        is_on = settings_of(callback).get("in_place") == "on"
        assert is_on == (stack in ON)

    def test_is_in_a_bare_callback_of_memsave_predict(self, toy, tmp_path, monkeypatch, capsys):
        (tmp_path / "net.py").write_text(inspect.getsource(Net).replace("WIDTH", str(WIDTH)))
        source = (tmp_path / "net.py").read_text()
        (tmp_path / "net.py").write_text(f"from torch import Tensor, nn\n\n\n{source}")
        monkeypatch.chdir(tmp_path)
        batch = f"float32[64,{WIDTH}]"
        command = ["predict", "net.py:Net", "--batch", batch, "--device", "cpu", "--json"]
        peaks = {}
        for flag in ("--memsave", "--no-memsave"):
            assert main([*command, flag]) == 0
            found = json.loads(capsys.readouterr().out)
            peaks[flag] = found["settings"].get("in_place"), found["peak_bytes"]
        assert peaks["--memsave"][0] == "True"
        assert peaks["--no-memsave"][0] is None

    def test_is_a_remedy_that_says_what_to_type(self, toy):
        remedies = explain_memory(Net(), torch.ones(512, WIDTH), device="cpu", factors=[]).remedies
        assert remedies is not None
        remedy = next(r for r in remedies if r.name == "leaky ReLU in place")
        assert remedy.how == 'MemSaveCallback(stack="off", in_place=True)'
        assert remedy.saved_bytes > 0

    def test_needs_a_case_in_the_contract_and_is_held_to_it(self, toy, monkeypatch):
        with pytest.raises(AssertionError):
            contract.test_every_registered_technique_has_a_case()
        variant = InPlace()
        monkeypatch.setitem(CASES, toy.name, Case(variants=(variant,)))
        contract.test_every_registered_technique_has_a_case()
        monkeypatch.setitem(MODELS, "relu", Net)
        contract.test_trains_as_exactly_as_it_declares(variant, "relu")
        contract.test_one_fit_keeps_every_promise(variant, "relu")
        contract.test_repr_makes_an_equal_technique(variant)


def test_nothing_is_left_of_it():
    assert "in_place" not in [entry.argument for entry in entries()]
    with pytest.raises(ConfigurationError, match="`in_place` is not an argument"):
        MemSaveCallback(**IN_PLACE)


def test_signature_has_every_entry_and_its_details():
    known = inspect.signature(MemSaveCallback).parameters
    for entry in entries():
        assert known[entry.argument].default == "auto", entry.argument
        for name, off in entry.details.items():
            assert known[name].default == off, name
