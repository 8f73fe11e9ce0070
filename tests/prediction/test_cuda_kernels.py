import contextlib
import functools
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_memsave import MemSaveCallback, predict_memory
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.cuda import autocast as _cuda_autocast
from lightning_memsave.prediction.cuda import constants
from lightning_memsave.prediction.cuda.constants import (
    constant_assumptions,
    context_bytes,
    distributed_bytes,
    margin_bytes,
    workspaces,
)
from lightning_memsave.prediction.cuda.kernels import ASSUMPTIONS, cuda_kernels
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.training_step import RunningFit, TrainingStep
from lightning_memsave.units import format_bytes


class Ops(TorchDispatchMode):
    """The operators that run, as autograd sees them, with the type of their first result."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        self.seen.append((func.overloadpacket.__name__, getattr(first, "dtype", None)))
        return result

    @property
    def names(self):
        return [name for name, _ in self.seen]


@contextlib.contextmanager
def fake_cuda(attention=None, **settings):
    with FakeTensorMode(), cuda_kernels(attention, **settings):
        yield


def kept_bytes(function, *inputs):
    """Bytes that a function makes and that are alive while its result is."""
    with LiveTensors() as live:
        for tensor in inputs:
            live.track_input(tensor)
        result = function(*inputs)
        num_bytes = live.breakdown.activation_bytes
    del result
    return num_bytes


def saved_dtypes(function):
    """What a function saves for backward."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.dtype), lambda t: t):
        function()
    return found


def leaf(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


# In float32, of heads that share keys.
IN_SHARED_HEADS = "efficient" if TorchVersion(torch.__version__) >= TorchVersion("2.14") else "math"


class TestDropout:
    def test_keeps_one_byte_an_element(self):
        with fake_cuda():
            assert saved_dtypes(lambda: functional.dropout(leaf(10, 10), 0.1)) == [torch.bool]
            assert kept_bytes(lambda x: functional.dropout(x, 0.1), leaf(10, 10)) == 400 + 100

    def test_a_cpu_keeps_a_mask_of_the_type_of_the_input(self):
        with FakeTensorMode():
            assert kept_bytes(lambda x: functional.dropout(x, 0.1), leaf(10, 10)) == 400 + 400

    @pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.1, False)])
    def test_keeps_nothing_where_nothing_is_dropped(self, p, training):
        with fake_cuda():
            assert kept_bytes(lambda x: functional.dropout(x, p, training), leaf(10)) == 0

    def test_everything_dropped(self):
        with fake_cuda():
            functional.dropout(leaf(10), 1.0).sum().backward()


