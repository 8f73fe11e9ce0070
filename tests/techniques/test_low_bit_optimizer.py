import copy
import importlib
import inspect
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    MissingDependencyError,
    NoEffectWarning,
)
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.techniques.low_bit_optimizer.bitsandbytes_optimizers import (
    find_changed_names,
    find_obstacle,
)
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.optimizer_kinds import KINDS


def needs_cuda(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


class Tied(nn.Module):
    """An embedding tied to the head, a norm, biases, a small matrix and two larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.head = nn.Linear(64, 80, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Linear(64, 4, bias=False)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x * self.gate(x).mean(-1, keepdim=True))


def train(make_optimizer, make_technique=None, steps=20, dtype=torch.float32):
    """Train the same model on the same data; gives its parameters, the losses, the optimizer."""
    torch.manual_seed(0)
    model = Tied().to(dtype)
    # Never has a gradient; it is there so that some tensor is converted when all others are kept.
    ballast = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    optimizer = make_optimizer([*model.parameters(), ballast])
    if make_technique is not None:
        optimizer = make_technique(model).apply(optimizer).target
    # Labels that the tokens do not tell, so that there is always something left to learn.
    tokens, labels = torch.randint(80, (2, 4, 64))
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.cat([p.detach().float().flatten() for p in model.parameters()]), losses, optimizer


def in_32bit(model):
    return LowBitOptimizer(module=model, keep_32bit=("?*",))


def in_8bit(model, name="8bit"):
    return LowBitOptimizer(name, module=model)


def largest_difference(a, b):
    return (a - b).abs().max().item()


def state_bytes(optimizer):
    tensors = {
        id(value): value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(tensors.values())


def widths(optimizer):
    """Whether each parameter's state has 8 bits, in the order of the groups."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        optimizer.state[p]["state1"].dtype == torch.uint8 for p in params if p in optimizer.state
    ]


CONVERTED = {
    "adamw": lambda p: optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "adam": lambda p: optim.Adam(p, lr=3e-3),
    "adam_coupled": lambda p: optim.Adam(p, lr=3e-3, weight_decay=0.1),
    "adam_decoupled": lambda p: optim.Adam(
        p, lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "sgd": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, weight_decay=0.1),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_with_32bit_state_it_computes_what_torch_computes(name):
    expected, _, _ = train(CONVERTED[name])
    result, _, optimizer = train(CONVERTED[name], in_32bit)
    assert hasattr(optimizer, "memsave_kind")
    assert not any(widths(optimizer))
    assert largest_difference(result, expected) < 1e-6


def test_coupled_weight_decay_leaves_the_gradient_as_it_was():
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = LowBitOptimizer().apply(optim.Adam([weight], weight_decay=0.1)).target
    weight.grad = torch.ones_like(weight)
    gradient = weight.grad
    optimizer.step()
    assert weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(weight))


# Not float16: torch's own optimizers end in NaN there.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONVERTED)
def test_8bit_training_stays_close(name, dtype):
    _, expected, _ = train(CONVERTED[name], dtype=dtype)
    _, losses, optimizer = train(CONVERTED[name], in_8bit, dtype=dtype)
    assert any(widths(optimizer))
    assert losses[-1] < losses[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.03)


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
def test_change_names_the_exact_bytes_before_and_after(name):
    from lightning_memsave.units import format_bytes

    _, _, old = train(CONVERTED[name], steps=1)
    _, _, new = train(CONVERTED[name], in_8bit, steps=1)
    model = Tied()
    (change,) = in_8bit(model).apply(CONVERTED[name](model.parameters())).changes
    assert f"{format_bytes(state_bytes(old))} -> {format_bytes(state_bytes(new))}" in change
    assert "2 of 8 tensors" in change
    assert "(kept 32-bit: 2 bias, 1 embedding, 2 norm, 1 small)" in change


