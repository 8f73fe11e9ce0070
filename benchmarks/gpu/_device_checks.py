"""What the GPU, its driver and its libraries do: costs, workspaces, kernels, words of errors."""

import gc
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._models import BASE, TINY, masked_batch
from benchmarks.gpu._lines import Found, attempt, run_checks
from benchmarks.gpu._measure import (
    MIB,
    allocated_mib,
    outside_mib,
    peak_mib,
    relative_error,
    synchronize,
    time_of,
)


def fixed_costs(device: str) -> Iterator[Found]:
    """Bytes of the context, and of the libraries' workspaces, each at its first use."""
    if device == "cuda":
        torch.zeros(1, device=device)
        yield {
            "case": "device",
            "name": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
            "total_mib": torch.cuda.mem_get_info()[1] / MIB,
        }
    held: list[Tensor] = []

    def with_costs(case: str, use: Callable[[], object]) -> Found:
        before_mib = allocated_mib(device)
        use()
        synchronize(device)
        gc.collect()
        found: Found = {"allocated_mib": allocated_mib(device) - before_mib}
        return found | ({"outside_mib": outside_mib()} if device == "cuda" else {})

    matrix = torch.randn(256, 256, device=device, requires_grad=True)
    half = nn.Linear(256, 256, device=device, dtype=torch.bfloat16)
    image = torch.randn(2, 8, 32, 32, device=device)
    convolution = nn.Conv2d(8, 8, 3).to(device)
    recurrent = nn.LSTM(8, 8).to(device)

    def eight_bit_step() -> None:
        import bitsandbytes  # noqa: PLC0415 - this case only

        weight = nn.Parameter(torch.randn(256, 256, device=device))
        weight.grad = torch.ones_like(weight)
        optim: Any = bitsandbytes.optim
        optim.AdamW8bit([weight]).step()

    uses: dict[str, Callable[[], object]] = {
        "zeros": lambda: held.append(torch.zeros(1, device=device)),
        "matmul": lambda: (matrix @ matrix).sum().item(),
        "matmul, backward": lambda: torch.autograd.grad((matrix @ matrix).sum(), matrix),
        "linear in bf16": lambda: half(matrix.bfloat16()).sum().item(),
        "convolution": lambda: convolution(image).sum().backward(),
        "recurrent": lambda: recurrent(torch.randn(4, 2, 8, device=device))[0].sum().item(),
    }
    if importlib.util.find_spec("bitsandbytes") is not None:
        uses["bitsandbytes"] = eight_bit_step
    for case, use in uses.items():
        yield attempt(case, lambda case=case, use=use: with_costs(case, use))  # type: ignore[misc]


