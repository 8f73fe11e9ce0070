"""Each technique on a GPU, through its public class: right, bit for bit, and at what cost."""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu._lines import Found, attempt, run_checks
from benchmarks.gpu._measure import (
    MIB,
    allocated_mib,
    limit_to,
    peak_mib,
    relative_error,
    synchronize,
    time_of,
)
from lightning_memsave import (
    ActivationCheckpointing,
    ChunkedCrossEntropy,
    LowBitOptimizer,
    LowPrecisionWeights,
    MicroBatching,
    Offloading,
    OptimizerInBackward,
)
from lightning_memsave.techniques.low_precision_weights.fused_steps import (
    adam,
    adam_8bit,
    matches_eager,
)

WIDTH = 256
TYPES = (torch.bfloat16, torch.float16, None)
"""What autocast computes in; ``None`` is without it."""


class Words(nn.Module):
    """An embedding, a layer, and a head that is tied to the embedding."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Give the loss."""
        logits = self.head(self.body(self.embedding(tokens))).float()
        return nn.functional.cross_entropy(logits, labels, ignore_index=-100)


def chunked_cross_entropy(device: str) -> Iterator[Found]:
    """Loss, gradients, time and memory beside those of nn.functional.cross_entropy."""
    num_tokens, width, vocab_size = (8192, 768, 50_265) if device == "cuda" else (128, 32, 2000)
    for dtype in TYPES:
        for share in (1.0, 0.15):

            def check(dtype: torch.dtype | None = dtype, share: float = share) -> Found:
                torch.manual_seed(0)
                plain = Words(vocab_size, width).to(device)
                ours = copy.deepcopy(plain)
                ChunkedCrossEntropy(heads="head").apply(ours)
                tokens = torch.randint(vocab_size, (num_tokens,), device=device)
                is_left_out = torch.rand(num_tokens, device=device) >= share
                labels = tokens.masked_fill(is_left_out, -100)
                found: Found = {}
                for name, model in (("plain", plain), ("chunked", ours)):

                    def step(model: nn.Module = model) -> Tensor:
                        model.zero_grad()
                        with torch.autocast(
                            device, dtype or torch.bfloat16, enabled=dtype is not None
                        ):
                            loss: Tensor = model(tokens, labels)
                        loss.backward()
                        return loss

                    found[f"{name}_loss"] = step().item()
                    found[f"{name}_peak_mib"] = peak_mib(step, device)
                    found |= {f"{name}_{k}": v for k, v in time_of(step, device, repeats=5).items()}
                pairs = zip(ours.named_parameters(), plain.parameters(), strict=True)
                errors = {n: relative_error(a.grad, b.grad) for (n, a), b in pairs}  # type: ignore[arg-type]
                return {**found, "gradient_errors": errors}

            yield attempt(f"autocast {dtype}, labels {share}", check)


def network(width: int | None = None) -> nn.Sequential:
    """Four encoder layers with dropout."""
    torch.manual_seed(0)
    width = width or WIDTH
    layer = (width, 4, 4 * width, 0.1)
    return nn.Sequential(*(nn.TransformerEncoderLayer(*layer, batch_first=True) for _ in range(4)))


def shape_of(device: str) -> tuple[int, int, int]:
    """Sequences, tokens and width of a batch for `network`."""
    return (8, 64, WIDTH) if device == "cuda" else (2, 8, WIDTH)


def train(
    model: nn.Module,
    optimizer: Any,
    device: str,
    *,
    dtype: torch.dtype | None = None,
    clip_norm: float | None = None,
) -> list[Tensor]:
    """Three steps; the parameters afterwards."""
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(*shape_of(device), device=device)
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x).float().square().mean()
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def compare(found: list[Tensor], expected: list[Tensor]) -> Found:
    """Say whether all are equal bit for bit."""
    pairs = list(zip(found, expected, strict=True))
    return {
        "is_bitwise": all(torch.equal(a, b) for a, b in pairs),
        "max_difference": max(float((a - b).abs().max()) for a, b in pairs),
    }


