from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import MemSaveCallback, predict_memory
from lightning_memsave.callbacks.settings import precision as precision_module
from lightning_memsave.callbacks.settings.low_precision_weights import LowPrecisionWeightsSetting
from lightning_memsave.callbacks.settings.precision import PrecisionSetting
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.techniques.registry import with_preset
from lightning_memsave.trainer.precision import full_name, overflows_in_float16
from lightning_memsave.trainer.trainer import package_of
from tests.callbacks.lit import assert_same, fit, make_lit, make_trainer, quiet, rows_of
from tests.techniques.hugging_face import tiny

pytestmark = pytest.mark.usefixtures("no_prediction")


def only_precision(precision: Any) -> MemSaveCallback:
    return quiet(None, optimizer=None, precision=precision)


def setting_of(precision: str) -> PrecisionSetting:
    arguments = {**MemSaveCallback(preset="off").arguments, "precision": precision}
    return PrecisionSetting(with_preset(arguments) | {"precision": precision})


# torch's CPU half kernels warn about nothing; Lightning says that fp16 AMP becomes bf16 on CPU.
@pytest.mark.filterwarnings("ignore:You passed `Trainer\\(accelerator='cpu', precision='16-mixed'")
@pytest.mark.parametrize(
    "precision", ["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "bf16", 32, "64"]
)
def test_trains_as_a_trainer_that_was_given_it(package, precision):
    dtypes: list[Any] = []

    def training_step(self, batch, batch_idx):
        hidden = self.model.blocks[0].up(batch)
        if torch.is_grad_enabled():  # not in the proof of what the loss is the mean over
            dtypes.append((batch.dtype, hidden.dtype, self.model.head.weight.dtype))
        return self.model(batch)

    lit = make_lit(package, training_step=training_step)
    ours = fit(lit, only_precision(precision), package=package)
    seen, dtypes[:] = list(dtypes), []
    theirs = fit(lit, package=package, precision=full_name(precision))
    assert seen == dtypes
    assert ours[2].precision == theirs[2].precision
    assert type(ours[2].strategy.precision_plugin) is type(theirs[2].strategy.precision_plugin)
    assert_same(ours, theirs)


def precision_row(callback: MemSaveCallback) -> Any:
    return rows_of(callback)["precision"]


def test_the_table_says_what_lightning_made_of_it():
    callback = only_precision("16-mixed")
    with pytest.warns(UserWarning, match="not supported on CPU"):
        fit(make_lit(), callback)
    assert precision_row(callback).value == "bf16-mixed"
    assert "Lightning replaced 16-mixed on this device" in precision_row(callback).details


def test_auto_leaves_what_the_trainer_was_given(package):
    callback = only_precision("auto")
    _, _, trainer = fit(make_lit(package), callback, package=package, precision="bf16-true")
    assert trainer.precision == "bf16-true"
    assert precision_row(callback).details == ("kept: the Trainer was given it",)
    plugin = package.plugins.MixedPrecision("bf16-mixed", "cpu")
    fit(make_lit(package), callback := only_precision("auto"), package=package, plugins=[plugin])
    assert "the plugin `MixedPrecision` decides it" in precision_row(callback).details[0]


def test_an_evaluation_leaves_the_precision(package):
    trainer = make_trainer(package, only_precision("bf16-mixed"))
    trainer.validate(make_lit(package), verbose=False)
    assert trainer.precision == "32-true"


def test_a_second_fit_may_have_another_precision(package):
    trainer, lit = make_trainer(package, only_precision("bf16-mixed")), make_lit(package)
    trainer.fit(lit)
    assert trainer.precision == "bf16-mixed"
    trainer.callbacks = [only_precision("32-true")]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    assert trainer.precision == "32-true"


def conflict(lit: Any, trainer: Any, precision: str, fix: str) -> None:
    trainer.callbacks.insert(0, only_precision(precision))
    before = trainer.precision
    with pytest.raises(IncompatibleError, match=fix):
        trainer.fit(lit)
    assert trainer.precision == before


class TestConflicts:
    """Each conflict of facts/lightning.md B has a message of its own."""

    def test_a_plugin_of_the_trainer(self, package):
        plugin = package.plugins.MixedPrecision("bf16-mixed", "cpu")
        trainer = make_trainer(package, plugins=[plugin])
        conflict(make_lit(package), trainer, "32-true", "Remove that plugin")

    def test_bitsandbytes_precision(self, package):
        """Its own weights are 8-bit; it refuses every device but CUDA, so it is put in by hand."""
        trainer = make_trainer(package)
        plugin = object.__new__(package.plugins.BitsandbytesPrecision)
        trainer._accelerator_connector._precision_plugin_flag = plugin
        lit = make_lit(package)
        problems = setting_of("bf16-mixed").check(trainer, lit)
        assert ["BitsandbytesPrecision" in p.why for p in problems] == [True]
        auto = setting_of("auto")
        assert auto.check(trainer, lit) == []
        auto.apply(trainer, lit)
        assert auto.rows[0].status == "unchanged"
        assert trainer.precision == "32-true"

    @pytest.mark.parametrize(
        ("change", "precision", "fix"),
        [
            ({"mixed_precision": object()}, "bf16-mixed", "Remove `mixed_precision`"),
            (
                {"_config_initialized": True},
                "bf16-mixed",
                "Make a new Trainer with a new strategy.",
            ),
            ("ModelParallelStrategy", "16-mixed", "bf16"),
            ("ModelParallelStrategy", "64-true", "32-true"),
            ("SingleDeviceXLAStrategy", "bf16-mixed", 'precision="bf16-true"'),
        ],
        ids=["FSDP", "DeepSpeed that has started", "model parallel", "model parallel, 64", "XLA"],
    )
    def test_strategies(self, package, change, precision, fix):
        trainer = make_trainer(package)
        if isinstance(change, str):
            trainer.strategy.__class__ = type(change, (type(trainer.strategy),), {})
        else:
            vars(trainer.strategy).update(change)
        (problem,) = setting_of(precision).check(trainer, make_lit(package))
        assert fix in problem.fix

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
    def test_parameters_that_are_half_already(self, package, dtype, precision):
        lit = make_lit(package).to(dtype)
        conflict(lit, make_trainer(package), precision, "Load the model in float32")


class TestAutoOnCuda:
    """What would be chosen on a GPU; the device is the only thing that is pretended."""

    @pytest.fixture(autouse=True)
    def cuda(self, monkeypatch):
        monkeypatch.setattr(
            "lightning.pytorch.strategies.SingleDeviceStrategy.root_device",
            property(lambda self: torch.device("cuda", 0)),
        )

    @pytest.fixture
    def capability(self, request, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)

    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], indirect=True)
    def test_is_native_bfloat16(self, capability):
        assert precision_module._choose(make_trainer(), make_lit()) == ("bf16-mixed", "")

    # Volta and Turing: float16 overflows in T5 and others, which nobody has asked for.
    @pytest.mark.parametrize("capability", [(7, 0), (7, 5)], indirect=True)
    def test_stays_float32_without_it(self, capability):
        chosen, reason = precision_module._choose(make_trainer(), make_lit())
        assert chosen is None
        assert 'pass `precision="16-mixed"`' in reason

    @pytest.mark.parametrize("capability", [(7, 5)], indirect=True)
    @pytest.mark.parametrize("family", ["t5", "gemma"])
    def test_models_that_overflow_stay_float32_and_are_named(self, capability, family):
        trainer, lit = make_trainer(), make_lit()
        lit.model = tiny(family)
        chosen, reason = precision_module._choose(trainer, lit)
        assert chosen is None
        assert f"`{type(lit.model).__name__}` overflow in float16" in reason
        assert "16-mixed" not in reason
        preset = MemSaveCallback(preset="single_gpu")._settings.find(PrecisionSetting)
        assert "16-mixed" not in preset.check(trainer, lit)[0].why
        asked = setting_of("16-true")  # mixed is not for CPUs, which Lightning sees here
        asked.apply(trainer, lit)
        assert "overflow in float16: watch for a loss" in asked.rows[0].details[-1]

    @pytest.mark.parametrize("capability", [(7, 5)], indirect=True)
    def test_a_preset_yields_without_it(self, capability):
        trainer, lit = make_trainer(), make_lit()
        settings = MemSaveCallback(preset="single_gpu")._settings
        kinds = PrecisionSetting, LowPrecisionWeightsSetting
        precision, weights = map(settings.find, kinds)
        (problem,) = precision.check(trainer, lit)
        assert "emulates it, which is slow" in problem.why
        assert '`precision="16-mixed"` is fast on it' in problem.why
        assert ["computes in 32-true" in p.why for p in weights.check(trainer, lit)] == [True]
        assert not precision.is_asked
        assert not weights.is_asked

    @pytest.mark.parametrize("capability", [(7, 5)], indirect=True)
    def test_a_value_is_set_and_said_to_be_slow(self, capability):
        trainer, setting = make_trainer(), setting_of("bf16-mixed")
        assert setting.check(trainer, make_lit()) == []
        setting.apply(trainer, make_lit())
        assert trainer.precision == "bf16-mixed"
        assert "emulates it, which is slow" in setting.rows[0].details[0]

    @pytest.mark.parametrize("capability", [(8, 0)], indirect=True)
    def test_gives_way_to_half_parameters(self, capability):
        chosen, reason = precision_module._choose(make_trainer(), make_lit().bfloat16())
        assert chosen is None
        assert "would stay so" in reason