def wide_products(device: str) -> Iterator[Found]:
    """Products of low precision into float32: are they there, right, and slow at odd widths."""
    vocab_size, width, rows = (50_257, 1600, 416) if device == "cuda" else (501, 64, 32)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(rows, width, device=device).to(dtype)
        weight = torch.randn(vocab_size, width, device=device).to(dtype)
        expected = x.double() @ weight.double().t()
        padded_size = -(-vocab_size // 64) * 64
        outs = {
            "odd": torch.zeros(rows, vocab_size, device=device),
            "padded": torch.zeros(rows, padded_size, device=device)[:, :vocab_size],
        }
        for layout, out in outs.items():

            def product(out: Tensor = out, x: Tensor = x, weight: Tensor = weight) -> Any:
                if device == "cuda":
                    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
                return out.copy_(x.float() @ weight.float().t())

            def check(
                out: Tensor = out, product: Any = product, expected: Tensor = expected
            ) -> Found:
                product()
                return {"error": relative_error(out, expected), **time_of(product, device)}

            yield attempt(f"{dtype}, {layout} leading dimension", check)


def saved_by_attention(device: str) -> Iterator[Found]:
    """Bytes that scaled_dot_product_attention saves, by mask, type and number of tokens."""
    batch, heads, width = (8, 12, 64) if device == "cuda" else (2, 2, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_tokens in (512, 520, 505) if device == "cuda" else (16, 17):
            for mask_name in ("none", "causal", "padding"):

                def check(
                    dtype: torch.dtype = dtype, num_tokens: int = num_tokens, mask: str = mask_name
                ) -> Found:
                    shape = (batch, heads, num_tokens, width)
                    q, k, v = (
                        torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
                        for _ in range(3)
                    )
                    kept = torch.ones(batch, 1, num_tokens, num_tokens, device=device).bool()
                    kept[..., num_tokens // 2 :] = False
                    before_mib = allocated_mib(device)
                    out = nn.functional.scaled_dot_product_attention(
                        *(q, k, v),
                        attn_mask=kept if mask == "padding" else None,
                        is_causal=mask == "causal",
                        dropout_p=0.1,
                    )
                    saved = allocated_mib(device) - before_mib - out.nbytes / MIB
                    out.sum().backward()
                    scores_mib = batch * heads * num_tokens**2 * out.element_size() / MIB
                    return {"saved_mib": saved, "scores_mib": scores_mib}

                yield attempt(f"{dtype}, {num_tokens} tokens, mask {mask_name}", check)


# Sequences, heads, heads of keys and values, tokens, size of a head.
_ATTENTION = (
    *((8, 25, 25, 1024, 64), (64, 12, 12, 128, 64), (2, 32, 8, 2048, 128), (8, 12, 4, 512, 64)),
    *((1, 16, 16, 1024, 64), (4, 16, 16, 1024, 64), (8, 16, 16, 1024, 64), (8, 16, 16, 1000, 64)),
    *((4, 16, 16, 2048, 64), (4, 16, 16, 1024, 128)),
)


def attention_kernels(device: str) -> Iterator[Found]:
    """Memory and time of each kernel of attention, forward and backward, by shape."""
    is_cuda = device == "cuda"
    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    for shape, (masked, dropout), (kernel, backend) in itertools.product(
        _ATTENTION if is_cuda else [(2, 2, 2, 16, 8)],
        (("causal", 0.0), ("causal", 0.125), ("mask", 0.125)),
        (kernels if is_cuda else {"math": SDPBackend.MATH}).items(),
    ):

        def check(
            shape: tuple[int, ...] = shape,
            masked: str = masked,
            dropout: float = dropout,
            backend: SDPBackend = backend,
        ) -> Found:
            batch, heads, shared, num_tokens, width = shape

            def make(num_heads: int) -> Tensor:
                size = (batch, num_tokens, num_heads, width)
                x = torch.randn(size, device=device, dtype=torch.bfloat16)
                return x.transpose(1, 2).requires_grad_()

            qkv = make(heads), make(shared), make(shared)
            mask = torch.zeros(batch, 1, num_tokens, num_tokens, device=device).bfloat16()

            def forward() -> Tensor:
                with sdpa_kernel(backend):
                    return nn.functional.scaled_dot_product_attention(
                        *qkv,
                        attn_mask=mask if masked == "mask" else None,
                        is_causal=masked == "causal",
                        dropout_p=dropout,
                        enable_gqa=heads != shared,
                    )

            out = forward()
            gradient = torch.ones_like(out)

            def backward() -> None:
                torch.autograd.grad(out, qkv, gradient, retain_graph=True)

            found: Found = {f"{f.__name__}_mib": peak_mib(f, device) for f in (forward, backward)}
            times = {f"backward_{k}": v for k, v in time_of(backward, device).items()}
            return found | {"query_mib": out.nbytes / MIB} | time_of(forward, device) | times

        sizes = " x ".join(map(str, shape))
        yield attempt(f"{sizes}, {masked}, dropout {dropout}, {kernel}", check)


def allocator_replay(device: str) -> Iterator[Found]:
    """Three real training steps, replayed through our CachingAllocator: equal bytes expected."""
    from lightning_memsave.prediction.cuda.allocator import CachingAllocator  # noqa: PLC0415

    sizes, batch_size, num_tokens = (BASE, 16, 128) if device == "cuda" else (TINY, 2, 16)
    batch = masked_batch(sizes.vocab_size, batch_size, num_tokens)
    if device == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    model = sizes.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(**{k: v.to(device) for k, v in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    if device != "cuda":
        yield {"case": "replay", "num_events": 0}
        return
    (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    torch.cuda.memory._record_memory_history(enabled=None)
    ours, handles, num_events = CachingAllocator(), {}, 0
    for event in trace:
        if event["action"] == "alloc":
            handles[event["addr"]] = ours.malloc(event["size"])
        elif event["action"] == "free_completed" and event["addr"] in handles:
            ours.free(handles.pop(event["addr"]))
        num_events += 1
    stats = torch.cuda.memory_stats()
    yield {
        "case": "replay",
        "num_events": num_events,
        "reserved_mib": stats["reserved_bytes.all.current"] / MIB,
        "ours_reserved_mib": ours.reserved_bytes / MIB,
        "allocated_mib": stats["allocated_bytes.all.current"] / MIB,
        "ours_allocated_mib": ours.allocated_bytes / MIB,
    }


def words_of_a_full_gpu(device: str) -> Iterator[Found]:
    """What libraries raise when the driver has nothing left, and whether we recognise it."""
    from lightning_memsave.core.out_of_memory import is_out_of_memory  # noqa: PLC0415

    x = torch.randn(64, 64, device=device)
    image = torch.randn(2, 8, 32, 32, device=device)
    held: list[Tensor] = []
    num_bytes = 2**30 if device == "cuda" else 0
    while num_bytes >= 2**21:
        try:
            held.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            num_bytes //= 2

    def in_backward() -> None:
        y = x.clone().requires_grad_()
        (y @ y).sum().backward()

    uses: dict[str, Callable[[], object]] = {
        "convolution": lambda: nn.functional.conv2d(image, torch.randn(8, 8, 3, 3).to(device)),
        "cuSOLVER": lambda: torch.linalg.qr(x),
        "cuFFT": lambda: torch.fft.fft(x),
        "new kernel": lambda: torch.special.zeta(x.abs() + 2, x.abs() + 2),
        "cdist": lambda: torch.cdist(x, x),
        "sort": lambda: torch.sort(x.flatten()),
        "recurrent": lambda: nn.LSTM(8, 8).to(device)(torch.randn(2, 2, 8).to(device)),
        "matmul in the backward thread": in_backward,
    }
    for case, use in uses.items():
        try:
            use()
            synchronize(device)
        except Exception as error:
            first = str(error).splitlines()[:1]
            said = {"raised": type(error).__name__, "words": first, "is": is_out_of_memory(error)}
            yield {"case": case, **said, "free_mib": _free_mib(device)}
        else:
            yield {"case": case, "raised": None}


def buckets_after_ddp(device: str) -> Iterator[Found]:
    """What of DDP's buckets stays when it is gone, and what lets NCCL's process group drop it.

    `ProcessGroupNCCL` keeps the tensors of work that nobody waited for, as DDP waits for futures:
    its watchdog hands them over, and the next collective drops them (`shelvesToUnstash_` there).
    """
    backend = "nccl" if device == "cuda" else "gloo"
    dist: Any = torch.distributed  # it does not say what it exports
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model, x = nn.Linear(2048, 2048, device=device), torch.randn(8, 2048, device=device)
    scalar = torch.zeros(1, device=device)
    model(x).sum().backward()  # what libraries keep
    model.zero_grad()
    synchronize(device)
    before_mib = allocated_mib(device)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp(x).sum().backward()
    yield {"case": "with gradients", "kept_mib": allocated_mib(device) - before_mib}
    del ddp
    model.zero_grad()
    waits: dict[str, Callable[[], object]] = {
        "gone": lambda: None,
        "half a second later": lambda: time.sleep(0.5),
        "after a collective": lambda: dist.all_reduce(scalar),
    }
    for case, wait in waits.items():
        wait()
        gc.collect()
        synchronize(device)
        yield {"case": case, "kept_mib": allocated_mib(device) - before_mib}
    dist.destroy_process_group()


def _free_mib(device: str) -> float | str | None:
    try:
        return torch.cuda.mem_get_info()[0] / MIB if device == "cuda" else None
    except RuntimeError as error:
        return str(error).splitlines()[0]


CHECKS = {
    check.__name__: check
    for check in (
        fixed_costs,
        wide_products,
        saved_by_attention,
        attention_kernels,
        allocator_replay,
        words_of_a_full_gpu,
        buckets_after_ddp,
    )
}

if __name__ == "__main__":
    run_checks(CHECKS)
