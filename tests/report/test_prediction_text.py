"""Predictions as text: what is shown, and what is summed up."""

import re
from dataclasses import replace

import pytest
import torch
from matplotlib import pyplot
from rich.console import Console

from lightning_memsave import ConfigurationError, predict_memory
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.plain_text import as_plain_text
from lightning_memsave.prediction.cuda.gpus import parse_gpu
from lightning_memsave.prediction.result import (
    PHASES,
    MemoryPrediction,
    ModuleMemory,
    TensorMemory,
)
from lightning_memsave.prediction.work import Kernel, Work
from lightning_memsave.report.text import rich_prediction, show, variants_table
from lightning_memsave.report.tree import module_tree
from lightning_memsave.units import GIB, MIB

BLOCK = MemoryBreakdown(parameter_bytes=2 * MIB, activation_bytes=MIB)
MODULES = (
    ModuleMemory("", "Net", 0, MemoryBreakdown(input_bytes=MIB)),
    ModuleMemory("head", "Linear", 10, MemoryBreakdown(parameter_bytes=4 * MIB)),
    ModuleMemory("norm", "LayerNorm", 1, MemoryBreakdown(parameter_bytes=100)),
    ModuleMemory("bias", "Bias", 1, MemoryBreakdown(parameter_bytes=100)),
    ModuleMemory("blocks", "ModuleList", 0, MemoryBreakdown()),
    *(
        ModuleMemory(f"blocks.{i}{inside}", name, count, memory)
        for i in range(3)
        for inside, name, count, memory in (
            ("", "Block", 0, MemoryBreakdown()),
            (".fc", "Linear", 5, BLOCK),
        )
    ),
)
PEAK = sum((module.memory for module in MODULES), MemoryBreakdown())


def make_prediction(**changes):
    prediction = MemoryPrediction(
        "cuda", "Net", PEAK, {"forward": PEAK}, MODULES, reserved_bytes=20 * MIB, context_bytes=MIB
    )
    return replace(prediction, **changes)


def plain_prediction(prediction, **options):
    return as_plain_text(rich_prediction(prediction, **options))


def rows_of(text):
    """Cells by the first one, with the names of nested modules without their indentation."""
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows}


class TestModuleTree:
    def test_equal_blocks_share_a_line_with_their_insides(self):
        rows = rows_of(as_plain_text(module_tree(MODULES, max_depth=None)))
        assert rows["0-2"] == ["3 x Block", "9.00 MiB", "6.00 MiB", "3.00 MiB", "-"]
        assert rows["fc"] == ["3 x Linear", "9.00 MiB", "6.00 MiB", "3.00 MiB", "-"]

    def test_each_level_adds_up_and_starts_with_the_largest(self):
        lines = as_plain_text(module_tree(MODULES, max_depth=1)).splitlines()
        assert [line.split()[0] for line in lines] == [
            *("module", "(whole)", "blocks", "head", "(its", "(2"),
        ]
        rows = rows_of("\n".join(lines))
        assert rows["(whole)"][1] == "14.00 MiB"
        assert rows["(2 smaller)"] == ["200 B", "200 B", "-", "-"]
        assert rows["(its own)"] == ["1.00 MiB", "-", "-", "1.00 MiB"]

    def test_blocks_of_other_sizes_stay_apart(self):
        other = ModuleMemory("blocks.3", "Block", 7, BLOCK)
        rows = rows_of(as_plain_text(module_tree((*MODULES, other))))
        assert {"0-2", "3"} <= rows.keys()

    def test_modules_without_a_root(self):
        rows = rows_of(as_plain_text(module_tree(MODULES[1:2])))
        assert rows["(whole)"] == ["4.00 MiB", "4.00 MiB"]