class TestAttention:
    # (batch, heads, tokens, head size)
    B, H, T, D = 2, 4, 40, 16

    def run(
        self, dtype=torch.bfloat16, *, mask=None, key_heads=None, size=D, dropout=0.125, **settings
    ):
        query = leaf(self.B, self.H, self.T, size, dtype=dtype)
        key, value = (leaf(self.B, key_heads or self.H, self.T, size, dtype=dtype) for _ in "kv")
        with Ops() as ops:
            functional.scaled_dot_product_attention(
                query, key, value, mask, dropout, enable_gqa=key_heads is not None, **settings
            ).sum().backward()
        for kernel in ("cudnn", "flash", "efficient"):
            if f"_scaled_dot_product_{kernel}_attention_backward" in ops.names:
                return kernel
        return "math" if "bmm" in ops.names else None

    # Output, a float for each row, and states of random numbers: for efficient 40 rows are 64.
    @pytest.mark.parametrize(
        ("dtype", "kept"),
        [
            *((half, 320 * 16 * 2 + 320 * 4 + 24) for half in (torch.float16, torch.bfloat16)),
            (torch.float32, 320 * 16 * 4 + 8 * 64 * 4 + 16),
        ],
    )
    def test_keeps_its_output_and_a_float_for_each_row(self, dtype, kept):
        def attend(query, key, value):
            return functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)

        with fake_cuda():
            found = kept_bytes(attend, *(leaf(2, 4, 40, 16, dtype=dtype) for _ in range(3)))
        assert found == kept

    def test_chooses_like_cuda(self):
        with fake_cuda():
            mask = torch.zeros(self.B, 1, self.T, self.T, dtype=torch.bfloat16)
            assert self.run() == "flash"
            assert self.run(is_causal=True, scale=0.5) == "flash"
            assert self.run(torch.float32) == "efficient"
            assert self.run(mask=mask) == "efficient"
            assert self.run(mask=mask.bool()) == "efficient"
            assert self.run(key_heads=2) == "flash"
            assert self.run(torch.float32, key_heads=2) == IN_SHARED_HEADS
            assert self.run(size=12) == "flash"  # padded to 16
            assert self.run(size=12, mask=mask) == "math"
            assert self.run(size=264) == "efficient"
            assert self.run(torch.float32, size=6) == "math"
            assert self.run(torch.float64) == "math"

    def test_hopper_and_blackwell_take_cudnn_where_there_is_a_mask(self):
        chosen = {}
        for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
            with fake_cuda(capability=capability):
                mask = torch.zeros(self.B, 1, self.T, self.T, dtype=torch.bfloat16)
                chosen[capability] = [
                    *(self.run(mask=mask), self.run(mask=mask.bool()), self.run()),
                    *(self.run(torch.float32, mask=mask.float()), self.run(size=136, mask=mask)),
                ]
        others = ["efficient", "efficient", "flash", "efficient", "efficient"]
        assert chosen[8, 0] == chosen[12, 0] == others
        assert chosen[9, 0] == ["cudnn", "cudnn", "flash", "efficient", "cudnn"]
        assert chosen[10, 0] == ["cudnn", "cudnn", "flash", "efficient", "efficient"]

    def test_what_keeps_cudnn_away(self):
        with fake_cuda(capability=(9, 0)):
            mask = torch.zeros(self.B, 1, self.T, self.T, dtype=torch.bfloat16)
            # A learned bias of positions, as in T5: found on an H200.
            assert self.run(mask=mask.clone().requires_grad_()) == "efficient"
            is_coarse = TorchVersion(torch.__version__) >= TorchVersion("2.14")
            assert self.run(mask=mask, dropout=0.1) == ("efficient" if is_coarse else "cudnn")
            torch.use_deterministic_algorithms(True)
            try:
                assert self.run(mask=mask) == "efficient"
            finally:
                torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize(
        ("capability", "size", "kernel"),
        [
            *(((8, 0), 256, "flash"), ((9, 0), 256, "flash"), ((8, 6), 192, "flash")),
            *(((8, 6), 256, "efficient"), ((8, 9), 200, "efficient"), ((12, 0), 256, "efficient")),
        ],
    )
    def test_large_heads_with_dropout(self, capability, size, kernel):
        with fake_cuda(capability=capability):
            assert self.run(size=size) == kernel

    def test_an_old_device_has_no_flash(self):
        with fake_cuda(capability=(7, 5)):
            assert self.run(torch.float16) == "efficient"
            assert self.run(torch.bfloat16) == "math"

            assert self.run(torch.float32, size=6) == "efficient"  # no alignment needed

    def test_irregular_inputs_have_no_kernel_of_their_own(self):
        with fake_cuda(), Ops() as ops:
            for shapes in ([(4, 8, 16)] * 3, [(2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16)]):
                query, key, value = (leaf(*shape, dtype=torch.half) for shape in shapes)
                functional.scaled_dot_product_attention(query, key, value)
        assert ops.names.count("_safe_softmax") + ops.names.count("_softmax") == 2

    @pytest.mark.parametrize("kernel", ["flash", "efficient", "math"])
    def test_takes_the_kernel_that_is_named_where_it_can_run(self, kernel):
        with fake_cuda(kernel):
            assert self.run() == kernel
            assert self.run(torch.float32) == (kernel if kernel == "math" else "efficient")

    def test_heeds_what_is_switched_off(self):
        with fake_cuda(), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            assert self.run() == "efficient"
        with fake_cuda(), sdpa_kernel(SDPBackend.MATH):
            assert self.run() == "math"

    def test_a_mask_that_is_not_aligned_is_copied_but_for_cudnn(self):
        def masked(num_tokens, num_heads=1):
            qkv = [leaf(1, num_heads, num_tokens, 8, dtype=torch.half) for _ in range(3)]
            mask = torch.zeros(1, 1, num_tokens, num_tokens, dtype=torch.half)
            return kept_bytes(
                lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, mask), *qkv
            )

        own = 8 * 2 + 4  # output and statistics of a token
        with fake_cuda():
            assert masked(32) == 32 * own + 16
            assert masked(31) == 31 * 16 + 32 * 4 + 16 + 31 * 32 * 2
        # https://github.com/pytorch/pytorch/pull/170800
        with fake_cuda(capability=(9, 0)):
            assert masked(31, 4) - 4 * 31 * own <= 16  # random state

    def test_backward_takes_float_sums_for_the_query(self):
        def peak(attention):
            with fake_cuda(attention):
                qkv = [leaf(1, 1, 128, 32, dtype=torch.bfloat16) for _ in range(3)]
                output = functional.scaled_dot_product_attention(*qkv)
                grad = torch.zeros_like(output)
                with LiveTensors() as live:
                    output.backward(grad)
                    return live.peak.temporary_bytes

        assert peak("flash") >= 128 * 33 * 4

    def test_without_gradients_nothing_is_kept(self):
        def attend(*qkv):
            with torch.no_grad():
                return functional.scaled_dot_product_attention(*qkv)

        with fake_cuda():
            assert kept_bytes(attend, *(leaf(1, 1, 32, 8) for _ in range(3))) == 32 * 8 * 4