def test_name_patterns_override_the_rule():
    def technique(model):
        return LowBitOptimizer(
            module=model, force_8bit=("head.*", "gate.*"), keep_32bit=("up.*",), min_8bit_size=256
        )

    _, _, optimizer = train(CONVERTED["adamw"], technique, steps=1)
    assert widths(optimizer) == [True, False, False, False, False, True, False, True]


def test_a_bitsandbytes_override_meant_for_another_optimizer_has_no_effect():
    import bitsandbytes

    manager = bitsandbytes.optim.optimizer.GlobalOptimManager.get_instance()
    manager.index2config[0, 3] = {"optim_bits": 32}
    try:
        _, _, optimizer = train(CONVERTED["adamw"], in_8bit, steps=1)
    finally:
        manager.initialize()
    assert widths(optimizer)[3]


def test_without_a_module_vectors_stay_32bit_and_param_names_are_used():
    model = Tied()
    adamw = optim.AdamW(model.named_parameters())
    optimizer: Any = LowBitOptimizer(keep_32bit=("up.weight",)).apply(adamw).target
    by_name = dict(model.named_parameters())
    assert not optimizer.uses_8bit(by_name["up.weight"])
    assert optimizer.uses_8bit(by_name["down.weight"])
    assert not optimizer.uses_8bit(by_name["norm.weight"])


class MyAdamW(optim.AdamW):
    pass


STAYS = {
    "amsgrad": (lambda p: optim.AdamW(p, amsgrad=True), "AdamW.amsgrad=True.*no 8-bit AMSGrad"),
    "nesterov": (lambda p: optim.SGD(p, momentum=0.9, nesterov=True), "nesterov=True"),
    "maximize": (lambda p: optim.Adam(p, maximize=True), "only minimizes"),
    "differentiable": (lambda p: optim.Adam(p, differentiable=True), "cannot be differentiated"),
    "capturable": (lambda p: optim.AdamW(p, capturable=True), "outside the CUDA graph"),
    "lr": (lambda p: optim.AdamW(p, lr=torch.tensor(1e-3)), "lr=tensor"),
    "momentum": (optim.SGD, "without momentum it has no state"),
    "dampening": (lambda p: optim.SGD(p, momentum=0.9, dampening=0.1), "dampening=0.1"),
    "centered": (lambda p: optim.RMSprop(p, centered=True), "no centered RMSprop"),
    "rmsprop": (lambda p: optim.RMSprop(p, momentum=0.9), "RMSprop with momentum"),
    "lbfgs": (optim.LBFGS, "`LBFGS` stays 32-bit: bitsandbytes has no 8-bit form"),
    "adafactor": (optim.Adafactor, "`Adafactor` stays 32-bit"),
    "adagrad": (optim.Adagrad, "lose the small gradients"),
    "subclass": (MyAdamW, "subclass of `AdamW`"),
    "second group": (
        lambda p: optim.AdamW([{"params": p}, {"params": [], "amsgrad": True}]),
        "amsgrad=True",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_has_no_8bit_form_stays_and_says_why(name):
    make, reason = STAYS[name]
    optimizer = make(list(Tied().parameters()))
    with pytest.warns(NoEffectWarning, match=reason):
        handle = LowBitOptimizer().apply(optimizer)
    assert handle.target is optimizer
    assert handle.changes == ()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda m: optim.AdamW(m.double().parameters()), "float64 parameters"),
        (lambda m: optim.AdamW(m.norm.parameters()), "stays 32-bit: 2 norm"),
        (lambda m: __import__("bitsandbytes").optim.AdamW8bit(m.parameters()), "already"),
        (lambda m: in_8bit(m).apply(optim.AdamW(m.parameters())).target, "8 bits already"),
    ],
)
def test_nothing_to_convert_is_said(make, reason):
    model = Tied()
    optimizer = make(model)
    with pytest.warns(NoEffectWarning, match=reason):
        assert in_8bit(model).apply(optimizer).target is optimizer