class TestPrediction:
    def test_what_the_device_must_have(self):
        rows = rows_of(plain_prediction(make_prediction()))
        assert rows["tensors at the peak"] == ["14.00 MiB"]
        assert rows["gaps in torch's allocator"] == ["6.00 MiB"]
        assert rows["used if there is room"] == ["21.00 MiB"]
        assert rows["total"] == ["14.00 MiB", "14.00 MiB"]  # of the categories, below
        assert rows["Net, 27 parameters: 21.00 MiB for a training step on cuda"] == []

    def test_a_cpu_has_no_allocator(self):
        text = plain_prediction(make_prediction(device="cpu", reserved_bytes=None, context_bytes=0))
        assert "device memory needed" not in text

    def test_says_when_where_and_what_was_assumed(self):
        text = plain_prediction(
            make_prediction(
                peak=replace(PEAK, host_bytes=MIB),
                peak_phase="backward",
                peak_op="aten.mm",
                peak_module="head",
                settings={"precision": "16-mixed", "optimizer": "'8bit'"},
                assumptions=("one",),
                guesses=("two",),
                ineffective={"blocks": "7: there are none"},
            )
        )
        for line in (
            "with precision 16-mixed, optimizer '8bit'",
            "peak in backward (aten.mm in `head`)",
            "and 1.00 MiB on the host: gradients, kept to repeat a batch after an OOM",
            "without blocks 7: there are none",
            "assumed: one",
            "guessed: two",
        ):
            assert line in text.splitlines()

    def test_equal_tensors_of_blocks_share_a_line(self):
        def tensor(module, num_bytes):
            return TensorMemory("activation", num_bytes, module, "aten.mm", "forward", (2,), "int8")

        tensors = [tensor(f"blocks.{i}.fc", MIB) for i in range(3)] + [tensor("head", 7)]
        text = plain_prediction(make_prediction(largest_tensors=tuple(tensors)))
        row = ["int8[2]", "blocks.*.fc", "mm", "1.00 MiB"]
        assert rows_of(text)["3 x activation"] == row
        text = plain_prediction(make_prediction(largest_tensors=tuple(tensors)), max_tensors=1)
        assert "int8[2]       head" not in text

    def test_a_name_is_never_read_as_markup(self):
        assert "[bold]Net" in plain_prediction(make_prediction(model="[bold]Net"))

    def test_printed_to_a_pipe_it_is_the_plain_text(self, capsys):
        show(rich_prediction(make_prediction()))
        assert capsys.readouterr().out == plain_prediction(make_prediction()) + "\n"

    def test_printed_to_a_terminal_it_has_styles(self, capsys, monkeypatch):
        monkeypatch.setattr(Console, "is_terminal", True)
        show(rich_prediction(make_prediction()))
        assert "Net, 27 parameters" in capsys.readouterr().out


class TestReading:
    def test_print_shows_the_peak_by_category(self):
        lines = str(make_prediction(guesses=("two",))).splitlines()
        assert lines[0] == "Net, 27 parameters: 21.00 MiB for a training step on cuda"
        assert rows_of("\n".join(lines))["parameter"][:2] == ["10.00 MiB", "71.4%"]
        assert lines[-1] == "guessed: two"
        assert len(lines) < 20

    def test_repr_is_one_line(self):
        assert repr(make_prediction()) == "<MemoryPrediction of Net: 21.00 MiB on cuda>"

    def test_a_notebook_draws_the_same(self):
        shown = make_prediction()._repr_mimebundle_((), ())
        assert "21.00 MiB for a training step" in shown["text/html"]
        assert "activation" in shown["text/plain"]

    def test_plot_stacks_the_categories_over_the_step(self):
        prediction = predict_memory(torch.nn.Linear(8, 4), torch.ones(2, 8), device="cpu")
        fig, own = pyplot.subplots()
        assert prediction.plot(own) == (fig, own)
        texts = [text.get_text() for text in own.get_legend().get_texts()]
        assert texts[0] == "parameter"
        assert "optimizer state" in texts
        highest = max(path.vertices[:, 1].max() for c in own.collections for path in c.get_paths())
        assert highest == prediction.peak_bytes
        assert [tick.get_text() for tick in own.get_xticklabels()] == [*PHASES]
        pyplot.close(fig)
        with pytest.raises(ConfigurationError, match=r"Write for example `fig, ax = plt\.sub"):
            prediction.plot("x")