def _in_backward(device: str, *, is_low_bit: bool) -> Iterator[Found]:
    makers: dict[str, Callable[[Any], Any]] = {
        "AdamW": torch.optim.AdamW,
        "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    }
    if is_low_bit:
        makers = {"8-bit AdamW": torch.optim.AdamW}
    for name, make in makers.items():
        for clip_norm, kept_bytes in ((None, None), (0.01, None), (0.01, 2**20)):

            def check(
                make: Callable[[Any], Any] = make,
                clip_norm: float | None = clip_norm,
                kept_bytes: int | None = kept_bytes,
            ) -> Found:
                trained = []
                for is_ours in (False, True):
                    model = network().to(device)
                    optimizer = make(model.parameters())
                    if is_low_bit:
                        optimizer = LowBitOptimizer(module=model).apply(optimizer).target
                    if is_ours:
                        technique = OptimizerInBackward(clip_norm=clip_norm, kept_bytes=kept_bytes)
                        technique.apply(optimizer)
                    clip = None if is_ours else clip_norm
                    trained.append(train(model, optimizer, device, clip_norm=clip))
                return compare(trained[1], trained[0])

            yield attempt(f"{name}, clip_norm {clip_norm}, kept_bytes {kept_bytes}", check)


def in_backward_is_bitwise(device: str) -> Iterator[Found]:
    """OptimizerInBackward beside a plain loop, with clipping of the global norm."""
    return _in_backward(device, is_low_bit=False)


def low_bit_in_backward_is_bitwise(device: str) -> Iterator[Found]:
    """The same of the 8-bit optimizer."""
    return _in_backward(device, is_low_bit=True)


def checkpointing_is_bitwise(device: str) -> Iterator[Found]:
    """ActivationCheckpointing beside none, with dropout, in each type."""
    for dtype in TYPES[::2]:
        plain = network().to(device)
        expected = train(plain, torch.optim.AdamW(plain.parameters()), device, dtype=dtype)
        for how in (None, "all", "nested", "selective", "sqrt"):

            def check(
                how: Any = how,
                dtype: torch.dtype | None = dtype,
                expected: list[Tensor] = expected,
            ) -> Found:
                model = network().to(device)
                if how is not None:
                    ActivationCheckpointing(how).apply(model)
                optimizer = torch.optim.AdamW(model.parameters())
                found = compare(train(model, optimizer, device, dtype=dtype), expected)
                x = torch.randn(*shape_of(device), device=device)

                def step() -> None:
                    with torch.autocast(device, torch.bfloat16, enabled=dtype is not None):
                        loss = model(x).float().mean()
                    loss.backward()

                return found | time_of(step, device) | {"peak_mib": peak_mib(step, device)}

            yield attempt(f"{how}, autocast {dtype}", check)


def out_of_memory(device: str) -> Iterator[Found]:
    """A real error in forward, late in forward and in backward: sizes tried, gradients after it."""
    # 1.9 GiB are kept for backward and 2.4 needed in it.
    for case, extra_mib in (("early", 500), ("late", 1500), ("backward", 2250)):

        def check(extra_mib: float = extra_mib) -> Found:
            rows, width = (16384, 1024) if device == "cuda" else (16, 32)
            torch.manual_seed(0)
            blocks = (
                nn.Sequential(
                    *(nn.Linear(width, 4 * width), nn.GELU()),
                    *(nn.Dropout(0.1), nn.Linear(4 * width, width)),
                )
                for _ in range(3)
            )
            model = nn.Sequential(*blocks).to(device)
            tried: list[int] = []

            def loss_of(batch: Tensor) -> Tensor:
                tried.append(len(batch))
                loss: Tensor = model(batch).square().mean()
                return loss

            x = torch.randn(rows, width, device=device)
            model(x[:64]).sum().backward()  # cuBLAS has its workspaces
            model.zero_grad()
            if device == "cuda":
                limit_to(extra_mib)
            torch.manual_seed(1)
            try:
                MicroBatching("halve", module=model).apply(loss_of).target(x)
            finally:
                if device == "cuda":
                    torch.cuda.set_per_process_memory_fraction(1.0)
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            sizes = list(dict.fromkeys(tried))
            model.zero_grad()
            torch.manual_seed(1)
            fixed = MicroBatching(sizes[-1], module=model).apply(loss_of)
            fixed.target(x)
            expected = [p.grad for p in model.parameters() if p.grad is not None]
            return {
                "sizes": sizes,
                **compare(found, expected),
                "allocated_mib": allocated_mib(device),
            }

        yield attempt(case, check)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def exact_limit(device: str) -> Iterator[Found]:
    """Does a step fit into a little more than its peak: how much fragmentation costs."""
    # Its peak is many times the 20 MiB that the allocator takes for a tensor of 1 to 10 MiB.
    width = 4 * WIDTH
    model = network(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(*shape_of(device)[:2], width, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = peak_mib(step, device)
    for share in (1.02, 1.05, 1.1, 1.2):

        def check(share: float = share) -> Found:
            optimizer.zero_grad()  # those of a step that did not fit
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
                before_mib = (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / MIB
                limit_to(share * (peak or 0.0) - before_mib)
            try:
                step()
            finally:
                if device == "cuda":
                    torch.cuda.set_per_process_memory_fraction(1.0)
            return {"fits": True, "peak_mib": peak}

        yield attempt(f"{share} of the peak", check)


def step_costs(device: str) -> Iterator[Found]:
    """Time and memory of an optimizer step over 84M parameters in 100 tensors."""
    width, vocab_size = (768, 52_000) if device == "cuda" else (64, 520)

    def make(*, is_half: bool) -> nn.Module:
        torch.manual_seed(0)
        linears = (nn.Linear(width, 4 * width) for _ in range(24))
        model = nn.Sequential(*linears, nn.Embedding(vocab_size, width)).to(device)
        if is_half:
            LowPrecisionWeights().apply(model)
        for param in model.parameters():
            param.grad = torch.randn_like(param) * 1e-3
        return model

    for name in ("foreach", "fused", "8-bit", "stochastic", "8-bit stochastic"):

        def check(name: str = name) -> Found:
            model = make(is_half="stochastic" in name)
            optimizer: Any = torch.optim.AdamW(
                model.parameters(), fused=True if name == "fused" else None
            )
            if "8-bit" in name:
                low_bit = LowBitOptimizer(module=model, force_8bit=("*",))
                optimizer = low_bit.apply(optimizer).target
            if "stochastic" in name:
                LowPrecisionWeights().round_updates(optimizer)
            return {**time_of(optimizer.step, device), "peak_mib": peak_mib(optimizer.step, device)}

        yield attempt(name, check)


def fused_updates(device: str) -> Iterator[Found]:
    """The compiled update of a bfloat16 weight beside its eager form: values, first call, time."""
    shape = (4096, 4096) if device == "cuda" else (64, 64)
    for function in (adam, adam_8bit):

        def check(function: Callable[..., None] = function) -> Found:
            start = time.perf_counter()
            is_equal = matches_eager(function, torch.device(device))
            found: Found = {"is_equal": is_equal, "first_call_s": time.perf_counter() - start}
            weight = nn.Parameter(torch.randn(shape, device=device))
            module = nn.ParameterList([weight])
            LowPrecisionWeights().apply(module)
            optimizer: Any = torch.optim.AdamW(module.parameters())
            if function is adam_8bit:
                low_bit = LowBitOptimizer(module=module, min_8bit_size=1, force_8bit=("*",))
                optimizer = low_bit.apply(optimizer).target
            LowPrecisionWeights().round_updates(optimizer)
            (weight,) = module.parameters()
            weight.grad = torch.randn_like(weight)
            for _ in range(3):  # the second step may compile for other numbers, and try kernels
                optimizer.step()
            found["peak_mib"] = peak_mib(optimizer.step, device)
            return found | time_of(optimizer.step, device)

        yield attempt(function.__name__, check)


def host_updates(device: str) -> Iterator[Found]:
    """Seconds for a billion parameters on the host, updated there and by the device."""
    size = 4096 if device == "cuda" else 64

    def found(case: str, optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> Found:
        def update() -> None:
            optimizer.step()
            wait()

        took = time_of(update, device, repeats=3)
        numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        return {"case": case, "s_per_billion": 1e6 * took["ms"] / numel, "numel": numel}

    weight = nn.Parameter(torch.randn(size, size))
    weight.grad = torch.full_like(weight, 1e-3)
    fused = torch.optim.AdamW([weight], fused=True)
    yield found("32-bit, by the host", fused, lambda: None)
    low_bit = LowBitOptimizer().apply(torch.optim.AdamW([weight])).target
    yield found("8-bit, by the host", low_bit, lambda: None)
    layers = [nn.Linear(size, size, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers).to(device)
    optimizer = LowBitOptimizer().apply(torch.optim.AdamW(model.parameters())).target
    offloading = Offloading("parameters", blocks=nn.Linear)
    handle = offloading.apply(model)
    offloading.update_in_background(optimizer)
    model(torch.randn(8, size, device=device)).sum().backward()
    yield found("8-bit, by the device", optimizer, handle.wait)


def paged_state(device: str) -> Iterator[Found]:
    """Where the host writes and reads pages of the driver; the last line before a crash tells."""
    weight = nn.Parameter(torch.randn(512, 512, device=device))
    weight.grad = torch.ones_like(weight)
    low_bit = LowBitOptimizer("paged_8bit" if device == "cuda" else "8bit")
    optimizer = low_bit.apply(torch.optim.AdamW([weight])).target
    saved: list[Any] = []
    acts: dict[str, Callable[[], Any]] = {
        "first step": optimizer.step,
        "read": lambda: saved.append(copy.deepcopy(optimizer.state_dict())),
        "second step": optimizer.step,
        "loaded": lambda: optimizer.load_state_dict(saved[0]),
        "step after it": optimizer.step,
    }
    for case, act in acts.items():
        act()
        synchronize(device)
        yield {"case": case, "norm": weight.detach().norm().item()}


def stochastic_rounding(device: str) -> Iterator[Found]:
    """A step of 5/2048 from 1: between two numbers of bfloat16, right on average."""
    weight = nn.Parameter(torch.ones(2**10, 2**10, device=device))
    module = nn.ParameterList([weight])
    LowPrecisionWeights().apply(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    LowPrecisionWeights().round_updates(optimizer)
    (weight,) = module.parameters()
    weight.grad = torch.full_like(weight, -5 / 2048)
    optimizer.step()
    mean = weight.detach().double().mean().item()
    yield {"case": "mean", "mean": mean, "expected": 1 + 5 / 2048, "dtype": weight.dtype} | {
        "values": weight.detach().unique().tolist()
    }


CHECKS = {
    check.__name__: check
    for check in (
        chunked_cross_entropy,
        in_backward_is_bitwise,
        low_bit_in_backward_is_bitwise,
        checkpointing_is_bitwise,
        out_of_memory,
        exact_limit,
        step_costs,
        fused_updates,
        host_updates,
        paged_state,
        stochastic_rounding,
    )
}

if __name__ == "__main__":
    run_checks(CHECKS)
