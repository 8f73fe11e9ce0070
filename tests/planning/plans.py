"""Models to plan, and all of their plans."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from lightning_memsave.api import make_what_if
from lightning_memsave.core.technique import Exactness
from lightning_memsave.planning.recorded_blocks import value_of
from lightning_memsave.planning.search import PlanSearch
from lightning_memsave.planning.step_time import Rates, step_seconds
from lightning_memsave.planning.variants import Variants
from lightning_memsave.prediction.cuda.gpus import GPUS
from lightning_memsave.prediction.what_if import WhatIf

OPEN = ("activation_checkpointing", "optimizer_in_backward")
"""Arguments that the tests plan, for which all plans can be listed."""
RATES = Rates.of_gpu(GPUS["T4"].throughput)  # type: ignore[arg-type]


class ConvBlock(nn.Module):
    """Changes the number of channels, so that no two blocks in a row are equal."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@dataclass(frozen=True)
class Planned:
    """A model, its batch, and how many blocks it has."""

    model: nn.Module
    batch: Any
    num_blocks: int
    kinds: tuple[str, ...] = ("nested", "full", "selective")


def _tokens(number: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(number, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _encoder() -> Planned:
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)]
    return Planned(nn.Sequential(*layers), torch.ones(8, 32, 32), 3)


def _gpt2() -> Planned:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=6, n_head=2, n_positions=32, vocab_size=200, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return Planned(transformers.GPT2LMHeadModel(config), _tokens(4, 32), 6)


def _bert() -> Planned:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=8, num_attention_heads=2, intermediate_size=64,
        vocab_size=200,
    )  # fmt: skip
    return Planned(transformers.BertForMaskedLM(config), _tokens(4, 32), 8)


def _large_table() -> Planned:
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128,
        vocab_size=8000,
    )  # fmt: skip
    return Planned(transformers.BertForMaskedLM(config), _tokens(8, 64), 4)


def _t5() -> Planned:
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=200, use_cache=False
    )
    config.decoder_start_token_id = 0
    return Planned(transformers.T5ForConditionalGeneration(config), _tokens(4, 32), 4)


def _convolutions() -> Planned:
    widths = (3, 16, 32, 64, 32)
    blocks = [ConvBlock(a, b) for a, b in itertools.pairwise(widths)]
    # `nn.ReLU(inplace=True)` is not there; a block's parts have no layers inside: never nested.
    return Planned(nn.Sequential(*blocks), torch.ones(4, 3, 16, 16), 4, ("full", "selective"))


def _no_blocks() -> Planned:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return Planned(model, torch.ones(64, 64), 0, ())


PLANNED = {
    "encoder": _encoder,
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "convolutions": _convolutions,
    "no blocks": _no_blocks,
}


@functools.cache
def planned(name: str) -> Planned:
    torch.manual_seed(0)
    return _large_table() if name == "large table" else PLANNED[name]()


def what_if_of(name: str, device: str = "cpu", **settings: Any) -> WhatIf:
    it = planned(name)
    return make_what_if(it.model, it.batch, settings={**settings}, device=device)


def with_nothing_on(name: str, device: str, open_arguments: tuple[str, ...]) -> WhatIf:
    what_if = what_if_of(name, device)
    off = dict.fromkeys(sorted(ALL - set(open_arguments)))
    what_if.step = what_if.step.with_settings({**off, "preset": None})
    return what_if


_shared = functools.cache(with_nothing_on)


def search_of(
    name: str,
    device: str = "cpu",
    open_arguments: tuple[str, ...] = OPEN,
    make: Callable[..., WhatIf] = _shared,
) -> PlanSearch:
    """Search plans, with the predictions of earlier searches, unless another ``make`` is given."""
    what_if = make(name, device, open_arguments)
    return PlanSearch(Variants(what_if, open_arguments, Exactness.APPROXIMATE, RATES))


ALL = {
    *("precision", "micro_batch_size", "attention"),
    *("chunked_cross_entropy", "optimizer", "low_precision_weights", *OPEN),
}


def all_plans(name: str, device: str = "cpu") -> Iterator[tuple[int, float, Mapping[str, Any]]]:
    """Predict every plan whole.

    Yields:
        Bytes on the device, seconds, and the settings.
    """
    it, what_if = planned(name), _shared(name, device, OPEN)
    for kinds in dict.fromkeys(_assignments(it.num_blocks, it.kinds)):
        for is_in_backward in (None, True):
            changes = {
                "activation_checkpointing": value_of(kinds),
                "optimizer_in_backward": is_in_backward,
            }
            # As a search asks, so that both predict a plan once.
            unused = {} if changes["activation_checkpointing"] else {"blocks": None}
            prediction = what_if.predict(changes | unused)
            yield (
                prediction.device_bytes,
                sum(step_seconds(prediction.work, RATES).values()),
                changes,
            )


# Kinds in their order, any number of blocks of each.
def _assignments(number: int, kinds: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for cuts in itertools.combinations_with_replacement(range(number + 1), len(kinds)):
        ends = (0, *cuts, number)
        sizes = [b - a for a, b in itertools.pairwise(ends)]
        yield tuple(kind for kind, n in zip((*kinds, "keep"), sizes, strict=True) for _ in range(n))