class TestFit:
    def fit(self, gpu, **changes):
        return make_prediction(**changes).fits(parse_gpu(gpu))

    def test_what_is_left(self):
        fit = self.fit("1GiB")
        assert (fit.fits, fit.spare_bytes, fit.note) == (True, GIB - 21 * MIB, "")
        assert str(fit) == "fits 1GiB (1.00 GiB): it needs 21.00 MiB, 1003.00 MiB left"

    def test_too_much(self):
        fit = self.fit("1GiB", reserved_bytes=3 * GIB, peak=PEAK * 200)
        assert (fit.fits, fit.spare_bytes) == (False, -2 * GIB - MIB)
        assert "does not fit 1GiB" in str(fit)
        assert fit.note == ""

    def test_fragmentation_may_be_all_that_is_in_the_way(self):
        fit = self.fit("1GiB", reserved_bytes=3 * GIB)
        assert "expandable_segments:True" in fit.note

    @pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
    def test_a_setting_is_not_advised_where_it_is_set(self, monkeypatch, variable):
        monkeypatch.setenv(variable, "expandable_segments:True")
        assert self.fit("1GiB", reserved_bytes=3 * GIB).note == ""
        close = self.fit("1GiB", reserved_bytes=2 * GIB, least_reserved_bytes=GIB // 2)
        assert close.note.endswith("has to return cached memory to the driver, which costs time")

    def test_what_returning_the_cache_costs(self):
        fit = self.fit("1GiB", reserved_bytes=2 * GIB, least_reserved_bytes=GIB // 2)
        assert fit.fits
        assert fit.needed_bytes == GIB // 2 + MIB
        assert "has to return cached memory to the driver, which costs time" in fit.note

    def test_only_workspaces_are_called_cublas(self):
        peak = replace(PEAK, other_bytes=5 * MIB)
        rows = rows_of(plain_prediction(make_prediction(peak=peak, workspace_bytes=2 * MIB)))
        assert rows["cuBLAS"][0] == "2.00 MiB"
        assert rows["other"][0] == "3.00 MiB"

    def test_a_close_result_is_called_one(self):
        fit = self.fit("1GiB", reserved_bytes=GIB - 2 * MIB)
        assert fit.fits
        assert fit.note.startswith("barely")
        text = plain_prediction(make_prediction(), fits=[fit])
        assert f"1GiB: {fit.note}." in text

    def test_says_how_fast_a_known_gpu_should_be(self):
        """Half to twice the estimate, for which products reach 65 % of the peak."""
        products = Kernel("forward", "product", "float16", 65_000_000_000, 1)
        prediction = make_prediction(work=Work(((products, 100.0),), 8, 4096))
        fits = [prediction.fits(parse_gpu(name)) for name in ("T4", "16GiB")]
        text = " ".join(plain_prediction(prediction, fits=fits).split())
        said = "estimated 13,000 to 41,000 tokens per second, 32 to 100 % of the GPU's dense peak"
        assert f"T4: {said}." in text
        assert text.count("tokens per second") == 1

    def test_settings_side_by_side(self):
        small = make_prediction(reserved_bytes=10 * MIB)
        cases = [
            (name, prediction, [prediction.fits(parse_gpu("T4"))])
            for name, prediction in (("plain", make_prediction()), ("small", small))
        ]
        rows = rows_of(as_plain_text(variants_table(cases)))
        assert rows["plain"] == ["21.00 MiB", "14.00 MiB", "yes"]
        assert rows["small"] == ["11.00 MiB", "-10.00 MiB", "14.00 MiB", "yes"]
