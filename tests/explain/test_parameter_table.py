import json

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_memsave import ConfigurationError, MemoryBreakdown
from lightning_memsave.core.plain_text import as_plain_text
from lightning_memsave.explain.dominant_parts import ModelStates, explain_parameters, model_states
from lightning_memsave.measure.parameters import parameter_table
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory
from lightning_memsave.report.tree import parameter_tree
from lightning_memsave.units import GIB
from tests.cases import MODELS
from tests.tabular_bert import (
    LARGE_PARAMETERS,
    LARGE_VOCABULARY,
    meta_tabular_bert,
)


@pytest.fixture(scope="module")
def large():
    return meta_tabular_bert(LARGE_VOCABULARY)


def plain_tree(table, **options):
    return as_plain_text(parameter_tree(table, **options))


def row_of(table, name):
    return next(row for row in table.modules if row.name == name)


def tied():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100))
    model[1].weight = model[0].weight
    return model


class TestReading:
    @pytest.mark.parametrize("name", MODELS)
    def test_counts_what_torch_counts(self, name):
        model = MODELS[name]()
        table = parameter_table(model)
        assert table.num_parameters == sum(p.numel() for p in model.parameters())
        assert table.num_bytes == sum(p.nbytes for p in model.parameters())
        assert table.buffer_bytes == sum(b.nbytes for b in model.buffers())
        for module_name, module in model.named_modules():
            inside = sum(p.numel() for p in module.parameters())
            # Parameters that are tied to earlier ones count there.
            assert row_of(table, module_name).num_parameters <= inside

    def test_a_module_and_its_state_dict_say_the_same(self):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), tied())
        of_module, of_state = parameter_table(model), parameter_table(model.state_dict())
        assert of_state.num_parameters == of_module.num_parameters
        assert of_state.buffer_bytes == of_module.buffer_bytes
        assert {e.name for e in of_state.entries} == {e.name for e in of_module.entries}

    @pytest.mark.parametrize("state_only", [False, True])
    def test_tied_weights_count_once(self, state_only):
        model = tied()
        table = parameter_table(model.state_dict() if state_only else model)
        assert table.num_parameters == 900
        assert row_of(table, "1").num_parameters == 100
        assert table.entries[0].aliases == ("1.weight",)

    def test_shared_modules_count_once_and_are_listed_twice(self):
        layer = nn.Linear(4, 4)
        table = parameter_table(nn.ModuleDict({"a": layer, "b": layer}))
        assert table.num_parameters == 20
        assert row_of(table, "b").num_parameters == 0
        assert table.entries[0].aliases == ("b.weight",)

    def test_views_into_one_storage_are_no_ties(self):
        base = torch.zeros(20)
        assert parameter_table({"a": base[:10], "b": base[10:]}).num_parameters == 20

    def test_meta_and_fake_tensors(self):
        with torch.device("meta"):
            assert parameter_table(tied()).num_parameters == 900
        with fake_tensors():
            assert parameter_table(tied()).num_parameters == 900

    def test_lazy_parameters_are_told_apart(self):
        table = parameter_table(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
        assert (table.num_parameters, table.num_lazy) == (10, 2)
        assert "2 more have no shape" in plain_tree(table)
        assert "2 lazy parameters" in explain_parameters(table)[-1]

    def test_frozen_parts(self):
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
        model[0].requires_grad_(False)
        table = parameter_table(model)
        assert [entry.is_trainable for entry in table.entries] == [False, False, True, True]
        assert "50.0 % of the parameters are frozen" in explain_parameters(table)[-1]

    def test_forms_of_a_mapping(self):
        table = parameter_table(
            {
                "a.weight": (10, 4),
                "b.weight": ((10, 4), torch.bfloat16),
                "c.weight": ((10, 4), "float16"),
                "d.weight": torch.zeros(10, 4),
                "n.running_mean": (10,),
                "e._extra_state": None,
            }
        )
        assert table.num_bytes == 160 + 80 + 80 + 160
        assert table.buffer_bytes == 40
        assert {entry.dtype for entry in table.entries} == {"float32", "bfloat16", "float16"}

    @pytest.mark.parametrize("value", ["10", 5, (2, -1), ((2, 2), "float99"), None, {"size": 3}])
    def test_refuses_what_is_no_shape(self, value):
        with pytest.raises(ConfigurationError, match=r"`w` is .*Give a tensor, a shape such as"):
            parameter_table({"w": value})

    def test_refuses_what_has_no_parameters(self):
        with pytest.raises(ConfigurationError, match="Pass a module"):
            parameter_table(5)  # type: ignore[arg-type]

    def test_to_dict_is_json(self, large):
        found = json.loads(json.dumps(parameter_table(large).to_dict()))
        assert found["num_parameters"] == LARGE_PARAMETERS
        tables = [m for m in found["modules"] if m["name"].endswith("word_embeddings")]
        assert {m["num_parameters"] for m in tables} == {55_540_032, 722_020_416}


class TestTree:
    def test_equal_blocks_are_one_line(self, large):
        lines = plain_tree(parameter_table(large)).splitlines()
        assert any(line.split()[:4] == ["0-11", "12", "x", "BertLayer"] for line in lines)
        assert max(map(len, lines)) <= 110

    def test_depth_share_and_order(self, large):
        table = parameter_table(large)
        assert len(plain_tree(table, max_depth=0).splitlines()) == 3
        shown = plain_tree(table, max_depth=1, min_share=0)
        names = [line.split()[0] for line in shown.splitlines()[2:]]
        assert names == ["(whole)", "bert", "tab_embeddings", "cls"]
        assert "(2 smaller)" in plain_tree(table, max_depth=1, min_share=0.5)

    def test_own_parameters_of_a_parent_have_a_line(self):
        model = nn.Module()
        model.token, model.head = nn.Parameter(torch.zeros(30)), nn.Linear(10, 6)
        assert "(its own)" in plain_tree(parameter_table(model))

    def test_brackets_are_no_markup(self):
        shown = Console(width=100, record=True)
        with shown.capture() as captured:
            shown.print(parameter_tree(parameter_table({"[red]a.weight": (3,)})))
        assert "[red]a" in captured.get()

    def test_nothing_to_show(self):
        assert "0 parameters" in plain_tree(parameter_table(nn.ReLU()))
        assert "0 parameters" in plain_tree(parameter_table({}))


def stepped_state_bytes(make, parameter):
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


class TestModelStates:
    @pytest.mark.parametrize("shape", [(300, 512), (700, 300), (16,)])
    def test_state_is_what_a_step_of_adamw_makes(self, shape):
        table = parameter_table({"weight": shape})
        expected = stepped_state_bytes(torch.optim.AdamW, nn.Parameter(torch.zeros(shape)))
        costs = model_states(table)
        assert costs.total_bytes - 2 * table.num_bytes == expected
        assert costs.optimizer == "AdamW"

    def test_frozen_parameters_cost_themselves(self):
        model = nn.Linear(10, 10).requires_grad_(False)
        assert model_states(parameter_table(model)).total_bytes == 440

    def test_quantized_weights_are_not_trained(self):
        table = parameter_table({"packed": ((100,), "uint8"), "scale": (10,)})
        assert model_states(table).total_bytes == 100 + 10 * (4 + 4 + 8) + 4

    def test_comes_from_a_prediction(self):
        memory = MemoryBreakdown(
            parameter_bytes=4, gradient_bytes=4, optimizer_state_bytes=2, activation_bytes=1000
        )
        prediction = MemoryPrediction(
            "cpu", "M", memory, {}, (ModuleMemory("head", "Linear", 1, memory),)
        )
        costs = ModelStates.from_prediction(prediction, "AdamW")
        assert costs.by_module == {"head": 10}
        assert (costs.summary, costs.remark) == ("parameters, gradients and optimizer state", "")

    def test_says_which_gradients_are_not_alive_at_the_peak(self):
        early, late = (MemoryBreakdown(parameter_bytes=4, gradient_bytes=n) for n in (1, 4))
        prediction = MemoryPrediction("cpu", "M", early, {"forward": early, "backward": late})
        costs = ModelStates.from_prediction(prediction, "AdamW")
        assert costs.summary == "parameters and gradients"
        assert costs.remark == "of the gradients 1 B of 4 B are alive"


class TestSentences:
    def test_the_tabular_bert(self, large):
        table = parameter_table(large)
        said = explain_parameters(table, model_states(table))
        assert said[0] == (
            "The embedding tables `bert.embeddings.word_embeddings` (867,813 x 832), "
            "`tab_embeddings.word_embeddings` (867,813 x 64) hold 88.9 % of the 874,326,757 "
            "parameters."
        )
        assert said[1].startswith("With AdamW they need 11.59 GiB of the 13.03 GiB that")
        assert said[2].startswith("12 blocks of 7,891,264 parameters")
        assert "hold 10.8 %." in said[2]
        assert "`bert.embeddings.word_embeddings.weight` is also `cls.decoder.weight`" in said[4]
        assert model_states(table).total_bytes / GIB == pytest.approx(13.03, abs=0.01)

    def test_says_the_same_of_a_checkpoint(self, large):
        by_name = [
            s for s in explain_parameters(parameter_table(large.state_dict())) if "88.9" in s
        ]
        assert by_name == explain_parameters(parameter_table(large))[:1]

    def test_evenly_repeated_blocks(self):
        model = nn.Sequential(nn.Embedding(300, 10), *(nn.Linear(100, 100) for _ in range(24)))
        assert explain_parameters(parameter_table(model))[0] == (
            "24 blocks of 10,100 parameters (`1` to `24`, Linear) hold 98.8 % of the 245,400 "
            "parameters."
        )

    def test_one_huge_layer(self):
        said = explain_parameters(parameter_table({"body.w": (8, 8), "head.weight": (5000, 16)}))
        assert said == ["`head.weight` (5,000 x 16) alone holds 99.9 % of the 80,064 parameters."]

    def test_many_embedding_tables(self):
        model = nn.ModuleDict({f"t{i}": nn.Embedding(10 + i, 4) for i in range(26)})
        assert explain_parameters(parameter_table(model))[0] == (
            "The embedding tables `t25` (35 x 4), `t24` (34 x 4), `t23` (33 x 4) and 23 more hold "
            "100.0 % of the 2,340 parameters."
        )

    def test_nothing_dominates(self):
        model = nn.ModuleDict({f"l{i}": nn.Linear(8 + i, 4) for i in range(30)})
        assert "Nothing dominates" in explain_parameters(parameter_table(model))[0]

    def test_no_parameters(self):
        assert explain_parameters(parameter_table(nn.ReLU())) == ["ReLU has no parameters."]
