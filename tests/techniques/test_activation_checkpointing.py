import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from torch import Tensor, nn
from torch.backends import cuda
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave import ActivationCheckpointing
from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    NoEffectWarning,
)
from lightning_memsave.techniques.activation_checkpointing import recompute
from tests.cases import WIDTH, Block, Model, make_batch, make_model
from tests.helpers import (
    assert_bitwise_equal,
    gradients_of,
    in_pairs,
    names_of_cache,
    saved_bytes,
    seed_torch,
    snapshot,
    train,
)
from tests.techniques.hugging_face import tiny


class WithLoss(nn.Module):
    """A Hugging Face model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:2, :16].argsort() + 2
        return self.model(input_ids=tokens, labels=tokens).loss


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("which", "products"),
    # Four per block: query, key and value in one, attention output, two of the MLP.
    [(None, 0), ("all", 3 * 4), ("selective", 0), (1, 4), ("selective:1,full:2", 2 * 4)],
)
def test_recomputes_the_matrix_products_that_it_should(which, products):
    model = make_model("transformer").train()

    def count() -> Counter[str]:
        torch.manual_seed(0)
        loss = model(make_batch(0))
        with CountOps() as ops:
            loss.backward()
        return ops.counts

    plain = count()
    if which is not None:
        ActivationCheckpointing(which).apply(model)
    assert count()["addmm"] - plain["addmm"] == products


def test_caches_are_not_filled_while_training_and_work_in_evaluation():
    model = tiny("gpt2")
    tokens = torch.arange(2, 10).reshape(1, 8)
    with ActivationCheckpointing().apply(model):
        assert model.train()(tokens).past_key_values is None
        with pytest.warns(NoEffectWarning, match="`use_cache=True` has no effect.*Remove it"):
            assert model(tokens, use_cache=True).past_key_values is None
        evaluated = model.eval()(tokens, use_cache=True)  # gradients are on, as for saliency maps
        assert evaluated.past_key_values.get_seq_length() == 8
        with torch.no_grad():
            generated = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=1)
    with torch.no_grad():
        plain = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=1)
    assert torch.equal(generated, plain)


@pytest.mark.parametrize("argument", names_of_cache())
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_blocks_that_are_given_a_filled_cache_run_plainly(argument):
    model = tiny("llama").train()
    tokens = torch.arange(2, 10).reshape(1, 8)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        prefix = model.eval()(tokens).past_key_values
        model.train().zero_grad()
        loss = model(tokens, **{argument: prefix}, labels=tokens).loss
        loss.backward()
        return loss.detach(), model.model.embed_tokens.weight.grad.clone()

    plain = loss_and_gradient()
    with (
        ActivationCheckpointing().apply(model),
        pytest.warns(NoEffectWarning, match="activation_checkpointing=None"),
    ):
        saving = loss_and_gradient()
    assert torch.equal(plain[0], saving[0])
    assert torch.equal(plain[1], saving[1])


# peft reads a property that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_trains_bitwise_equal_and_saves():
    base = tiny("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = WithLoss(peft.get_peft_model(base, config))
    saving = train(model, make_batch, ActivationCheckpointing())
    assert_bitwise_equal(train(model, make_batch), saving)
    assert saving.gradients[0].keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    plain = saved_bytes(lambda: model.train()(make_batch(0)))
    with ActivationCheckpointing().apply(model):
        assert saved_bytes(lambda: model(make_batch(0))) < 0.6 * plain


class TestSqrt:
    @staticmethod
    def chain() -> nn.Module:
        torch.manual_seed(1)
        layers = [
            layer
            for _ in range(3)
            for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
        ]

        class Chain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(*layers)

            def forward(self, x: Tensor) -> Tensor:
                return self.layers(x).square().mean()

        return Chain()

    def test_trains_bitwise_equal_with_batch_norm_and_keeps_inputs_of_segments(self):
        model, technique = self.chain(), ActivationCheckpointing("sqrt")
        assert_bitwise_equal(train(model, make_batch), train(model, make_batch, technique))
        plain = saved_bytes(lambda: model(make_batch(0)))
        assert technique.apply(model).changes == ("layers",)
        assert saved_bytes(lambda: model(make_batch(0))) < 0.7 * plain

    def test_is_refused_where_there_is_no_chain(self):
        with pytest.raises(IncompatibleError, match='Use "all", which needs less memory'):
            ActivationCheckpointing("sqrt").apply(make_model("dropout"))


def test_blocks_that_checkpoint_themselves_are_left_alone():
    model = tiny("bert", "BertForMaskedLM")
    model.activation_checkpointing_enable()
    with pytest.warns(NoEffectWarning, match="3 of 3 blocks checkpoint themselves already"):
        ActivationCheckpointing().apply(model)
    model.activation_checkpointing_disable()
    assert len(ActivationCheckpointing().apply(model).changes) == 3


def test_wrapped_blocks_are_left_alone():
    model = Model()
    for index in (0, 2):
        blocks = model.get_submodule("blocks")
        blocks.register_module(str(index), checkpoint_wrapper(blocks.get_submodule(str(index))))
    handle = ActivationCheckpointing(blocks=Block).apply(model)
    assert handle.changes == ("blocks.1", "blocks.3")
    assert handle.skipped == ("2 of 4 blocks checkpoint themselves already",)


@pytest.mark.parametrize(
    ("which", "count"),
    [("all", 4), (1, 1), (3, 3), ("26%", 2), ("100%", 4), (1.0, 1), ("every:3", 2)],
    ids=str,
)
def test_which_chooses_the_number_of_blocks(which, count):
    changes = ActivationCheckpointing(which).apply(make_model("dropout")).changes
    assert len(changes) == count
    assert changes[0] == "blocks.0"


def test_refuses_more_blocks_than_there_are():
    with pytest.raises(IncompatibleError, match='Use a number up to 4, or "all"'):
        ActivationCheckpointing(5).apply(make_model("dropout"))
    with pytest.raises(IncompatibleError, match='Use a number up to 4, or "all"'):
        ActivationCheckpointing("full:3,selective:2").apply(make_model("dropout"))


def test_blocks_can_be_recomputed_in_different_ways():
    handle = ActivationCheckpointing("nested:1,selective:2").apply(make_model("transformer"))
    assert handle.summary == (
        "1 of 3 blocks recomputed: 1 x TransformerEncoderLayer; of them once more: "
        "1 x MultiheadAttention; 2 recomputed selectively: 2 x TransformerEncoderLayer"
    )


def test_hooks_on_saved_tensors_see_what_selective_keeps():
    def run(model: nn.Module) -> None:
        seed_torch(0)
        model(make_batch(0)).backward()

    model, packed = make_model("dropout"), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    run(model)
    plain = gradients_of(model)
    model.zero_grad()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with ActivationCheckpointing("selective").apply(model), hooks:
        run(model)
    # Two products in each of four blocks, of whose inner tensors nothing else is saved.
    assert packed.count(torch.Size((16, 2 * WIDTH))) == 4
    assert all(map(torch.equal, plain, gradients_of(model)))


def test_selective_is_refused_where_a_layer_overwrites_what_it_keeps():
    model = make_model("dropout")
    model.blocks[1].dropout.inplace = True
    before = snapshot(model)
    with pytest.raises(IncompatibleError, match=r"blocks.1.dropout.*Set `inplace=False`"):
        ActivationCheckpointing("selective").apply(model)
    assert snapshot(model) == before


class WritesIntoProducts(Block):
    """As T5 and Gemma 3n do; `matmul` gives a view of what is kept, with a version of its own."""

    def forward(self, x: Any, *, scale: Tensor | None = None) -> Any:
        product = torch.matmul(x, self.up.weight.T[:, :WIDTH])
        product += x
        folded = torch.matmul(x.expand(2, *x.shape), self.down.weight.T[:WIDTH])
        folded.transpose(0, 1)[1:] *= 2
        biased = self.up(x)
        biased.relu_()
        return x + product.sin() + folded.sin().mean(0) + self.down(biased)


@pytest.mark.parametrize("which", ["all", "selective"])
def test_a_block_may_write_into_products(which):
    model: Any = make_model("dropout")
    model.blocks = nn.ModuleList(WritesIntoProducts(nn.LayerNorm(WIDTH)) for _ in range(3))
    plain = train(model, make_batch)
    technique = ActivationCheckpointing(which, blocks=WritesIntoProducts)
    assert_bitwise_equal(plain, train(model, make_batch, technique))


@pytest.mark.parametrize(
    "which",
    [
        *(0, -1, 0.0, 1.5, True, None, []),
        *("none", "every:0", "every:x", "full:0", "full:2,keep:1", "full"),
    ],
)
def test_refuses_what_says_nothing(which):
    with pytest.raises(ConfigurationError, match='Use "all"'):
        ActivationCheckpointing(which)


def test_frozen_blocks_without_gradients_add_no_work():
    model = make_model("dropout").requires_grad_(False).train()
    ActivationCheckpointing().apply(model)
    assert not model(make_batch(0)).requires_grad


def test_the_end_of_a_recomputation_is_no_error(monkeypatch):
    """What looks into frames keeps the inputs of blocks alive: seen on an H100."""
    monkeypatch.setattr(recompute, "_leave_checkpoint", None)
    model = WithLoss(tiny("gpt2")).train()
    ActivationCheckpointing("nested").apply(model)
    model(make_batch(0)).backward()


class Fails(Block):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        super().forward(x, **kwargs)
        raise ValueError("no such token")


@pytest.mark.parametrize("which", ["all", "nested", "selective"])
def test_an_error_leaves_no_hooks_behind_while_somebody_keeps_it(which):
    """As a notebook does: all that is saved from then on would go through them."""
    model = make_model("dropout").train()
    for block in model.blocks:
        block.__class__ = Fails
    ActivationCheckpointing(which).apply(model)
    with pytest.raises(ValueError, match="no such token") as kept:
        model(make_batch(0))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    del kept


@pytest.mark.parametrize("which", ["all", "nested", "selective"])
def test_gradients_of_gradients_work(which):
    model: Any = make_model("batch_norm").train().double()
    batch = make_batch(0).double()

    def penalty() -> Tensor:
        torch.manual_seed(0)
        weight = model.blocks[1].up.weight
        first = torch.autograd.grad(model(batch), weight, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), weight)[0]

    plain = penalty()
    with ActivationCheckpointing(which).apply(model):
        assert torch.equal(penalty(), plain)


@pytest.mark.parametrize("which", ["all", "nested", "selective"])
def test_a_second_backward_does_not_change_buffers_again(which):
    model = make_model("batch_norm").train()
    plain = make_model("batch_norm").train()
    ActivationCheckpointing(which).apply(model)
    for net in (model, plain):
        torch.manual_seed(0)
        loss = net(make_batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(gradients_of(model), gradients_of(plain), strict=True):
        assert torch.equal(one, other)
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


SEEN: list[Any] = []


class Watching(Block):
    """It notes what is set each time it is computed."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__(nn.LayerNorm(WIDTH))
        self.read = read

    def forward(self, x: Any, *, scale: Tensor | None = None) -> Any:
        SEEN.append(self.read())
        return super().forward(x)


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    yield
    torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic(warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    yield
    torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]] = {
    "default dtype": (torch.get_default_dtype, lambda: _DtypeContextManager(torch.float64)),
    "default device": (torch.get_default_device, lambda: torch.device("meta")),
    "autocast": (
        lambda: (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    ),
    "attention kernel": (
        lambda: (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        lambda: sdpa_kernel(SDPBackend.MATH),
    ),
    "matmul precision": (torch.get_float32_matmul_precision, lambda: matmul_precision("high")),
    "deterministic": (torch.are_deterministic_algorithms_enabled, lambda: deterministic(False)),
    "deterministic, only warned of": (
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda: deterministic(True),
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.enabled,
        lambda: torch.backends.cudnn.flags(enabled=False),
    ),
}


@pytest.mark.parametrize("which", ["all", "nested", "selective"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_recomputation_has_the_settings_of_forward(setting, which):
    read, context = SETTINGS[setting]
    model: Any = Model().train()
    model.blocks = nn.ModuleList([Watching(read) for _ in range(2)])
    ActivationCheckpointing(which, blocks=Watching).apply(model)
    before = read()
    SEEN.clear()
    x = make_batch(0)
    with context():
        y = model.blocks[1](model.blocks[0](x.requires_grad_()))
        expected = read()
    y.sum().backward()
    assert expected != before
    assert [expected] * 4 == SEEN
    assert read() == before


def test_settings_are_restored_where_torch_does_not_tell_the_matmul_precision():
    """Setting one backend alone, as torch recommends, makes the getter of all of them raise."""
    code = """
import torch
from torch import nn
from lightning_memsave import ActivationCheckpointing
torch.backends.cuda.matmul.fp32_precision = "tf32"
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
ActivationCheckpointing(blocks=nn.Linear).apply(model)
model(torch.randn(2, 4)).sum().backward()
print(torch.backends.cuda.matmul.fp32_precision)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "tf32\n"


@pytest.mark.parametrize("run", ["vmap", "grad", "functional_call"])
def test_torch_func_trains_as_without_checkpointing(run):
    torch.manual_seed(1)
    model: Any = Model().eval()
    weights = {name: p.detach() * 2 for name, p in model.named_parameters()}

    def gradient() -> Tensor:
        model.zero_grad()
        batch = make_batch(0).requires_grad_()
        if run == "grad":
            return torch.func.grad(model)(batch)
        if run == "vmap":
            torch.func.vmap(model)(batch.reshape(4, 4, WIDTH)).sum().backward()
        else:
            torch.func.functional_call(model, weights, (batch,)).backward()
        assert batch.grad is not None
        return batch.grad

    plain = gradient()
    ActivationCheckpointing().apply(model)
    with pytest.warns(NoEffectWarning, match="Set `activation_checkpointing=None`"):
        assert torch.equal(gradient(), plain)


def add_in_place(x: Any) -> None:
    x.add_(1.0)


def append(x: Any) -> None:
    x.items.append(x.items[0])


def add_inside(x: Any) -> None:
    x.inner.x.add_(1.0)


def replace_inside(x: Any) -> None:
    x.inner.x = x.inner.x + 1.0


IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Any]] = {
    "tensor": (lambda x: x, lambda x: x, add_in_place),
    "view of it": (lambda x: x, lambda x: x, lambda x: x[:1].add_(1.0)),
    "detached": (lambda x: x, lambda x: x, lambda x: x.detach().add_(1.0)),
    "tensor in a dictionary": (
        lambda x: {"x": [x]},
        lambda x: x["x"][0],
        lambda x: x["x"][0].add_(1.0),
    ),
    "tensor in an object": (lambda x: SimpleNamespace(x=x), lambda x: x.x, lambda x: x.x.add_(1.0)),
    "list in an object": (
        lambda x: SimpleNamespace(items=[x]),
        lambda x: x.items[0] * len(x.items),
        append,
    ),
    "tensor in an object of an object": (
        lambda x: SimpleNamespace(inner=SimpleNamespace(x=x)),
        lambda x: x.inner.x,
        add_inside,
    ),
    "object of an object": (
        lambda x: SimpleNamespace(inner=SimpleNamespace(x=x)),
        lambda x: x.inner.x,
        replace_inside,
    ),
}


class ChangesItsInput(nn.Module):
    """A block that changes what it is given, of any form, before or after it has used it."""

    def __init__(self, read: Any, change: Any, *, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.read, self.change, self.is_first = read, change, is_first

    def forward(self, given: Any) -> Tensor:
        if self.is_first:
            self.change(given)
        y = self.linear(self.read(given).sin())
        if not self.is_first:
            self.change(given)
        return y


@pytest.mark.parametrize(
    ("which", "is_first", "kind"), in_pairs(["all", "selective"], [True, False], [*IN_PLACE])
)
def test_no_change_in_place_is_silent(kind, is_first, which):
    make, read, change = IN_PLACE[kind]
    block = ChangesItsInput(read, change, is_first=is_first)
    model = nn.ModuleList([block])
    ActivationCheckpointing(which, blocks=ChangesItsInput).apply(model)
    with pytest.raises(IncompatibleError, match=r"Write `x = x \+ y`.*`blocks=`"):
        block(make(make_batch(0)))


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_change_between_forward_and_backward_is_not_silent(kind):
    make, read, change = IN_PLACE[kind]
    block = ChangesItsInput(read, lambda given: None, is_first=True)
    ActivationCheckpointing(blocks=ChangesItsInput).apply(nn.ModuleList([block]))
    given = make(make_batch(0))
    loss = block(given).sum()
    change(given)
    with pytest.raises(RuntimeError, match=r"Write `x = x \+ y`|modified by an inplace operation"):
        loss.backward()


def test_tensors_of_inference_mode_are_passed_on():
    with torch.inference_mode():
        bias = torch.ones(WIDTH)
    block = ChangesItsInput(lambda pair: pair[0] + pair[1], lambda pair: None, is_first=True)
    ActivationCheckpointing(blocks=ChangesItsInput).apply(nn.ModuleList([block]))
    block((make_batch(0), bias)).sum().backward()
    assert block.linear.weight.grad is not None


class WarmsUp(Block):
    """Counts in a buffer from the third call on, as observers that are switched on late do."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.num_calls = 0

    def forward(self, x: Any, *, scale: Tensor | None = None) -> Any:
        if self.training and self.num_calls >= 2:
            self.calls.add_(1)
        return super().forward(x, scale=scale)


def test_buffers_that_begin_to_change_later_change_once():
    model: Any = make_model("dropout").train()
    model.blocks = nn.ModuleList([WarmsUp()])
    ActivationCheckpointing(blocks=WarmsUp).apply(model)
    for step in range(4):
        model.blocks[0].num_calls = step
        model(make_batch(step)).backward()
    assert model.blocks[0].calls == 2


def test_torchscript_blocks_are_left_alone():
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        blocks = [torch.jit.script(nn.Sequential(nn.Linear(8, 8))) for _ in range(2)]
    model = nn.Sequential(*blocks)
    with pytest.warns(NoEffectWarning, match="2 of 2 blocks are TorchScript"):
        ActivationCheckpointing(blocks=torch.jit.ScriptModule).apply(model)


# As attention with dropout on CUDA: one operator that is kept, with random numbers of its own.
@torch.library.custom_op(
    "memsave_tests::bmm", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def random_bmm(x: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.rand_like(x)
    return x * mask, mask


def _keep_mask(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, grad_of_mask: Tensor) -> Tensor:
    return grad * ctx.saved_tensors[0]


random_bmm.register_autograd(_backward, setup_context=_keep_mask)


class RandomOperators(nn.Module):
    """A block with dropout around two kept random operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Any, *, scale: Tensor | None = None) -> Any:
        for _ in range(2):
            x = self.dropout(random_bmm(self.dropout(x))[0])
        return self.linear(x).sin()


@pytest.mark.parametrize("which", ["all", "selective", "nested:1,selective:1"])
def test_dropout_after_a_kept_random_operator_draws_the_same_mask(which):
    model: Any = make_model("dropout")
    model.blocks = nn.ModuleList([RandomOperators(), RandomOperators()])
    plain = train(model, make_batch)
    technique = ActivationCheckpointing(which, blocks=RandomOperators)
    assert_bitwise_equal(plain, train(model, make_batch, technique))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_dropout_after_kept_attention_draws_the_same_mask_on_a_gpu(family, dtype):
    model = WithLoss(tiny(family)).cuda().train()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        seed_torch(7)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(make_batch(0).cuda())
        loss.backward()
        return [gradient.clone() for gradient in gradients_of(model)]

    plain = gradients()
    with ActivationCheckpointing("selective").apply(model):
        for gradient, expected in zip(gradients(), plain, strict=True):
            # With another mask it would be about 1; kernels that add atomically differ by little.
            assert (gradient - expected).norm() <= 1e-2 * expected.norm() + 1e-6


@pytest.mark.gpu
def test_dropout_draws_the_same_mask_for_keyword_arguments_on_a_gpu():
    class OnlyKeywords(Model):
        def run_blocks(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x=x, scale=torch.tensor(0.5))
            return x

    model = OnlyKeywords().cuda()

    def on_gpu(step: int) -> Tensor:
        return make_batch(step).cuda()

    assert_bitwise_equal(train(model, on_gpu), train(model, on_gpu, ActivationCheckpointing()))