class TestNormalisation:
    def test_layer_norm_keeps_float_statistics(self):
        def normalise(x, weight):
            return functional.layer_norm(x, (20,), weight)

        with fake_tensors(), cuda_kernels():
            inputs = leaf(10, 20, dtype=torch.bfloat16), leaf(20, dtype=torch.bfloat16)
            assert kept_bytes(normalise, *inputs) == 10 * 20 * 2 + 2 * 10 * 4
            normalise(*inputs).sum().backward()

    def test_rms_norm_is_one_kernel(self):
        def normalise(x, weight):
            return functional.rms_norm(x, (20,), weight)

        with fake_cuda():
            inputs = leaf(10, 20, dtype=torch.bfloat16), leaf(20, dtype=torch.bfloat16)
            assert kept_bytes(normalise, *inputs) == 10 * 20 * 2 + 10 * 4
            normalise(*inputs).sum().backward()
            assert inputs[0].grad.dtype is torch.bfloat16
            assert inputs[1].grad.shape == (20,)

    def test_softmax_converts_half_within_the_kernel(self):
        with fake_cuda(), Ops() as ops:
            functional.softmax(leaf(5, 5, dtype=torch.float16), -1, dtype=torch.float32)
            assert "_to_copy" not in ops.names
            functional.softmax(leaf(5, 5, dtype=torch.bfloat16), -1, dtype=torch.float32)
            assert ops.names.count("_to_copy") == 1


