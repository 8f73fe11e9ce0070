"""Whatever ``configure_optimizers`` returns, its 8-bit forms train and resume as it would."""

import copy
import functools
import importlib
import pickle
from collections import namedtuple
from types import MethodType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_memsave import MemSaveCallback
from lightning_memsave.callbacks.settings.optimizer import OptimizerSetting
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.trainer.configure_optimizers import enable
from tests.callbacks.lit import make_lit, make_trainer, only, rows_of

pytestmark = pytest.mark.usefixtures("no_prediction")

PACKAGES = [lightning.pytorch, pytorch_lightning]


def step_by_hand(module, loss):
    for optimizer in module.optimizers():
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in module.optimizers():
        optimizer.step()
    for scheduler in module.lr_schedulers():
        scheduler.step()


def regression(configure, package=lightning.pytorch, **methods):
    """A module that notes its losses, and the settings and class of optimizers after each step."""

    def training_step(self, batch, batch_idx):
        loss = (self.model(batch) - batch.sin()).square().mean()
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss if self.automatic_optimization else step_by_hand(self, loss)

    def on_train_batch_end(self, *args):
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                momentum = group.get("betas", group.get("momentum"))
                self.trace.append((group["lr"], momentum))
            self.classes.append(type(optimizer))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    steps = {"training_step": training_step, "on_train_batch_end": on_train_batch_end}
    module = make_lit(package, model, configure_optimizers=configure, **(steps | methods))
    module.trace, module.losses, module.classes = [], [], []
    return module


def fit(module, technique=None, *callbacks, package=lightning.pytorch, ckpt_path=None, **settings):
    """Train two epochs of four batches; no technique means that states are only converted."""
    settings = {"max_epochs": 2, "limit_val_batches": 0} | settings
    callback = only(None, optimizer=technique)
    trainer = make_trainer(package, callback, *callbacks, **settings)
    data = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    batches: Any = DataLoader(data, batch_size=8)  # type: ignore[arg-type]
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    return trainer, callback


def adamw(module, **kwargs):
    return optim.AdamW(module.model.parameters(), lr=1e-3, **kwargs)