def sparse(model):
    model.embed.sparse = True
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", ["8bit", "lion_8bit"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (sparse, "`embed` has sparse gradients"),
        (
            lambda m: optim.AdamW([*m.parameters(), *nn.LazyLinear(3).parameters()]),
            "lazy parameters",
        ),
    ],
    ids=["sparse", "lazy"],
)
def test_parameters_that_bitsandbytes_cannot_take(make, reason, name):
    model = Tied()
    optimizer = make(model)
    with pytest.warns(NoEffectWarning, match=f"stays unchanged: .*{reason}"):
        assert in_8bit(model, name).apply(optimizer).target is optimizer
    if reason != "lazy parameters":
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["8bit", "lion_8bit"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64])
def test_frozen_parameters_of_any_type_do_not_matter(name, dtype):
    model = Tied()
    frozen = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    optimizer = optim.AdamW([*model.parameters(), frozen])
    handle = in_8bit(model, name).apply(optimizer)
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    handle.target.step()
    assert handle.target.uses_8bit(model.up.weight)
    assert handle.target.state[model.up.weight]["state1"].dtype == torch.uint8
    assert frozen not in handle.target.state


def test_groups_are_shared_and_untouched():
    weight = nn.Parameter(torch.randn(64, 64))
    sgd = optim.SGD([weight], lr=0.1, momentum=0.9)
    group = sgd.param_groups[0]
    before, defaults = dict(group), dict(sgd.defaults)
    handle = LowBitOptimizer().apply(sgd)
    assert handle.target.param_groups[0] is group
    assert handle.target.defaults == defaults
    assert group.keys() == before.keys()
    assert "momentum" in group
    assert "betas" not in group
    handle.undo()
    assert group == before
    assert not sgd.state


def test_momentum_of_the_group_is_the_one_that_counts():
    def cycled(params):
        optimizer = CONVERTED["sgd"](params)
        optimizer.param_groups[0]["momentum"] = 0.5
        return optimizer

    expected, _, _ = train(cycled)
    result, _, _ = train(cycled, in_32bit)
    assert largest_difference(result, expected) < 1e-6


@pytest.mark.parametrize("where", ["groups", "module"])
def test_parameters_unfrozen_later_get_the_state_that_they_would_have_had(where):
    model = Tied().requires_grad_(False)
    model.gate.requires_grad_()
    params = model.parameters() if where == "groups" else model.gate.parameters()
    handle = in_8bit(model).apply(optim.AdamW(params))
    assert "0 of 1 tensors" in handle.summary
    assert "kept 32-bit: 1 small; 2 frozen tensors get 8-bit state once trained" in handle.summary
    new: Any = handle.target
    model.requires_grad_()
    if where == "module":
        new.add_param_group(
            {"params": [p for p in model.parameters() if p is not model.gate.weight]}
        )
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    new.step()
    in_8_bits = {id(p) for p in new.state if new.state[p]["state1"].dtype == torch.uint8}
    assert in_8_bits == {id(model.up.weight), id(model.down.weight)}


@pytest.mark.parametrize("base", ["adapters", "integers"])
def test_frozen_parameters_that_are_never_trained_do_not_count(base):
    """The base of an adapter, and weights that no gradient can train."""
    model = Tied().requires_grad_(False)
    model.gate.requires_grad_()
    if base == "adapters":
        vars(model)["peft_config"] = {}  # as PEFT marks a model with adapters
    else:
        for layer in (model.up, model.down):
            layer.weight.data = layer.weight.data.to(torch.int8)
    optimizer = optim.AdamW(model.parameters())
    with pytest.warns(NoEffectWarning, match="`AdamW` stays 32-bit: 1 small"):
        assert in_8bit(model).apply(optimizer).target is optimizer


