"""What to do when memory ran out."""

from lightning_memsave.planning.oom_causes import FRAGMENTED_SHARE, own_and_others
from lightning_memsave.planning.out_of_memory import OutOfMemory
from lightning_memsave.units import MIB, format_bytes


def advise(
    oom: OutOfMemory, cause: str, allocator_settings: str, *, has_memsave: bool = False
) -> tuple[str, ...]:
    """Say what to do.

    Args:
        oom: The figures of the message.
        cause: Why memory ran out, as in ``oom_causes.CAUSES``.
        allocator_settings: Settings of torch's allocator in that run; empty if not known.
        has_memsave: Whether `MemSaveCallback` was on.

    Returns:
        What to do, in the order in which to try it.
    """
    allocator = _allocator_advice(oom, allocator_settings)
    less = _less_memory(oom, has_memsave)
    by_cause = {
        "full": [*less, *allocator],
        "too_large": [
            "Make the tensor smaller: it is one allocation, often attention scores (sequence "
            'length squared; use `attn_implementation="sdpa"`), logits (batch x length x '
            "vocabulary) or a wrong shape that broadcasts.",
            *less,
        ],
        "limit": [
            "Raise or remove `torch.cuda.set_per_process_memory_fraction`, or what sets it.",
            *less,
            *allocator,
        ],
        "fragmentation": [*allocator, *_STEADY_SHAPES, *less],
        "other_process": [
            f"Look with `nvidia-smi` and end what is not needed{_pids(oom)}: often a notebook, a "
            "run that crashed, or another rank on the same device.",
            "Choose another device with `CUDA_VISIBLE_DEVICES` or `Trainer(devices=[...])`.",
            *less,
        ],
        "outside": [
            "Look with `nvidia-smi` who takes it: another process that the message does not name, "
            "NCCL's buffers (one set for each communicator), or a second framework in this "
            "process.",
            "With TensorFlow or JAX in the same process, stop them from taking the whole device: "
            "`XLA_PYTHON_CLIENT_PREALLOCATE=false`, `TF_FORCE_GPU_ALLOW_GROWTH=true`.",
            *less,
        ],
        "refused": [
            "Run again with nothing else on the device; if it happens at once with nothing "
            "allocated, test the driver with `nvidia-smi` and restart the process or container.",
            "In WSL and on Windows, free host memory: the driver backs device memory with it.",
            *allocator,
            *less,
        ],
        "library": [
            "If it is the first use of the library, run once with `CUDA_LAUNCH_BLOCKING=1` or on "
            "the CPU: an index that is too large for an embedding shows itself this way too.",
            "Leave the driver some memory: `torch.cuda.set_per_process_memory_fraction(0.9)`.",
            *less,
        ],
        "host": [
            "Use fewer or smaller copies in host memory: `DataLoader(num_workers=...)` copies what "
            "the dataset holds for each worker; load data as it is needed, or as a memory map.",
            "Look for what grows with each step, such as a list of losses or outputs: keep "
            "`loss.item()` and not `loss`.",
            "If the model is trained on the CPU: a smaller batch with `accumulate_grad_batches`.",
        ],
        "unknown": [
            "Look at the whole message or log: the line after it often has the figures.",
            "Look with `nvidia-smi` whether other processes take memory on the device.",
            *less,
        ],
    }
    return tuple(by_cause[cause])


_STEADY_SHAPES = (
    "Keep shapes steady: pad to a few fixed lengths or sort samples by length, since every new "
    "length asks for blocks of another size. `torch.cuda.empty_cache()` does not help: the "
    "allocator has done that before it gave up.",
)


def _allocator_advice(oom: OutOfMemory, settings: str) -> list[str]:
    unallocated_bytes, reserved_bytes = oom.unallocated_bytes, oom.reserved_bytes
    if unallocated_bytes is None or reserved_bytes is None:
        return []
    if unallocated_bytes < FRAGMENTED_SHARE * reserved_bytes or not unallocated_bytes:
        return []
    if oom.device != "cuda":
        return []
    share = unallocated_bytes / reserved_bytes
    advice = []
    if "expandable_segments:True" not in settings.replace(" ", ""):
        advice.append(
            f"Set `{oom.allocator_variable}=expandable_segments:True` before Python starts: the "
            f"{format_bytes(unallocated_bytes)} ({share:.0%} of what torch has reserved) that lies "
            "between tensors can then be used by larger ones."
        )
    if "max_split_size_mb" not in settings:
        advice.append(
            f"Where segments cannot expand, as on Windows, set "
            f"`{oom.allocator_variable}=max_split_size_mb:{_max_split_size_mb(oom)}`: larger "
            "blocks are then kept whole for requests like this one. It may cost speed."
        )
    return advice


# A block above the limit serves only requests above it, so the limit must lie below the request;
# half of it leaves room for requests that differ from step to step. torch refuses 20 and less.
def _max_split_size_mb(oom: OutOfMemory) -> int:
    half = (oom.requested_bytes or 256 * MIB) // MIB // 2
    return int(min(max(1 << max(half.bit_length() - 1, 0), 32), 512))


def _less_memory(oom: OutOfMemory, has_memsave: bool) -> list[str]:
    if oom.phase == "optimizer":
        return [
            'Keep its state in 8 bits: `MemSaveCallback(optimizer="8bit")`; or in host memory when '
            'that does not fit: `optimizer="paged_8bit"`. A smaller batch does not help here.',
            "Train fewer parameters, or shard them over several devices.",
        ]
    suite = (
        "Add `MemSaveCallback()` to the Trainer: it recomputes activations, keeps the optimizer's "
        "state in 8 bits, and repeats a batch in parts when memory runs out, with the same "
        "gradients."
    )
    if has_memsave:
        suite = (
            "Look at the table that `MemSaveCallback` printed at the start of fit: what is off or "
            'unchanged there still saves, such as `activation_checkpointing="all"`, '
            '`optimizer="8bit"`, `micro_batch_size="auto"`.'
        )
    return [
        suite,
        "Use a smaller batch with `accumulate_grad_batches`, or shorter samples.",
        'Use `precision="bf16-mixed"` where the device has it.',
    ]


def _pids(oom: OutOfMemory) -> str:
    pids = ", ".join(str(process.pid) for process in own_and_others(oom)[1])
    return f" (process {pids})" if pids else ""