def two_groups(module):
    first, last = module.model[0], module.model[2]
    groups = [
        {"params": first.parameters(), "lr": 1e-3},
        {"params": last.parameters(), "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, lr=2e-3)


def sgd(module):
    return optim.SGD(module.model.parameters(), lr=1e-2, momentum=0.9)


def with_scheduler(make_optimizer, make_scheduler, **config):
    def configure(module):
        optimizer = make_optimizer(module)
        scheduler = {"scheduler": make_scheduler(optimizer), "interval": "step", **config}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return configure


def sequential(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, 6),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer):
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.ChainedScheduler(parts)


class ThirdPartyScheduler:
    """Not torch's class, with another scheduler inside, as GradualWarmupScheduler."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.after_scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(self, epoch=None):
        self.count += 1
        if self.count > 2:
            self.after_scheduler.step()

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def lists(module):
    optimizer = adamw(module)
    return [optimizer], [{"scheduler": lr_scheduler.StepLR(optimizer, 1), "interval": "epoch"}]


def single_in_tuple(module):
    optimizer = adamw(module)
    return [optimizer], lr_scheduler.StepLR(optimizer, 1)


FORMS = {
    "optimizer": adamw,
    "list": lambda m: [adamw(m)],
    "lists": lists,
    "list and scheduler": single_in_tuple,
    "dict": lambda m: {"optimizer": adamw(m)},
    "list of dicts": lambda m: [with_scheduler(adamw, sequential)(m)],
    "sequential": with_scheduler(adamw, sequential),
    "chained": with_scheduler(adamw, chained),
    "plateau": with_scheduler(
        adamw, lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0), monitor="loss"
    ),
    "two lambdas": with_scheduler(
        two_groups, lambda o: lr_scheduler.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1 / (s + 1)])
    ),
    "one cycle betas": with_scheduler(
        two_groups, lambda o: lr_scheduler.OneCycleLR(o, [0.01, 0.02], total_steps=20)
    ),
    "one cycle momentum": with_scheduler(
        sgd, lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=20)
    ),
    "cyclic momentum": with_scheduler(
        sgd, lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, step_size_up=3)
    ),
    "third party": with_scheduler(adamw, ThirdPartyScheduler),
}


@pytest.mark.parametrize(
    ("form", "package"),
    [
        *((form, PACKAGES[0]) for form in FORMS),
        *((form, PACKAGES[1]) for form in ("sequential", "one cycle momentum", "lists")),
    ],
)
def test_schedules_are_those_of_the_32bit_run(form, package):
    def run(technique):
        module = regression(FORMS[form], package)
        if form == "third party":
            module.lr_scheduler_step = lambda scheduler, metric: scheduler.step()
        fit(module, technique, package=package)
        return module

    expected, module = run(None), run(LowBitOptimizer())
    assert module.trace == expected.trace
    assert len(module.trace) >= 8
    assert all(hasattr(cls, "memsave_kind") for cls in module.classes)
    assert module.losses[-1].item() == pytest.approx(expected.losses[-1].item(), rel=0.02)


def test_two_optimizers_under_manual_optimization():
    def configure(module):
        first = optim.AdamW(module.model[0].parameters(), lr=1e-3)
        second = optim.SGD(module.model[2].parameters(), lr=1e-2, momentum=0.9)
        return [first, second], [lr_scheduler.StepLR(first, 1), lr_scheduler.StepLR(second, 2)]

    runs = []
    for technique in (None, LowBitOptimizer()):
        runs.append(regression(configure, automatic_optimization=False))
        assert fit(runs[-1], technique)[0].global_step == 16
    assert runs[1].trace == runs[0].trace
    assert all(hasattr(cls, "memsave_kind") for cls in runs[1].classes)
    assert runs[1].losses[-1].item() == pytest.approx(runs[0].losses[-1].item(), rel=0.02)


def test_what_the_module_keeps_is_replaced_in_the_fit_and_its_own_again_after_it():
    def configure(module):
        module.table = {"opts": [module.own]}
        module.schedule = lr_scheduler.StepLR(module.own, 1)
        groups.append(dict(module.own.param_groups[0]))
        return module.own

    def kept(module):
        return [module.own, module.table["opts"][0], module.schedule.optimizer]

    groups, seen = list[Any](), list[Any]()
    module = regression(
        configure, on_train_start=lambda self: seen.extend([*kept(self), *self.trainer.optimizers])
    )
    module.own = own = adamw(module)
    fit(module, LowBitOptimizer())
    assert hasattr(type(seen[0]), "memsave_kind")
    assert all(each is seen[0] for each in seen)
    assert all(each is own for each in kept(module))
    assert groups == [own.param_groups[0]]
    assert not own.state
    assert not [name for name in vars(module) if "memsave" in name]


def test_second_fit_starts_over_as_the_first():
    module = regression(FORMS["sequential"])
    fit(module, LowBitOptimizer())
    fit(module, LowBitOptimizer())
    assert module.trace[:8] == module.trace[8:]
    assert all(hasattr(cls, "memsave_kind") for cls in module.classes)
    fit(module)
    assert module.classes[-1] is optim.AdamW


def test_is_overridden_answers_as_before(package):
    helpers = importlib.import_module(f"{package.__name__}.utilities.model_helpers")

    class Plain(package.LightningModule):  # type: ignore[misc,name-defined]
        pass

    def from_cli(pl_module, optimizer):
        return optimizer(pl_module.parameters())

    own, plain, cli = regression(adamw, package), Plain(), Plain()
    cli.net = nn.Linear(64, 64)
    cli.configure_optimizers = MethodType(functools.partial(from_cli, optimizer=optim.AdamW), cli)
    prebuilt = cli.configure_optimizers
    undo = [enable(module, LowBitOptimizer())[1] for module in (own, plain, cli)]
    answers = [helpers.is_overridden("configure_optimizers", m) for m in (own, plain, cli)]
    assert answers == [True, False, True]
    assert hasattr(cli.configure_optimizers(), "memsave_kind")
    for restore in undo:
        restore()
    assert cli.configure_optimizers is prebuilt
    assert "configure_optimizers" not in vars(own)


def test_a_copy_of_the_module_configures_its_own_optimizer():
    module = regression(adamw)
    enable(module, LowBitOptimizer(keep_32bit=("model.0.*",)))
    module.configure_optimizers()
    twin = copy.deepcopy(module)
    optimizer = twin.configure_optimizers()
    assert type(optimizer) is optim.AdamW
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in params] == [id(p) for p in twin.parameters()]


class Named(lightning.pytorch.LightningModule):
    """Pickle finds it by its name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def configure_optimizers(self):
        return optim.AdamW(self.parameters())


def test_a_pickled_module_loads_without_the_technique_and_takes_it_again():
    module = Named()
    enable(module, LowBitOptimizer())
    module.configure_optimizers()
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded.configure_optimizers()) is optim.AdamW
    enable(loaded, LowBitOptimizer())
    assert hasattr(loaded.configure_optimizers(), "memsave_kind")