def test_a_copy_holds_the_optimizers_parameters_alone():
    model = Tied()
    new: Any = in_8bit(model).apply(optim.AdamW(model.up.parameters())).target
    copied = copy.deepcopy(new)
    assert list(copied.bits_by_param) == copied.param_groups[0]["params"]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_as_the_original(way):
    model = Tied()
    pair = (model, in_8bit(model).apply(CONVERTED["adam_coupled"](model.parameters())).target)

    def step(pair):
        pair[0](torch.arange(8)[None]).square().sum().backward()
        pair[1].step()
        pair[1].zero_grad()

    step(pair)
    twin = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    before = copy.deepcopy(twin[0].state_dict())
    step(pair)
    assert all(torch.equal(before[k], v) for k, v in twin[0].state_dict().items())
    step(twin)
    params = zip(pair[0].parameters(), twin[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in params)
    assert widths(twin[1]) == widths(pair[1])


def test_command_lines_do_not_see_the_classes():
    from jsonargparse._typehints import get_all_subclass_paths

    before = get_all_subclass_paths(optim.Optimizer)
    weight = nn.Parameter(torch.randn(64, 64))
    new = LowBitOptimizer().apply(optim.AdamW([weight])).target
    assert type(new).__name__ == "AdamW"  # LearningRateMonitor logs under this name
    assert type(new) is not optim.AdamW
    assert "8-bit" in repr(new)
    assert [p for p in get_all_subclass_paths(optim.Optimizer) if "memsave" in p] == []
    assert set(before) <= set(get_all_subclass_paths(optim.Optimizer))


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_named_optimizers_equal_bitsandbytes_own(name):
    import bitsandbytes

    kind = next(kind for kind in KINDS if kind.word == name)
    own = getattr(bitsandbytes.optim, kind.class_name)
    kwargs = {"momentum": 0.8} if name == "sgd" else {}

    def technique(model):
        return LowBitOptimizer(f"{name}_8bit", optimizer_kwargs=kwargs, force_8bit=("*",))

    expected, _, _ = train(lambda p: own(p, lr=1e-3, weight_decay=0.05, **kwargs))
    result, _, _ = train(lambda p: optim.AdamW(p, lr=1e-3, weight_decay=0.05), technique)
    assert torch.equal(result, expected)


def test_named_optimizer_keeps_what_means_the_same_and_undo_restores_the_groups():
    a, b = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))
    groups: list[dict[str, Any]] = [
        {"params": [a]},
        {"params": [b], "weight_decay": 0.0, "lr": 0.5},
    ]
    adamw = optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), weight_decay=0.2)
    before = [dict(group) for group in adamw.param_groups]
    handle = LowBitOptimizer("lion_8bit", optimizer_kwargs={"weight_decay": 0.3}).apply(adamw)
    first, second = handle.target.param_groups
    assert (first["lr"], first["weight_decay"], first["betas"]) == (0.1, 0.3, (0.9, 0.99))
    assert (second["lr"], second["weight_decay"]) == (0.5, 0.0)
    handle.undo()
    assert adamw.param_groups == before
    assert handle.target.param_groups[0]["betas"] == (0.9, 0.99)

    same = LowBitOptimizer("adam_8bit").apply(adamw).target.param_groups[0]
    assert (same["betas"], same["decoupled_weight_decay"]) == ((0.8, 0.95), False)


def test_paged_says_when_it_is_not():
    weight = nn.Parameter(torch.randn(64, 64))
    (change,) = LowBitOptimizer("paged_8bit").apply(optim.AdamW([weight])).changes
    assert "not paged: the parameters are on the CPU" in change
    sgd = optim.SGD([weight], momentum=0.9)
    (change,) = LowBitOptimizer("paged_8bit").apply(sgd).changes
    assert "bitsandbytes has no paged SGD" in change


@needs_cuda
@pytest.mark.parametrize("name", CONVERTED)
def test_32bit_tensors_step_in_bfloat16_on_cuda(name):
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(device, torch.bfloat16)
        optimizer = in_8bit(model).apply(CONVERTED[name](model.parameters())).target
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()
        results.append(torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)