class TestAutocast:
    @pytest.mark.parametrize(
        ("function", "dtype"),
        [
            (lambda x: functional.layer_norm(x, (4,)), torch.float32),
            (lambda x: functional.softmax(x, -1), torch.float32),
            (lambda x: functional.log_softmax(x, -1), torch.float32),
            (lambda x: x.pow(2), torch.float32),
            (lambda x: x.sum(), torch.float32),
            (lambda x: x.sum(-1), torch.float32),
            (lambda x: x.exp(), torch.float32),
            (torch.rsqrt, torch.float32),
            (lambda x: x.norm(), torch.float32),
            (lambda x: x.norm(dim=-1), torch.float32),
            (lambda x: x.cumsum(0), torch.float32),
            (lambda x: functional.cross_entropy(x, torch.zeros(4).long()), torch.float32),
            (lambda x: functional.mse_loss(x, x), torch.float32),
            (lambda x: x @ x, torch.bfloat16),
            (lambda x: x + x, torch.bfloat16),
            (lambda x: x.mean(), torch.bfloat16),
            (functional.gelu, torch.bfloat16),
            (lambda x: functional.dropout(x, 0.1), torch.bfloat16),
            (lambda x: torch.cat([x, x]), torch.bfloat16),
            (lambda x: torch.cat([x, x.float()]), torch.float32),
            (lambda x: torch.addcmul(x, x, x.float()), torch.float32),
            (lambda x: torch.addcmul(x, x, x), torch.bfloat16),
            (lambda x: torch.einsum("ij,jk->ik", x.float(), x.float()), torch.bfloat16),
            (lambda x: torch.mv(x.float(), x.float()[0]), torch.bfloat16),
            (lambda x: functional.pad(x[None], (1, 1), mode="reflect"), torch.bfloat16),
            (lambda x: x.index_put((torch.zeros(1).long(),), x[:1].float()), torch.float32),
            (lambda x: x.double().exp(), torch.float64),
            (lambda x: x.double().sum(), torch.float64),
            (lambda x: x.double().norm(), torch.float64),
            (torch.ops.aten.norm.Scalar, torch.float32),
            (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]), torch.float32),
            (lambda x: torch.ops.aten.norm.Scalar(x.double(), 2), torch.float64),
        ],
    )
    def test_types_are_those_of_cuda(self, function, dtype):
        with fake_cuda(), torch.autocast("cpu", torch.bfloat16):
            x = torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=True)
            assert function(x).dtype is dtype

    @pytest.mark.parametrize("join", [torch.cat, torch.stack])
    def test_tensors_of_several_types_are_joined_without_a_copy(self, join):
        """CUDA's kernel converts while it copies; the CPU's autocast casts before."""
        with fake_cuda(), torch.autocast("cpu", torch.bfloat16):
            parts = [torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.bfloat16)]
            with LiveTensors() as live:
                joined = join(parts)
        assert joined.dtype is torch.float32
        assert live.peak.total_bytes == joined.nbytes + sum(part.nbytes for part in parts)

    def test_each_operator_of_cuda_has_a_rule(self):
        table = _cuda_autocast
        known = {*table._FLOAT32, *table._FLOAT32_RESULT, *table._FLOAT32_NORM}
        known |= {*table._WIDEST, *table._LOWER}
        # Only in builds with cuDNN, and never called with fake tensors, which are on the CPU.
        known |= {"_cudnn_rnn"} & table._registered("AutocastCUDA")
        assert known == table._registered("AutocastCUDA") - table._registered("AutocastCPU")

    def test_cross_entropy_keeps_a_half_and_a_float_copy(self):
        # `log_softmax` gets the type of the logits explicitly, `nll_loss` is cast.
        def loss(logits, target):
            return functional.cross_entropy(logits, target)

        with fake_cuda(), torch.autocast("cpu", torch.bfloat16):
            logits, target = leaf(8, 100, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.long)
            with Ops() as ops:
                loss(logits, target)
            assert ("_log_softmax", torch.bfloat16) in ops.seen
            assert kept_bytes(loss, logits, target) == 8 * 100 * (2 + 4) + 2 * 4

    def test_float16(self):
        with fake_cuda(), torch.autocast("cpu", torch.float16), Ops() as ops:
            functional.softmax(Block()(leaf(2, 16, 32)), -1).sum().backward()
        assert ("_scaled_dot_product_flash_attention", torch.float16) in ops.seen
        assert ("_softmax", torch.float32) in ops.seen

    def test_weights_are_cast_once(self):
        with fake_cuda(), torch.autocast("cpu", torch.bfloat16), Ops() as ops:
            layer = nn.Linear(4, 4, bias=False)
            x = torch.zeros(2, 4, dtype=torch.bfloat16)
            layer(x), layer(x)
            assert ops.names.count("_to_copy") == 1


def train(model, x, optimizer, **clip):
    model(x).sum().backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), **clip)
    optimizer.step()
    optimizer.zero_grad()


class TestOptimizers:
    @staticmethod
    def temporary_bytes(optimizer_class=torch.optim.AdamW, clip=None, **settings):
        model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
        optimizer = optimizer_class(model.parameters(), lr=0.1, **settings)
        train(model, torch.zeros(1, 100), optimizer)
        with LiveTensors(model, [optimizer]) as live:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            live.reset_peak()
            optimizer.step()
            return live.peak.temporary_bytes

    def test_all_parameters_at_once(self):
        with FakeTensorMode():
            assert self.temporary_bytes() == pytest.approx(3 * 40_000, abs=200)
        with fake_cuda():
            assert self.temporary_bytes() == pytest.approx(8 * 40_000, abs=200)

    @pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam"])
    def test_of_every_optimizer(self, name):
        with fake_cuda(), Ops() as ops:
            self.temporary_bytes(getattr(torch.optim, name))
        assert any(op.startswith("_foreach") for op in ops.names)

    def test_what_is_asked_for_counts(self):
        with fake_cuda():
            assert self.temporary_bytes(foreach=False) < 4 * 40_000
            assert self.temporary_bytes(fused=True) < 1000

    def test_clipping(self):
        with fake_cuda(), Ops() as ops:
            self.temporary_bytes(clip=1.0)
        assert "_foreach_norm" in ops.names