def test_learning_rate_monitor_logs_the_same_names(tmp_path):
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    logged = []
    for technique in (None, LowBitOptimizer()):
        monitor = LearningRateMonitor(log_momentum=True)
        module = regression(FORMS["one cycle momentum"])
        fit(module, technique, monitor, logger=CSVLogger(tmp_path), log_every_n_steps=1)
        logged.append(monitor.lrs)
    assert logged[0] == logged[1]
    assert list(logged[0]) == ["lr-SGD"]


class TestResume:
    """Stop after epoch 1, go on in a new Trainer, compare with the run that was never stopped."""

    @staticmethod
    def run(path, first, second, configure=FORMS["sequential"], package=lightning.pytorch):
        kinds = {32: None, 8: LowBitOptimizer()}
        straight, stopped, resumed = (regression(configure, package) for _ in range(3))
        fit(straight, kinds[first], package=package)
        trainer, _ = fit(stopped, kinds[first], package=package, max_epochs=1)
        trainer.save_checkpoint(path)
        fit(resumed, kinds[second], package=package, ckpt_path=path)
        assert len(resumed.losses) == 4
        return straight, resumed

    @pytest.mark.parametrize("form", ["sequential", "one cycle momentum"])
    def test_8bit_to_8bit_is_bit_identical(self, tmp_path, form, package):
        straight, resumed = self.run(tmp_path / "x.ckpt", 8, 8, FORMS[form], package)
        assert torch.equal(torch.stack(straight.losses[4:]), torch.stack(resumed.losses))
        assert straight.trace[4:] == resumed.trace
        for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize(
        ("first", "second", "form"),
        [(32, 8, "one cycle momentum"), (8, 32, "one cycle momentum"), (8, 32, "sequential")],
    )
    def test_other_width_goes_on_close_by(self, tmp_path, form, first, second):
        straight, resumed = self.run(tmp_path / "x.ckpt", first, second, FORMS[form])
        torch.testing.assert_close(
            torch.stack(straight.losses[4:]), torch.stack(resumed.losses), rtol=5e-3, atol=0
        )
        assert straight.trace[-len(resumed.trace) :] == resumed.trace
        assert hasattr(resumed.classes[0], "memsave_kind") == (second == 8)

    def test_checkpoint_saved_after_fit_holds_a_named_optimizers_settings(self, tmp_path):
        path = tmp_path / "x.ckpt"
        technique = LowBitOptimizer("lion_8bit", optimizer_kwargs={"betas": (0.8, 0.9)})
        fit(regression(adamw), technique, max_epochs=1)[0].save_checkpoint(path)
        resumed = regression(adamw)
        fit(resumed, technique, ckpt_path=path)
        assert {betas for _, betas in resumed.trace} == {(0.8, 0.9)}

    @pytest.mark.parametrize("bits", [8, 32])
    def test_states_that_are_none_are_refused_in_words(self, tmp_path, package, bits):
        """Each kind of them in `tests/techniques/test_optimizer_state.py`."""
        path = tmp_path / "x.ckpt"
        technique = LowBitOptimizer() if bits == 8 else None
        trainer, _ = fit(regression(adamw, package), technique, package=package, max_epochs=1)
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        (state,) = saved["optimizer_states"]
        for spoiled in ({0: state}, [{**state, "param_groups": None}]):
            torch.save(saved | {"optimizer_states": spoiled}, path)
            with pytest.raises(IncompatibleError, match="it cannot be read"):
                fit(regression(adamw, package), technique, package=package, ckpt_path=path)


def convert(output, technique):
    """Let a module return the output from ``configure_optimizers``."""
    module = make_lit(configure_optimizers=lambda self: output)
    state, _ = enable(module, technique)
    return module.configure_optimizers(), state.handles