@needs_cuda
def test_paged_state_is_paged_again_after_a_load():
    weight = nn.Parameter(torch.randn(512, 512, device="cuda"))
    new = LowBitOptimizer("paged_8bit").apply(optim.AdamW([weight])).target
    weight.grad = torch.ones_like(weight)
    new.step()
    saved = {
        key: value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in new.state[weight].items()
    }
    state_dict = {**new.state_dict(), "state": {0: saved}}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    new.load_state_dict(copy.deepcopy(state_dict))
    assert new.state[weight]["state1"].is_paged
    assert torch.cuda.max_memory_allocated() - before < weight.numel()  # one moment in 8 bits
    assert torch.equal(new.state[weight]["state1"], saved["state1"])
    new.step()
    assert new.state[weight]["state1"].is_paged


@needs_cuda
@pytest.mark.parametrize("way", ["state", "file", "optimizer"])
def test_a_copy_of_paged_state_is_paged_before_its_next_step(way, tmp_path):
    """A copy says of itself that it is paged; CUDA ends the process that prefetches it."""
    weight = nn.Parameter(torch.randn(512, 512, device="cuda"))
    new = LowBitOptimizer("paged_8bit").apply(optim.AdamW([weight])).target
    weight.grad = torch.ones_like(weight)
    new.step()
    if way == "optimizer":
        new = copy.deepcopy(new)
        (weight,) = new.param_groups[0]["params"]
        weight.grad = torch.ones_like(weight)
    elif way == "file":
        torch.save(new.state_dict(), tmp_path / "state")
        new.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    else:
        new.load_state_dict(copy.deepcopy(new.state_dict()))
    before = weight.detach().clone()
    new.step()
    assert new.state[weight]["state1"].is_paged
    assert not torch.equal(weight, before)


def test_the_path_for_kernels_that_cuda_lacks_computes_the_same(monkeypatch):
    from lightning_memsave.techniques.low_bit_optimizer.bitsandbytes_optimizers import (
        _PerParameterBits,
    )

    expected, _, _ = train(CONVERTED["sgd"], in_32bit, dtype=torch.bfloat16)
    monkeypatch.setattr(_PerParameterBits, "_lacks_kernel", lambda *_: True)
    result, _, _ = train(CONVERTED["sgd"], in_32bit, dtype=torch.bfloat16)
    assert torch.equal(result, expected)


def test_refuses_an_optimizer_that_has_made_steps():
    weight = nn.Parameter(torch.randn(64, 64))
    adamw = optim.AdamW([weight])
    weight.sum().backward()
    adamw.step()
    with pytest.raises(IncompatibleError, match="Switch to 8 bits before the first step"):
        LowBitOptimizer().apply(adamw)


def test_refuses_a_pattern_that_fits_nothing():
    model = Tied()
    adamw = optim.AdamW(model.parameters())
    with pytest.raises(IncompatibleError, match=r"names such as `head.weight`"):
        LowBitOptimizer(module=model, keep_32bit=("*lm_head.weight",)).apply(adamw)
    with pytest.raises(IncompatibleError, match="Pass `module=`"):
        LowBitOptimizer(force_8bit=("embed.*",)).apply(adamw)


@pytest.mark.parametrize("dim", [0, 1])  # of FSDP2, and of tensor parallelism
def test_a_dtensor_is_updated_as_the_tensor_that_it_holds(dim):
    from torch._C._distributed_c10d import HashStore
    from torch.distributed import destroy_process_group, device_mesh, init_process_group
    from torch.distributed.tensor import Shard, distribute_tensor

    plain = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    gradients = [torch.full_like(plain, value) for value in (0.5, -0.25, 1.0)]
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = device_mesh.init_device_mesh("cpu", (1,))
        split = [Shard(dim)]
        weight: Any = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, split))
        ours, alone = (LowBitOptimizer().apply(optim.AdamW([p])).target for p in (weight, plain))
        for gradient in gradients:
            weight.grad, plain.grad = distribute_tensor(gradient, mesh, split), gradient
            ours.step()
            alone.step()
        assert torch.equal(weight.to_local(), plain)
        saved = ours.state_dict()["state"][0]
        assert saved["exp_avg"].shape == plain.shape
        again = LowBitOptimizer().apply(optim.AdamW([weight])).target
        again.load_state_dict(ours.state_dict())
        expected = alone.state[plain] | {"step": 3}
        for key, value in again.state[weight].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[key])), key
    finally:
        destroy_process_group()


