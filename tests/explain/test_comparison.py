import dataclasses
import json

import pytest
import torch
from torch import nn

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.explain.memory_changes import (
    Change,
    align_names,
    compare_parameters,
    compare_predictions,
    grouped,
)
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory
from tests.tabular_bert import LARGE_VOCABULARY, SMALL_VOCABULARY, meta_tabular_bert


def encoder(num_layers=2, size=8):
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(size, 2, 4 * size, batch_first=True)
        return nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)


def named(comparison):
    return {c.name: (c.before, c.after) for c in comparison.modules}


class TestParameters:
    def test_the_tabular_bert(self):
        found = compare_parameters(
            meta_tabular_bert(SMALL_VOCABULARY), meta_tabular_bert(LARGE_VOCABULARY)
        )
        assert (found.total.before, found.total.after) == (98_510_560, 874_326_757)
        first, second, third = found.modules
        assert (first.name, first.before, first.after) == (
            "bert.embeddings.word_embeddings",
            2_422_784,
            722_020_416,
        )
        assert (second.name, second.before, second.after) == (
            "tab_embeddings.word_embeddings",
            186_368,
            55_540_032,
        )
        # Its matrix is tied to the first table; what has grown is a bias.
        assert (third.name, third.difference) == ("cls.decoder", 864_901)
        assert found.sentences() == [
            "98,510,560 -> 874,326,757 parameters (+775,816,197, 8.88 times)."
        ]

    def test_equal_models(self):
        found = compare_parameters(encoder(), encoder())
        assert found.modules == ()
        assert found.total.difference == 0
        assert str(found).splitlines()[1].startswith("Both have")

    @pytest.mark.parametrize(
        "prefix", ["model.", "module.", "_orig_mod.", "model._orig_mod.", "net.backbone."]
    )
    def test_prefixes_do_not_matter(self, prefix):
        other = {prefix + name: tensor for name, tensor in encoder().state_dict().items()}
        assert compare_parameters(encoder(), other).modules == ()
        assert compare_parameters(other, encoder()).modules == ()

    def test_wrappers_inside_names_do_not_matter(self):
        other = {
            name.replace("layers.", "layers._fsdp_wrapped_module."): tensor
            for name, tensor in encoder().state_dict().items()
        }
        assert compare_parameters(encoder(), other).modules == ()

    def test_a_renamed_root_is_gone_and_new(self):
        a = nn.ModuleDict({"bert": encoder(3), "head": nn.Linear(8, 2)})
        b = nn.ModuleDict({"backbone": encoder(4), "head": nn.Linear(8, 3)})
        found = compare_parameters(a, b)
        assert {c.name: c.status for c in found.modules} == {
            "bert": "gone",
            "backbone": "new",
            "head": "grew",
        }

    def test_other_layers_are_not_taken_for_the_same(self):
        a = nn.ModuleDict({"body": encoder(1), "pooler": nn.Linear(8, 8)})
        b = nn.ModuleDict({"body": encoder(1), "decoder": nn.Linear(8, 8)})
        assert named(compare_parameters(a, b)) == {"decoder": (None, 72), "pooler": (72, None)}

    def test_whole_parts_are_one_line(self):
        found = compare_parameters(encoder(2), encoder(5))
        sizes = {(c.before, c.after, c.status) for c in found.modules}
        assert [c.name for c in found.modules] == ["layers.2", "layers.3", "layers.4"]
        assert len(sizes) == 1
        assert "layers.* (3 x)" in str(found)
        assert {c.status for c in compare_parameters(encoder(5), encoder(2)).modules} == {"gone"}

    def test_sorted_by_what_changed_most_in_either_direction(self):
        a, b = {"a.w": (100,), "b.w": (10,), "c.w": (5,)}, {"a.w": (10,), "b.w": (40,), "c.w": (6,)}
        found = compare_parameters(a, b)
        assert [(c.name, c.status) for c in found.modules] == [
            ("a", "shrank"),
            ("b", "grew"),
            ("c", "grew"),
        ]

    def test_a_head_that_is_no_longer_tied(self):
        tied = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
        untied = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
        tied[1].weight = tied[0].weight
        assert named(compare_parameters(tied, untied)) == {"1": (None, 800)}
        assert named(compare_parameters(untied, tied)) == {"1": (800, None)}
        # A file has kept the other one of two tied names.
        assert compare_parameters(tied, {"1.weight": (100, 8)}).modules == ()

    def test_same_number_in_another_shape(self):
        found = compare_parameters({"a.w": (10, 4)}, {"a.w": (4, 10)})
        assert [c.detail for c in found.modules] == ["w 10 x 4 -> 4 x 10"]
        assert found.sentences() == ["Both have 40 parameters, but not the same."]

    def test_other_precision(self):
        found = compare_parameters({"a.w": (10,)}, {"a.w": ((10,), "bfloat16")})
        assert found.modules == ()
        assert found.parameter_bytes is not None
        assert found.parameter_bytes.difference == -20
        assert found.notes == ("10 parameters are bfloat16 that were float32",)

    def test_nothing_in_common(self):
        found = compare_parameters({"a.w": (10,)}, {"b.c.v": (30,)})
        assert "no parameter names in common" in found.notes[0]

    def test_an_empty_side(self):
        found = compare_parameters(nn.ReLU(), nn.Linear(2, 2))
        assert found.total.difference == 6
        assert "None" not in str(found)

    def test_lazy_parameters_are_named(self):
        assert "no shape yet" in compare_parameters(nn.LazyLinear(2), nn.Linear(2, 2)).notes[-1]

    def test_many_rows_are_cut(self):
        a, b = ({f"l{i}.w": (i * k + 1,) for i in range(1, 40)} for k in (1, 3))
        assert "... and 19 smaller differences" in str(compare_parameters(a, b))

    def test_to_dict_is_json(self):
        found = json.loads(json.dumps(compare_parameters(encoder(1), encoder(2)).to_dict()))
        assert found["kind"] == found["unit"] == "parameters"
        assert found["modules"][0]["status"] == "new"