def test_what_overflows_in_float16():
    assert overflows_in_float16(nn.Linear(2, 2)) == ""
    assert overflows_in_float16(tiny("gpt2")) == ""
    inside = nn.Sequential(tiny("t5"))
    assert "`T5ForConditionalGeneration` overflow" in overflows_in_float16(inside)
    model = tiny("gpt2")
    model.config.dtype = torch.bfloat16
    assert "made for bfloat16" in overflows_in_float16(model)


class TestPredictionForOldGPUs:
    """`predict_memory` leaves out what a run on that GPU would leave out, and says why."""

    def predict(self, gpu: str, trainer_arguments: Any = None, **settings: Any) -> Any:
        tokens = torch.zeros(2, 8, dtype=torch.long)
        return predict_memory(
            tiny("gpt2"),
            {"input_ids": tokens, "labels": tokens},
            gpu=gpu,
            settings=settings,
            trainer_arguments=trainer_arguments,
        )

    def test_a_preset_is_without_bfloat16(self):
        old = self.predict("T4", preset="single_gpu")
        assert "emulates it, which is slow" in old.ineffective["precision"]
        assert "emulates it, which is slow" in old.ineffective["low_precision_weights"]
        assert "without precision 'bf16-mixed': this GPU has no bfloat16" in str(old)
        settings = {"precision": None, "low_precision_weights": None}
        same = self.predict("T4", preset="single_gpu", **settings)
        assert old.peak_bytes == same.peak_bytes
        assert "precision" not in self.predict("A100-40GB", preset="single_gpu").ineffective
        assert self.predict("T4", preset="classic").ineffective.get("precision") is None

    def test_what_is_given_is_set(self):
        given = self.predict("T4", preset="single_gpu", precision="bf16-mixed")
        assert "precision" not in given.ineffective
        given = self.predict("T4", preset="single_gpu", low_precision_weights="kahan")
        assert not {"precision", "low_precision_weights"} & set(given.ineffective)
        chosen = {"precision": "bf16-mixed"}
        assert "precision" not in self.predict("T4", chosen, preset="single_gpu").ineffective