def test_missing_bitsandbytes_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    weight = nn.Parameter(torch.randn(64, 64))
    with pytest.raises(MissingDependencyError, match="pip install -U 'bitsandbytes"):
        LowBitOptimizer().apply(optim.AdamW([weight]))


@pytest.fixture
def version_of(monkeypatch, tmp_path):
    """Let bitsandbytes be installed in another version, as far as its metadata goes."""

    def install(version):
        folder = tmp_path / f"bitsandbytes-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: bitsandbytes\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


@pytest.mark.parametrize("version", ["0.46.0", "0.49.2"])
def test_a_bitsandbytes_that_is_too_old_names_the_command(version, version_of):
    version_of(version)
    weight = nn.Parameter(torch.randn(64, 64))
    message = rf"bitsandbytes {version} is older than 0\.50\. Run `pip install -U"
    with pytest.raises(MissingDependencyError, match=message):
        LowBitOptimizer().apply(optim.AdamW([weight]))
    assert "is older than" in (find_obstacle(torch.device("cpu")) or ("",))[0]


def test_a_device_without_tests_is_refused():
    why, fix = find_obstacle(torch.device("xpu")) or ("", "")
    assert (why, fix) == ("8-bit optimizers are not tested on xpu", "Set `optimizer=None`.")


@pytest.mark.parametrize("version", ["0.50.0", "0.50.3.dev0", "0.51.0", "1.0"])
def test_newer_versions_of_bitsandbytes_are_used(version, version_of):
    version_of(version)
    weight = nn.Parameter(torch.randn(64, 64))
    assert LowBitOptimizer().apply(optim.AdamW([weight])).changes


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        ("bitsandbytes.functional", "get_paged", "bitsandbytes.functional.get_paged is missing"),
        ("bitsandbytes.optim.optimizer", "GlobalOptimManager", "GlobalOptimManager is missing"),
        ("Optimizer8bit", "get_state_buffer", r"Optimizer2State\.get_state_buffer is missing"),
    ],
)
def test_a_bitsandbytes_without_names_that_are_used_is_refused(owner, name, message, monkeypatch):
    from bitsandbytes.optim.optimizer import Optimizer8bit

    find_changed_names.cache_clear()
    where = Optimizer8bit if owner == "Optimizer8bit" else importlib.import_module(owner)
    monkeypatch.delattr(where, name)
    weight = nn.Parameter(torch.randn(64, 64))
    with pytest.raises(MissingDependencyError, match=f"is not supported: .*{message}"):
        LowBitOptimizer().apply(optim.AdamW([weight]))
    find_changed_names.cache_clear()


def test_a_bitsandbytes_that_reads_other_settings_is_refused(monkeypatch):
    """As 0.49 did: `block_wise` and `percentile_clipping` came from `get_config`."""
    from bitsandbytes.optim.optimizer import Optimizer2State

    update = Optimizer2State.update_step

    def older(self, group, p, gindex, pindex):
        self.get_config(gindex, pindex, group)["percentile_clipping"]
        update(self, group, p, gindex, pindex)

    find_changed_names.cache_clear()
    monkeypatch.setattr(Optimizer2State, "update_step", older)
    weight = nn.Parameter(torch.randn(64, 64))
    with pytest.raises(MissingDependencyError, match="KeyError: 'percentile_clipping'"):
        LowBitOptimizer().apply(optim.AdamW([weight]))
    find_changed_names.cache_clear()


def test_the_tiny_step_touches_no_random_numbers_and_no_fake_mode():
    find_changed_names.cache_clear()
    state = torch.get_rng_state()
    with fake_tensors():
        assert find_changed_names() is None
    assert torch.equal(state, torch.get_rng_state())


