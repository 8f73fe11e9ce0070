"""Deep models predicted from fewer blocks are what they are predicted directly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave.analysis.predict import predict_memory
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.prediction.repeated_blocks import (
    RepeatedBlocks,
    checkpointing_period,
    extrapolate,
    find_repeated_blocks,
)
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory
from tests.analysis.architectures import SIZES, causal_lm_batch, masked_lm_batch

MIN_NUM_BLOCKS = 30
CHECKED_DEPTH = 13


def _make(name: str, num_blocks: int) -> Callable[[], nn.Module]:
    import transformers

    sizes = SIZES | {"num_hidden_layers": num_blocks}
    if name == "roberta":
        config: Any = transformers.RobertaConfig(**sizes)
        return lambda: transformers.RobertaForMaskedLM(config)
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2)
        return lambda: transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=num_blocks, n_head=4)
    return lambda: transformers.GPT2LMHeadModel(config)


OFTEN = [("roberta", 30, "all", "cpu"), ("gpt2", 48, 0.5, "cuda")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "num_blocks", "checkpointing", "device"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.exhaustive)
        for case in (
            (name, num_blocks, checkpointing, device)
            for name, num_blocks in (("roberta", 30), ("llama", 36), ("gpt2", 48))
            for checkpointing in (None, "all", "nested", "every:2", "every:3", 0.5, 0.75)
            if checkpointing in (None, "all", "nested") or num_blocks == 48
            for device in ("cpu", "cuda")
        )
    ],
)
def test_line_hits_what_is_predicted_directly(
    name: str, num_blocks: int, checkpointing: str | float | None, device: Any
) -> None:
    make = _make(name, num_blocks)
    batch = masked_lm_batch() if name == "roberta" else causal_lm_batch()
    settings = {"activation_checkpointing": checkpointing}
    line = predict_memory(make, batch, settings=settings, device=device)
    direct = predict_memory(make, batch, settings=settings, device=device, may_extrapolate=False)
    assert line.is_extrapolated
    assert not direct.is_extrapolated
    # To the byte: none of these models has its peak elsewhere when it is deep.
    assert line.peak_bytes == direct.peak_bytes
    assert line.peak_phase == direct.peak_phase
    for phase, memory in direct.by_phase.items():
        assert line.by_phase[phase].total_bytes == memory.total_bytes
    assert line.num_parameters == direct.num_parameters
    assert line.modules == direct.modules
    assert sum(m.memory.total_bytes for m in line.modules) == line.peak_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "num_tokens", [64, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (8, 400))]
)
def test_gradients_that_may_stay_are_no_more_than_in_a_direct_prediction(num_tokens: int) -> None:
    kept, peaks = [], []
    for may_extrapolate in (True, False):
        found = predict_memory(
            _make("gpt2", 30),
            {key: torch.ones(4, num_tokens, dtype=torch.long) for key in ("input_ids", "labels")},
            settings={"activation_checkpointing": "all", "optimizer_in_backward": True},
            trainer_arguments={"gradient_clip_val": 1.0},
            may_extrapolate=may_extrapolate,
        )
        assert found.is_extrapolated == may_extrapolate
        kept.append(found.kept_gradient_bytes)
        peaks.append(found.peak_bytes)
    # A direct prediction counts whole groups, of at most a block: 12 * 64 * 64 weights and more.
    block_bytes = 4 * 50_000
    assert 0.3 * kept[1] < kept[0] < kept[1] + block_bytes
    assert peaks[0] == peaks[1]


class _Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Deep(nn.Module):
    """Equal blocks; the outputs of all of them are compared with each other if asked for."""

    def __init__(self, num_blocks: int, *, compares: bool = False) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([_Block() for _ in range(num_blocks)])
        self.compares = compares

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        if not self.compares:
            return x
        every = torch.stack(outputs)  # (L, B, H)
        return (every[:, None] - every[None]).square()  # (L, L, B, H)


def test_predicts_directly_what_grows_in_no_line() -> None:
    batch = torch.ones(64, 16)
    module = _Deep(MIN_NUM_BLOCKS, compares=True)
    prediction = predict_memory(module, batch, device="cpu")
    assert not prediction.is_extrapolated
    direct = predict_memory(module, batch, device="cpu", may_extrapolate=False)
    assert prediction.peak_bytes == direct.peak_bytes
    told = [line for line in prediction.assumptions if line.startswith("Predicted directly")]
    assert len(told) == 1
    assert f"to {CHECKED_DEPTH} blocks" in told[0]


class _Head(nn.Module):
    """Deep, with a head whose backward pass needs more than that of few blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(64) for _ in range(num_blocks)])
        self.head = nn.Linear(16, 4000)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).exp().exp()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tells_of_one_and_the_same_step_where_depth_moves_the_peak(device: Any) -> None:
    def run(num_blocks: int, **options: Any) -> MemoryPrediction:
        module, batch = _Head(num_blocks), torch.ones(16, 16)
        return predict_memory(module, batch, torch.optim.SGD, device=device, **options)

    copy = run(CHECKED_DEPTH)
    line, direct = run(40), run(40, may_extrapolate=False)
    assert line.is_extrapolated
    assert copy.peak_phase != direct.peak_phase  # or this shows nothing
    for name in ("peak_phase", "peak_op", "peak_bytes", "peak"):
        assert getattr(line, name) == getattr(direct, name), name
    assert line.peak_module == direct.peak_module
    assert line.timeline.phases[line.timeline.peak_index] == line.peak_phase
    assert {t.op for t in line.largest_tensors[:3]} == {t.op for t in direct.largest_tensors[:3]}
    for module in line.modules:
        assert min(module.memory.by_category().values()) >= 0, module.name
    assert sum(m.memory.total_bytes for m in line.modules) == line.peak_bytes
    if device == "cuda":
        assert line.allocated_bytes == pytest.approx(direct.allocated_bytes, rel=0.01)
        assert line.peak_bytes <= line.allocated_bytes <= line.least_reserved_bytes
        assert line.least_reserved_bytes <= line.reserved_bytes