class Block(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):  # (B, T, size)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))


class TestRecomputation:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_of_torch(self, use_reentrant):
        with fake_cuda(), torch.autocast("cpu", torch.bfloat16):
            output = checkpoint(Block(), leaf(2, 16, 32), use_reentrant=use_reentrant)
            with Ops() as ops:
                output.sum().backward()
        assert "native_dropout" in ops.names
        assert "_scaled_dot_product_flash_attention" in ops.names
        assert ("native_layer_norm", torch.float32) in ops.seen


def state_of_torch():
    names = ["dropout", "softmax.int", "scaled_dot_product_attention", "_fused_rms_norm"]
    names += ["layer_norm", "cross_entropy_loss", "sum", "embedding_dense_backward"]
    optimizers = [m for name, m in sys.modules.items() if name.startswith("torch.optim.")]
    return (
        [torch._C._dispatch_dump_table(f"aten::{name}") for name in names],
        torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"),
        [getattr(module, "_default_to_fused_or_foreach", None) for module in optimizers],
        list(_foreach_supported_types),
    )


def real_losses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 32), Block(), nn.RMSNorm(32), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(2):
        tokens = torch.randint(10, (2, 8))
        for is_mixed in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack([*losses, *(p.detach().sum() for p in model.parameters())])


class TestNothingIsLeftBehind:
    def test_after_the_context(self):
        before, losses = state_of_torch(), real_losses()
        with fake_cuda():
            assert state_of_torch() != before
        assert state_of_torch() == before
        assert torch.equal(real_losses(), losses)

    def test_after_an_exception(self):
        before = state_of_torch()
        with pytest.raises(RuntimeError, match="on purpose"), fake_cuda():
            raise RuntimeError("on purpose")
        assert state_of_torch() == before

    def test_real_tensors_take_their_own_paths_meanwhile(self):
        losses = real_losses()
        with cuda_kernels():
            assert torch.equal(real_losses(), losses)


class TestScratch:
    def test_second_derivatives_still_work(self):
        with fake_cuda():
            table = nn.Embedding(10, 4)
            loss = table(torch.zeros(5000, dtype=torch.long)).pow(3).sum()
            (grad,) = torch.autograd.grad(loss, table.weight, create_graph=True)
            grad.sum().backward()
            assert table.weight.grad.shape == (10, 4)


def test_assumptions_are_sentences():
    assert len(set(ASSUMPTIONS)) == len(ASSUMPTIONS)
    assert all(line.endswith(".") for line in ASSUMPTIONS)


SMALL = 8_519_680