def test_a_cuda_library_that_does_not_load_is_an_obstacle_on_cuda(monkeypatch):
    import bitsandbytes.cextension as extension

    lost = extension.ErrorHandlerMockBNBNativeLibrary("libcudart.so.13: cannot open shared object")
    monkeypatch.setattr(extension, "lib", lost)
    why, fix = find_obstacle(torch.device("cuda", 0)) or ("", "")
    assert why.startswith(
        "bitsandbytes' CUDA library cannot be loaded (libcudart.so.13: cannot open"
    )
    assert "set `optimizer=None`" in fix
    assert find_obstacle(torch.device("cpu")) is None


BAD = [
    ({"optimizer": "adamw8bit"}, 'Did you mean "adamw_8bit"'),
    ({"optimizer": "paged_adamw8bit"}, 'Did you mean "paged_adamw_8bit"'),
    ({"optimizer": "4bit"}, 'Choose one of "8bit", "paged_8bit", "adamw_8bit"'),
    ({"optimizer": "paged_sgd_8bit"}, 'Use "sgd_8bit"'),
    ({"optimizer": optim.AdamW}, 'use `optimizer="8bit"` for its 8-bit form'),
    ({"optimizer": optim.SGD([nn.Parameter(torch.zeros(1))])}, r"`optimizer=SGD\(\.\.\.\)`: it is"),
    ({"optimizer": ["8bit"]}, 'Did you mean "8bit"'),
    ({"optimizer": "lion_8bit", "optimizer_kwargs": [1]}, "Write for example `optimizer_kwargs="),
    ({"optimizer_kwargs": {"betas": (0.9, 0.9)}}, "Set them in `configure_optimizers`"),
    ({"optimizer": "adamw_8bit", "optimizer_kwargs": {"lr": 1}}, "in `configure_optimizers`"),
    ({"optimizer": "adamw_8bit", "optimizer_kwargs": {"beta": 1}}, "Did you mean `betas`"),
    (
        {"optimizer": "lion_8bit", "optimizer_kwargs": {"eps": 1}},
        "Its settings are betas, weight_decay",
    ),
    ({"optimizer": "adamw_8bit", "optimizer_kwargs": {"betas": (0.9,)}}, r"example \(0.9, 0.999\)"),
    ({"optimizer": "adamw_8bit", "optimizer_kwargs": {"eps": -1}}, "The default is 1e-08"),
    ({"optimizer": "sgd_8bit", "optimizer_kwargs": {"momentum": 0}}, "Use for example 0.9"),
    (
        {"optimizer": "adamw_8bit", "optimizer_kwargs": {"min_8bit_size": 9}},
        r"Write `LowBitOptimizer\(..., min_8bit_size=9\)`",
    ),
    ({"keep_32bit": "*.head"}, r"Write `keep_32bit=\('\*.head',\)`"),
    ({"force_8bit": (1,)}, "Write for example `force_8bit="),
    ({"min_8bit_size": 0}, "Use 4096"),
]


@pytest.mark.parametrize(("arguments", "remedy"), BAD)
def test_bad_arguments_are_refused_with_a_remedy(arguments, remedy):
    with pytest.raises(ConfigurationError, match=remedy):
        LowBitOptimizer(**arguments)


def test_all_bad_arguments_are_in_one_message():
    with pytest.raises(ConfigurationError, match=r"3 problems[\s\S]*keep_32bit[\s\S]*min_8bit"):
        LowBitOptimizer("adam", keep_32bit="a", min_8bit_size=-1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.word)
def test_our_tables_agree_with_bitsandbytes(kind):
    import bitsandbytes

    parameters = inspect.signature(getattr(bitsandbytes.optim, kind.class_name)).parameters
    assert kind.defaults.keys() <= parameters.keys()
    paged = hasattr(bitsandbytes.optim, f"Paged{kind.class_name}")
    assert paged == (kind.paged_class_name is not None)
    for key in kind.defaults.keys() - {"momentum", "weight_decay"}:
        assert kind.defaults[key] == parameters[key].default