class TestForms:
    def test_containers_of_the_user_are_not_changed(self):
        layer, technique = nn.Linear(64, 64), LowBitOptimizer()
        optimizer = optim.AdamW(layer.parameters())
        schedule = lr_scheduler.StepLR(optimizer, 1)
        inner = {"scheduler": schedule, "interval": "step"}
        output = {"optimizer": optimizer, "lr_scheduler": inner, "monitor": "loss"}
        converted, (handle,) = convert(output, technique)
        assert output == {"optimizer": optimizer, "lr_scheduler": inner, "monitor": "loss"}
        assert converted["optimizer"] is handle.target
        assert converted["lr_scheduler"] is inner
        assert schedule.optimizer is handle.target
        handle.undo()
        assert schedule.optimizer is optimizer

    def test_an_optimizer_named_twice_is_replaced_once(self):
        layer, technique = nn.Linear(64, 64), LowBitOptimizer()
        optimizer = optim.AdamW(layer.parameters())
        (a, b), handles = convert((optimizer, optimizer), technique)
        assert a is b
        assert len(handles) == 1

    def test_named_tuples_stay_named_tuples(self):
        pair = namedtuple("pair", ["opt", "other"])
        layer, technique = nn.Linear(64, 64), LowBitOptimizer()
        converted, _ = convert(pair(optim.AdamW(layer.parameters()), 3), technique)
        assert type(converted) is pair
        assert hasattr(converted.opt, "memsave_kind")

    def test_what_is_not_converted_comes_back_as_it_was(self):
        layer, technique = nn.Linear(64, 64), LowBitOptimizer()
        output = [optim.AdamW(layer.parameters(), amsgrad=True)]
        converted, (handle,) = convert(output, technique)
        assert converted is output
        assert "AMSGrad" in handle.skipped[0]
        assert convert(None, technique) == (None, [])

    def test_a_refusal_leaves_nothing_half_done(self):
        layer, other = nn.Linear(64, 64), nn.Linear(64, 64)
        used = optim.AdamW(other.parameters())
        other(torch.ones(64)).sum().backward()
        used.step()
        first = optim.AdamW(layer.parameters())
        before = dict(first.param_groups[0])
        with pytest.raises(IncompatibleError, match="before the first step"):
            convert([first, used], LowBitOptimizer("lion_8bit"))
        assert first.param_groups[0] == before

    def test_beta_cycling_follows_a_named_optimizer(self):
        layer = nn.Linear(64, 64)
        optimizer = optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        new, (handle,) = convert([optimizer, schedule], LowBitOptimizer("adamw_8bit"))
        assert schedule.use_beta1
        layer(torch.ones(64)).sum().backward()
        new[0].step()
        schedule.step()
        assert new[0].param_groups[0]["betas"][0] != 0.9
        handle.undo()
        assert not schedule.use_beta1


def test_a_backbone_unfrozen_later_gets_8bit_state(package):
    """Lightning's BackboneFinetuning: `add_param_group` after the first epoch."""

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    module = make_lit(
        package,
        nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 16)),
        training_step=training_step,
        configure_optimizers=lambda self: optim.AdamW(self.head.parameters()),
    )
    module.backbone, module.head = module.model
    backbone = package.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    callback, data = only(None, optimizer="8bit"), torch.randn(16, 64)
    trainer = make_trainer(package, backbone, callback, max_epochs=2, limit_val_batches=0)
    trainer.fit(module, DataLoader(data, batch_size=8))  # type: ignore[arg-type]
    row = rows_of(callback)["optimizer"]
    assert row.status == "on"
    assert "0 of 2 tensors" in row.details[0]
    assert "1 frozen tensor gets 8-bit state once trained" in row.details[0]
    state = trainer.optimizers[0].state
    assert state[module.backbone.weight]["state1"].dtype == torch.uint8
    assert state[module.head.weight]["state1"].dtype == torch.float32


def test_a_cuda_library_that_does_not_load_lets_auto_yield(monkeypatch):
    import bitsandbytes.cextension as extension

    lost = extension.ErrorHandlerMockBNBNativeLibrary("libcudart.so.13: cannot open")
    monkeypatch.setattr(extension, "lib", lost)
    for optimizer in ("auto", "8bit"):
        callback = MemSaveCallback(optimizer=optimizer)
        trainer, lit = make_trainer(lightning.pytorch, callback), make_lit()
        trainer.strategy._root_device = torch.device("cuda", 0)  # asked for, not used
        setting = callback._settings.find(OptimizerSetting)
        (problem,) = setting.check(trainer, lit)
        assert "CUDA library cannot be loaded (libcudart.so.13" in problem.why
        assert setting.is_asked == (optimizer == "8bit")  # those are refused, the others yield
        setting.yield_to([problem], trainer, lit)
        (row,) = setting.rows
        setting.undo()
        assert row.status == "off"
        assert "CUDA library cannot be loaded" in row.details[0]