def test_alignment_of_many_names_is_fast_enough():
    a = [f"layers.{i}.{j}.weight" for i in range(100) for j in range(10)]
    b = [f"model.layers.{i}.{j}.weight" for i in range(120) for j in range(10)]
    assert align_names(a, b) == {name: f"model.{name}" for name in a}
    assert align_names(b, a) == {f"model.{name}": name for name in a}


def prediction(name="Small", batch=1, settings=None, device="cpu", prefix=""):
    linear = MemoryBreakdown(parameter_bytes=400, activation_bytes=100 * batch)
    whole = MemoryBreakdown(parameter_bytes=400, activation_bytes=100 * batch, input_bytes=10)
    return MemoryPrediction(
        device=device,
        model=name,
        peak=whole,
        by_phase={"forward": whole, "backward": linear},
        modules=(
            ModuleMemory(prefix + "fc.proj", "Linear", 100, linear),
            ModuleMemory(prefix + "act.fn", "ReLU", 0, MemoryBreakdown(input_bytes=10)),
        ),
        settings=settings or {},
    )


class TestPredictions:
    def test_by_category_phase_and_module(self):
        found = compare_predictions(prediction(), prediction(batch=8))
        assert (found.total.before, found.total.after) == (510, 1210)
        assert [(c.name, c.difference) for c in found.categories] == [
            ("parameter", 0),
            ("activation", 700),
            ("input", 0),
        ]
        assert [(c.name, c.difference) for c in found.phases] == [
            ("forward", 700),
            ("backward", 700),
        ]
        assert named(found) == {"fc.proj": (500, 1200)}

    def test_what_was_set_and_where(self):
        a = prediction(settings={"optimizer": "8bit", "x": "1"})
        b = prediction(settings={"optimizer": "null", "x": "1"}, device="cuda")
        found = compare_predictions(a, b)
        assert found.settings == (("optimizer", "8bit", "null"),)
        assert found.notes[0].startswith("one is for cpu, one for cuda")
        assert str(found).splitlines()[1].startswith("note: one is for cpu")

    def test_measured_peaks_are_one_line(self):
        a, b = prediction(), prediction(batch=2)
        found = compare_predictions(a, b, measured_bytes=(None, 2048))
        assert found.measured == Change("measured", None, 2048)
        assert "Measured peaks: not measured -> 2.00 KiB." in str(found)
        assert found.to_dict()["measured"]["after"] == 2048
        plain = compare_predictions(a, b)
        assert (plain.measured, plain.to_dict()["measured"]) == (None, None)
        assert "Measured" not in str(plain)

    def test_prefixes_do_not_matter(self):
        found = compare_predictions(prediction(), prediction(prefix="model.", batch=2))
        assert named(found) == {"model.fc.proj": (500, 600)}

    def test_a_phase_on_one_side_only(self):
        b = dataclasses.replace(
            prediction(), by_phase={"optimizer": MemoryBreakdown(other_bytes=5)}
        )
        found = {c.name: (c.before, c.after) for c in compare_predictions(prediction(), b).phases}
        assert found == {"forward": (510, None), "backward": (500, None), "optimizer": (None, 5)}

    def test_nothing_is_cut_off_behind_long_names(self):
        def side(n):
            own = MemoryBreakdown(temporary_bytes=n * 10**8, activation_bytes=n * 10**7)
            long = "transformer.h.7.attention.resid_dropout.layer"
            return dataclasses.replace(
                prediction(),
                peak=own,
                modules=(ModuleMemory("", "S", 0, own), ModuleMemory(long, "D", 0, own)),
            )

        found = compare_predictions(side(1), side(9))
        assert "transformer.h.7" in str(found)
        assert all(len(line) <= 110 for line in str(found).splitlines())


def test_blocks_that_changed_alike_are_one_line():
    def changes(*sizes):
        return [Change(f"h.{i}.fc", before, after) for i, (before, after) in enumerate(sizes)]

    grew, new = grouped(changes((4, 8), (4, 8), (None, 7)))
    assert (grew.name, grew.before, grew.after) == ("h.*.fc (2 x)", 8, 16)
    assert (new.name, new.before, new.after) == ("h.2.fc", None, 7)
    (new,) = grouped(changes((None, 8), (None, 8)))
    assert (new.name, new.before, new.status) == ("h.*.fc (2 x)", None, "new")
    assert len(grouped(changes((4, 8), (4, 9), (None, 8)))) == 3