@pytest.mark.parametrize(
    ("capability", "config", "sizes"),
    [
        *((older, "", (SMALL, SMALL)) for older in ((6, 1), (7, 5), (8, 9))),
        *((newer, "", (2**25, 2**25)) for newer in ((9, 0), (10, 0), (11, 0), (12, 0))),
        ((8, 0), ":4096:8", (2**25, 2**25)),
        ((8, 0), ":16:8", (2**17, 2**17)),
        ((8, 0), ":4096:2:16:8", (2**23 + 2**17, 2**23 + 2**17)),
        ((8, 0), "none", (SMALL, SMALL)),
        ((8, 0), ":0:0", ()),
    ],
)
def test_workspaces_of_a_gpu_and_of_the_variable(capability, config, sizes, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert workspaces(capability) == sizes
    assert workspaces((8, 0), config="") == (SMALL, SMALL)


def test_processes_that_train_together_need_nccl():
    assert [distributed_bytes(number) for number in (1, 2, 3, 8)] == [
        *(0, 544 * 2**20),
        *(688 * 2**20, 688 * 2**20),
    ]
    alone, together = (constant_assumptions((8, 0), "", number) for number in (1, 4))
    assert [line for line in together if line not in alone and "688.00 MiB" in line]
    assert len(together) == len(alone) + 1


def test_margin_is_a_share_of_large_gpus_and_a_size_on_small_ones():
    sizes = [6 * 2**30, 256 * 2**20 * 100 // 3, 80 * 2**30]
    assert [margin_bytes(size) for size in sizes] == [2**28, 2**28, int(80 * 2**30 * 0.03)]


@pytest.mark.parametrize(("device", "more"), [("cuda", 544 * 2**20), ("cpu", 0)])
def test_prediction_of_a_fit_counts_its_processes(device, more):
    step = TrainingStep(
        *(nn.Linear(4, 4), torch.ones(2, 4), MemSaveCallback),
        settings={"preset": "off"},
        device=device,
        fit=RunningFit(),
    )
    alone, together = (
        predict(replace(step, fit=RunningFit(num_processes=number))) for number in (1, 2)
    )
    assert alone.context_bytes == (context_bytes((8, 0)) if device == "cuda" else 0)
    assert together.device_bytes - alone.device_bytes == more
    assert together.measurable_bytes == alone.measurable_bytes
    assert any("NCCL needs" in line for line in together.assumptions) == bool(more)


@pytest.mark.parametrize(
    ("module", "inputs", "named"),
    [
        (
            nn.Conv2d(3, 4, 3),
            torch.ones(2, 3, 8, 8),
            ["cuDNN's workspaces while a convolution runs"],
        ),
        (nn.LSTM(4, 4), torch.ones(5, 2, 4), ["Recurrent layers are assumed to save"]),
        (nn.Linear(4, 4), torch.ones(2, 4), []),
    ],
    ids=["convolution", "lstm", "linear"],
)
def test_names_what_cudnn_needs_and_nothing_counts(module, inputs, named):
    lines = [line for line in predict_memory(module, inputs).assumptions if "cuDNN's" in line]
    lines = [line for line in lines if "kernel" not in line]
    assert len(lines) == len(named)
    assert all(part in line for part, line in zip(named, lines, strict=True))


@pytest.mark.parametrize(
    ("is_old", "bias", "settings", "number"),
    [
        (False, True, {}, 0),
        (True, False, {}, 0),
        (True, True, {}, 1),
        (True, True, {"activation_checkpointing": "all"}, 2),
    ],
)
def test_older_torch_has_workspaces_of_its_own_for_products_with_a_bias(
    is_old, bias, settings, number, monkeypatch
):
    monkeypatch.setattr(constants, "_HAS_LT_WORKSPACES", is_old)
    block = functools.partial(nn.Linear, 4, 4, bias)
    model = nn.Sequential(*[nn.Sequential(block(), nn.Tanh(), block()) for _ in range(2)])
    settings = {"preset": "off", **settings}
    found = predict_memory(model, torch.ones(2, 4), settings=settings)
    assert found.workspace_bytes == 2 * SMALL + number * 2**20
    assert any("cuBLASLt has 1 MiB more" in line for line in found.assumptions) == is_old


@pytest.mark.parametrize(("products", "number"), [((), 0), ((nn.Flatten(), nn.Linear(64, 2)), 2)])
def test_convolutions_have_no_workspaces_of_matrix_products(products, number):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), *products)
    found = predict_memory(model, torch.ones(2, 3, 8, 8), settings={"preset": "off"})
    assert found.workspace_bytes == number * SMALL
    said = f"cuBLAS keeps {format_bytes(number * SMALL)} of workspaces"
    assert any(line.startswith(said) for line in found.assumptions)


# Lightning sets the variable for the process.
def test_deterministic_training_has_larger_workspaces():
    found = [
        predict_memory(nn.Linear(4, 4), torch.ones(2, 4), trainer_arguments=arguments)
        for arguments in ({}, {"deterministic": True}, {"deterministic": "warn"})
    ]
    assert [p.workspace_bytes for p in found] == [17_039_360, 2**26, 2**26]
    assert not torch.are_deterministic_algorithms_enabled()