@pytest.mark.parametrize("is_new", [False, True])
def test_tf32_of_torch_is_off_in_the_proof_only(is_new):
    """Torch raises where the old names are read beside the new ones: issue 12, cuda.md A 15."""
    cudnn: Any = torch.backends.cudnn
    new = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    seen: dict[bool, list[list[str]]] = {True: [], False: []}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        seen[torch.is_grad_enabled()].append([backend.fp32_precision for backend in new])
        return self.model(batch)

    before = [backend.fp32_precision for backend in new]
    old = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    try:
        if is_new:
            new[0].fp32_precision = new[1].fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        during = [backend.fp32_precision for backend in new]
        fit(make_lit(training_step=training_step), quiet(None, optimizer=None))
        after = [backend.fp32_precision for backend in new]
    finally:
        if not is_new:
            torch.set_float32_matmul_precision(old[0])
            cudnn.allow_tf32 = old[1]
        for backend, precision in zip(new, before, strict=True):
            backend.fp32_precision = precision
    assert during[0] == "tf32"
    assert after == during
    assert seen[True]
    assert all(precisions == during for precisions in seen[True])
    assert seen[False]
    assert all("tf32" not in precisions for precisions in seen[False])


def test_host_refuses_what_is_no_trainer():
    with pytest.raises(TypeError, match="not a Trainer or LightningModule of lightning"):
        package_of(object())
