import pytest
import torch
from torch import nn

from lightning_memsave.core.blocks import find_blocks, repeated_classes
from lightning_memsave.errors import ConfigurationError
from tests.techniques.hugging_face import tiny


def classes_and_counts(model: nn.Module) -> dict[str, int]:
    names = [type(block.module).__name__ for block in find_blocks(model)]
    return {name: names.count(name) for name in dict.fromkeys(names)}


FAMILIES: dict[str, dict[str, int]] = {
    "bert": {"BertLayer": 3},
    "distilbert": {"TransformerBlock": 3},
    "gpt2": {"GPT2Block": 3},
    "llama": {"LlamaDecoderLayer": 3},
    "t5": {"T5Block": 6},
    "bart BartModel": {"BartEncoderLayer": 3, "BartDecoderLayer": 3},
    "vit": {"ViTLayer": 3},
    "swin": {"SwinLayer": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_blocks_of_hugging_face_families(family):
    """In Swin the layers, and not the stages around them."""
    assert classes_and_counts(tiny(*family.split())) == FAMILIES[family]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(width, 4), nn.Linear(width, 4)


class GptBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(width) for _ in range(4)])
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))


class Gpt(nn.Module):
    """Like litgpt and many teaching models: a ModuleList of own blocks that hold ModuleLists."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 16)
        self.blocks = nn.ModuleList([GptBlock(16) for _ in range(5)])
        self.head = nn.Linear(16, 1000)


class Stage(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Mlp(width) for _ in range(depth)])
        self.downsample = nn.Linear(width, 2 * width)


def test_takes_whole_blocks_not_the_heads_inside():
    assert classes_and_counts(Gpt()) == {"GptBlock": 5}


def test_takes_blocks_not_the_stages_around_them():
    stages = nn.ModuleList([Stage(2, 4), Stage(2, 8), Stage(6, 16), Stage(2, 32)])
    assert classes_and_counts(nn.ModuleDict({"layers": stages})) == {"Mlp": 12}


class MoeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.experts = nn.ModuleList([Mlp(8) for _ in range(8)])


def test_takes_layers_not_the_experts_inside():
    assert classes_and_counts(nn.ModuleList([MoeLayer() for _ in range(3)])) == {"MoeLayer": 3}


def test_lazy_layers_and_torchscript_are_no_obstacle():
    lazy = [nn.Sequential(nn.LazyLinear(8), nn.ReLU()) for _ in range(3)]
    assert find_blocks(nn.Sequential(*lazy, *[Mlp(8) for _ in range(2)])) != []
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        scripted = [torch.jit.script(nn.Sequential(nn.Linear(8, 8))) for _ in range(3)]
    assert find_blocks(nn.Sequential(*scripted)) == []


def test_finds_blocks_inside_sequential():
    model = nn.Sequential(nn.Linear(4, 8), *[Mlp(8) for _ in range(3)], nn.Linear(8, 2))
    assert [block.name for block in find_blocks(model)] == ["1", "2", "3"]
    inner = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    assert [block.name for block in find_blocks(nn.Sequential(*inner))] == ["0", "1", "2"]


def test_finds_torch_encoder_and_decoder():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 3)
    assert classes_and_counts(nn.ModuleList([encoder, decoder])) == {
        "TransformerEncoderLayer": 2,
        "TransformerDecoderLayer": 3,
    }


def test_finds_several_families_in_one_model():
    vit = tiny("vit")
    decoder = nn.ModuleList([Mlp(16) for _ in range(3)])
    model = nn.ModuleDict({"encoder": vit, "decoder": decoder})
    assert classes_and_counts(model) == {"ViTLayer": 3, "Mlp": 3}


def test_small_repeated_parts_beside_the_transformer_are_no_blocks():
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(4)]
    model = nn.ModuleDict({"body": nn.Sequential(*layers), "probes": nn.ModuleList([Mlp(2)] * 1)})
    model["probes"].append(Mlp(2))
    assert classes_and_counts(model) == {"TransformerEncoderLayer": 4}


def test_a_model_without_repetition_has_none():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2))
    assert find_blocks(model) == []
    assert repeated_classes(model) == ""


def test_a_module_under_two_names_is_one_block():
    block = Mlp(4)
    blocks = find_blocks(nn.ModuleList([block, Mlp(4), block]))
    assert [b.name for b in blocks] == ["0", "1"]


@pytest.mark.parametrize(
    "selector",
    [
        "GptBlock",
        GptBlock,
        r"re:blocks\.\d+",
        lambda name, module: isinstance(module, GptBlock),
        ["GptBlock", GptBlock],
    ],
    ids=["class name", "class", "re:", "predicate", "several"],
)
def test_blocks_can_be_chosen(selector):
    assert [b.name for b in find_blocks(Gpt(), selector)] == [f"blocks.{i}" for i in range(5)]


def test_a_choice_of_nested_modules_takes_the_outermost():
    names = [b.name for b in find_blocks(Gpt(), ["GptBlock", "Head", nn.Embedding])]
    assert names == ["embedding", *[f"blocks.{i}" for i in range(5)]]


@pytest.mark.parametrize("selector", ["re:(", 3, (), "", [None]])
def test_refuses_what_chooses_nothing(selector):
    with pytest.raises(ConfigurationError, match=r"Pass|Write"):
        find_blocks(Gpt(), selector)