def test_no_part_has_less_than_nothing() -> None:
    def made(depth: int, phase: str | None) -> MemoryPrediction:
        # Activations are alive in half of the blocks of any depth, in the last ones.
        peak = MemoryBreakdown(parameter_bytes=100 * depth, activation_bytes=1000 * depth // 2)
        blocks = [
            ModuleMemory(
                *(f"h.{i}", "Block", 25),
                MemoryBreakdown(parameter_bytes=100, activation_bytes=2000 if i == 3 else 0),
            )
            for i in range(depth)
        ]
        return MemoryPrediction(
            *("cpu", "Net", peak, {"forward": peak}),
            modules=(ModuleMemory("", "Net", 0, MemoryBreakdown()), *blocks),
            peak_phase="forward",
        )

    prediction, _ = extrapolate(RepeatedBlocks("h", 40), made)
    assert prediction is not None
    sizes = [m.memory for m in prediction.modules]
    assert all(min(size.by_category().values()) >= 0 for size in sizes)
    assert sum(sizes, MemoryBreakdown()) == prediction.peak


def test_says_that_it_took_fewer_blocks() -> None:
    module, batch = _Deep(MIN_NUM_BLOCKS), torch.ones(64, 16)
    prediction = predict_memory(module, batch, device="cpu")
    assert prediction.is_extrapolated
    assert f"of {MIN_NUM_BLOCKS} blocks" in prediction.assumptions[-1]
    direct = predict_memory(module, batch, device="cpu", may_extrapolate=False)
    assert prediction.peak_bytes == direct.peak_bytes


@pytest.mark.parametrize("change", ["few", "wider", "frozen", "dictionary"])
def test_finds_none_where_blocks_differ(change: str) -> None:
    model = _Deep(MIN_NUM_BLOCKS - 1 if change == "few" else MIN_NUM_BLOCKS)
    if change == "wider":
        model.blocks[3] = _Block(32)
    if change == "frozen":
        model.blocks[3].requires_grad_(False)
    if change == "dictionary":
        model.blocks = nn.ModuleDict({str(i): b for i, b in enumerate(model.blocks)})
    assert find_repeated_blocks(model) is None


def test_cuts_and_puts_back() -> None:
    model = _Deep(MIN_NUM_BLOCKS)
    blocks = find_repeated_blocks(model)
    assert blocks is not None
    with blocks.cut(model, 6):
        assert len(model.blocks) == 6
    assert len(model.blocks) == MIN_NUM_BLOCKS


@pytest.mark.parametrize(
    ("which", "period", "depths"),
    [
        *((None, 1, (6, 10, 13)), ("all", 1, (6, 10, 13)), ("every:3", 3, (6, 12, 15))),
        *((0.5, 2, (6, 10, 14)), (0.75, 4, (8, 12, 16)), (1 / 3, 3, (6, 12, 15))),
        *((7, None, ()), ("sqrt", None, ()), (0.123456, None, ()), ("every:50", None, ())),
    ],
)
def test_copies_are_as_deep_as_the_pattern_repeats(
    which: object, period: int | None, depths: tuple[int, ...]
) -> None:
    assert checkpointing_period(which) == period
    if period is not None:
        assert RepeatedBlocks("h", 48, period).depths == depths
        deeper = RepeatedBlocks("h", 49, period).depths
        assert all((49 - depth) % period == 0 for depth in deeper)
