import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import RobertaConfig, RobertaForMaskedLM

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.live_tensors import LiveTensors
from tests.measure.profiler_peak import profiler_peak

RNG_STATE_BYTES = (
    5056  # what `checkpoint` keeps per block to draw dropout again; no tensor operator
)


def mlp():
    layers = (layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU()))
    return nn.Sequential(*layers), {"input": torch.randn(2048, 512)}


def residual():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(256)
            self.up = nn.Linear(256, 1024)
            self.down = nn.Linear(1024, 256)

        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).relu())

    return nn.Sequential(*(Block() for _ in range(4))), {"input": torch.randn(512, 256)}


def conv_with_batch_norm():
    # Convolutions reorder their operands inside the kernel unless they lie as oneDNN wants them;
    # those copies are scratch, which the profiler sees and a counter of tensors does not.
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    batch = torch.randn(16, 3, 64, 64).to(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, {"input": batch}


def roberta():
    config = RobertaConfig(
        vocab_size=2000,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=130,
    )
    ids = torch.randint(5, 2000, (8, 64))
    return RobertaForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


PROBLEMS = [mlp, residual, conv_with_batch_norm, roberta]


def checkpoint_blocks(model):
    """Recompute each block by hand; returns how many there are."""
    blocks = model.roberta.encoder.layer if isinstance(model, RobertaForMaskedLM) else model
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def loss_of(model, batch):
    output = model(**batch)
    return output.loss if hasattr(output, "loss") else output.pow(2).mean()


class Training:
    """Model, batch and AdamW; one step on call, as Lightning orders it."""

    def __init__(self, problem, use_checkpoint=False, seed=0):
        torch.manual_seed(seed)
        self.model, self.batch = problem()
        self.model.train()
        self.num_blocks = checkpoint_blocks(self.model) if use_checkpoint else 0
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def __call__(self):
        loss = loss_of(self.model, self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def tensors(self):
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.batch.values()

    def counted(self):
        with LiveTensors(self.model, [self.optimizer]) as live:
            live.track_input(self.batch)
            self()
        return live


@pytest.mark.parametrize("use_checkpoint", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_agrees_with_the_profiler(problem, use_checkpoint):
    training = Training(problem, use_checkpoint)
    expected = profiler_peak(training, training.tensors()).num_bytes
    counted = training.counted().peak.total_bytes + RNG_STATE_BYTES * training.num_blocks
    assert counted == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("num_tokens", [16, 512])
def test_two_gradients_of_a_tied_weight_are_one_sum_in_place(num_tokens):
    """Under autocast autograd adds them in place, though not while a mode looks on."""
    embedding, head = nn.Embedding(4000, 64), nn.Linear(64, 4000, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    tokens = torch.randint(4000, (num_tokens,))

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()

    # Products in bfloat16 have scratch where the CPU has no instructions for them.
    expected = profiler_peak(step, [*model.parameters(), tokens]).between_kernels_bytes

    with LiveTensors(model) as live:
        live.track_input(tokens)
        step()
        step()
    assert live.peak.total_bytes == expected


@pytest.mark.parametrize("use_checkpoint", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_training_is_the_same_bit_for_bit(problem, use_checkpoint):
    plain, counted = (Training(problem, use_checkpoint) for _ in range(2))
    torch.manual_seed(1)
    expected = [plain() for _ in range(3)]
    torch.manual_seed(1)
    for loss in expected:
        with LiveTensors(counted.model, [counted.optimizer]):
            assert torch.equal(counted(), loss)
    assert all(map(torch.equal, plain.model.parameters(), counted.model.parameters()))


@pytest.mark.parametrize("zero_grad_first", [True, False])
def test_small_step_by_hand(zero_grad_first):
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(5, 100)

    def step():
        if zero_grad_first:
            optimizer.zero_grad()
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    with LiveTensors(model, [optimizer]) as live:
        live.track_input([batch])
        step()
    weight, output, scalar = 4 * 100 * 10, 4 * 5 * 10, 4
    constant = {
        "parameter": weight,
        "buffer": 0,
        "optimizer_state": weight,
        "input": 4 * 5 * 100,
        "other": 0,
    }
    if zero_grad_first:
        # In backward, when the new gradient is made: the output is gone (`sum` needs its shape
        # only), the loss and its gradient, made before backward begins, are not.
        at_peak = {"gradient": weight, "activation": 2 * scalar, "temporary": 0}
    else:
        # In forward, before the old gradient goes.
        at_peak = {"gradient": weight, "activation": output + scalar, "temporary": 0}
    assert live.peak == MemoryBreakdown.from_categories(constant | at_peak)
    assert live.live_bytes == live.breakdown.total_bytes == 3 * weight + 4 * 5 * 100


def test_recomputed_activations_are_activations():
    live = LiveTensors()
    seen = []

    def block(x):
        hidden = x.exp()
        seen.append(live.breakdown.by_category())
        return hidden.exp()

    x = torch.zeros(1000, requires_grad=True)
    with live:
        loss = checkpoint(block, x, use_reentrant=False).sum()
        forward_bytes = live.live_bytes
        loss.backward()
    forward, recomputed = seen
    assert forward["activation"] == 4000
    # Besides the output, which `exp` does not keep here, and the loss with its gradient:
    assert recomputed["activation"] == forward_bytes - 4000 + 4 + 4000
    assert recomputed["temporary"] == 0


def test_first_step_finds_gradients_and_optimizer_state():
    training = Training(mlp)
    live = training.counted()
    parameters = sum(4 * p.numel() for p in training.model.parameters())
    steps = 4 * len(list(training.model.parameters()))  # AdamW counts steps in tensors
    assert live.breakdown.gradient_bytes == parameters
    assert live.breakdown.optimizer_state_bytes == 2 * parameters + steps


def test_optimizer_state_made_at_the_peak_is_optimizer_state():
    model = nn.Linear(100, 10, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with LiveTensors(model, [optimizer]) as live:
        optimizer.step()
    assert live.peak.by_category() | {"optimizer_state": 8004, "activation": 0} == (
        live.peak.by_category()
    )
    assert live.peak.temporary_bytes > 0


def test_forward_inside_the_step_is_activation():
    # Lightning gives forward and backward to `Optimizer.step` as a closure.
    training = Training(mlp)
    seen = []

    def closure():
        loss = loss_of(training.model, training.batch)
        seen.append(live.breakdown)
        loss.backward()
        return loss

    with LiveTensors(training.model, [training.optimizer]) as live:
        live.track_input(training.batch)
        training.optimizer.step(closure)
    assert seen[0].activation_bytes > 10 * 2048 * 512 * 4
    assert seen[0].temporary_bytes == 0


def test_bitsandbytes_state_is_found():
    from bitsandbytes.optim.adamw import AdamW8bit

    model = nn.Linear(128, 128, bias=False)
    optimizer = AdamW8bit(model.parameters())
    with LiveTensors(model, [optimizer]) as live:
        model(torch.ones(4, 128)).sum().backward()
        optimizer.step()
    moments = 2 * 128 * 128
    assert moments <= live.breakdown.optimizer_state_bytes < 1.3 * moments
    assert live.breakdown.temporary_bytes == 0


def test_a_storage_counts_once():
    with LiveTensors() as live:
        tensor = torch.zeros(1000)
        views = [tensor[:10], tensor.view(10, 100), tensor.detach()]
        assert live.live_bytes == 4000
    assert len(views) == 3


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    with LiveTensors(model) as live:
        assert live.breakdown.parameter_bytes == 400


@pytest.mark.parametrize("grow", [Tensor.resize_, lambda t, n: t.untyped_storage().resize_(4 * n)])
def test_resized_storages(grow):
    with LiveTensors() as live:
        tensor = torch.zeros(10)
        grow(tensor, 1000)
        assert live.live_bytes == 4000
        tensor.untyped_storage().resize_(0)
        assert live.live_bytes == 0
        assert live.peak.total_bytes == 4000


def test_sparse_gradients():
    model = nn.Embedding(1000, 10, sparse=True)
    with LiveTensors(model) as live:
        model(torch.tensor([1, 2, 3])).sum().backward()
    assert live.breakdown.gradient_bytes == 3 * 8 + 3 * 10 * 4


def test_older_tensors_are_other_from_their_first_use():
    dataset = torch.zeros(1000)
    with LiveTensors() as live:
        assert live.live_bytes == 0
        batch = dataset[:10] + 1
        assert live.breakdown.by_category() | {"other": 4000, "activation": 40} == (
            live.breakdown.by_category()
        )
    assert len(batch) == 10


def test_other_devices_do_not_count():
    with LiveTensors(device="meta") as live:
        tensors = torch.zeros(10), torch.zeros(20, device="meta")
        assert live.live_bytes == 80
    assert len(tensors) == 2


def test_reset_peak():
    with LiveTensors() as live:
        torch.zeros(1000)
        assert live.peak.total_bytes == 4000
        live.reset_peak()
        assert live.peak.total_bytes == 0


def test_keeps_nothing_alive():
    training = Training(mlp)
    module = weakref.ref(training.model)
    with LiveTensors(training.model, [training.optimizer]) as live:
        training()
        tensor = torch.zeros(10)
        storage, num_bytes = weakref.ref(tensor.untyped_storage()), live.live_bytes
        del tensor
        assert storage() is None
        assert live.live_bytes == num_bytes - 40
    del training
    gc.collect()
    assert module() is None
    with pytest.raises(RuntimeError, match="Create a new one"), live:
        pass


def test_an_exception_leaves_nothing_behind():
    training = Training(mlp)

    def fail(*_):
        raise ZeroDivisionError

    training.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), LiveTensors(training.model, [training.optimizer]):
        training()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    assert not training.optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())
    copy.deepcopy(training.model)


def test_compiled_functions_run():
    compiled = torch.compile(lambda x: (2 * x).sin().sum(), backend="aot_eager", fullgraph=True)
    x = torch.ones(1000, requires_grad=True)
    with LiveTensors() as live:
        loss = compiled(x)
        loss.backward()
    assert torch.equal(loss, (2 * x).sin().sum())
    assert live.peak.other_bytes == 4000


def test_twice_at_once_is_refused():
    live = LiveTensors()
    with live, pytest.raises(RuntimeError, match="Create a second one"), live:
        pass


def test_again_after_the_end():
    model = nn.Linear(10, 10, bias=False)
    live = LiveTensors(model)
    for _ in range(2):
        with live:
            torch.zeros(100)
        assert live.peak.by_category() | {"parameter": 400, "activation": 400} == (
            live.peak.by_category()
        )


def test_two_at_once_see_the_same():
    with LiveTensors() as outer, LiveTensors() as inner:
        tensor = torch.zeros(10)
        tensor.untyped_storage().resize_(4000)
        assert outer.live_bytes == inner.live_bytes == 4000
