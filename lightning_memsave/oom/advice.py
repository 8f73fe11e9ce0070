"""What to do when memory ran out, by its cause and by what is known of the run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_memsave.core.technique import Row
from lightning_memsave.measure.alive_tensors import OWNED, AliveTensor
from lightning_memsave.oom.message import OutOfMemory, own_and_others
from lightning_memsave.techniques.registry import entries
from lightning_memsave.units import MIB, format_bytes

# Memory that torch's allocator keeps without a tensor in it counts as fragmentation from this share
# of what it has reserved. When it raises its error it has given back every segment that is wholly
# free, so what is left lies between tensors; a few per cent of that are there in any healthy run.
FRAGMENTED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Kept:
    owner: str
    num_bytes: int
    count: int
    before_bytes: int
    expected_bytes: int
    in_graphs: bool = False

    def __str__(self) -> str:
        number = "1 tensor" if self.count == 1 else f"{self.count} tensors"
        return (
            f"alive before the step {format_bytes(self.before_bytes)}, predicted "
            f"{format_bytes(self.expected_bytes)}: `{self.owner}` keeps "
            f"{format_bytes(self.num_bytes)} ({number})"
        )

    @property
    def advice(self) -> str:
        if self.in_graphs:
            return (
                f"Keep numbers in `{self.owner}`, not graphs: `loss.detach()` or `loss.item()` in "
                "place of `loss`. A tensor with a graph keeps all activations of its step."
            )
        return (
            f"Empty `{self.owner}` as soon as it is read, such as with `.clear()` at the end of an "
            "epoch; or keep less in it: a sum or a number, or `.detach().cpu()`. A metric that "
            "keeps all values is emptied by `.reset()`, and keeps them on the host with "
            "`compute_on_cpu=True`."
        )


# Less is what any project has, such as a queue of embeddings or statistics.
_MUCH = 0.1


def kept_bytes(alive: Iterable[AliveTensor]) -> dict[str, int]:
    kept: Counter[str] = Counter()
    for one in alive:
        if one.owner:
            kept[one.owner] += one.num_bytes
    return dict(kept.most_common(10))


def most_kept(alive: Sequence[AliveTensor]) -> Kept | None:
    owner, num_bytes = next(iter(kept_bytes(alive).items()), ("", 0))
    if not owner or num_bytes < _MUCH * sum(one.num_bytes for one in alive):
        return None
    expected_bytes = sum(one.num_bytes for one in alive if one.category in OWNED)
    kept = [one for one in alive if one.owner == owner]
    in_graphs = sum(one.num_bytes for one in kept if one.name.startswith("saved by"))
    before_bytes = expected_bytes + sum(one.num_bytes for one in alive if one.owner)
    return Kept(
        owner, num_bytes, len(kept), before_bytes, expected_bytes, 2 * in_graphs > num_bytes
    )


@dataclass(frozen=True, slots=True)
class RunFacts:
    has_memsave: bool = False
    rows: tuple[Row, ...] = ()
    is_evaluation: bool = False
    precision: str = ""
    kept: Kept | None = None
    without_effect: frozenset[str] = frozenset()
    """Settings that find nothing to change in the module, and are refused if they are written."""

    def is_open(self, name: str) -> bool:
        """Say whether a setting is neither on nor refused, and has something to change."""
        is_shown = any(row.name == name and row.status != "unchanged" for row in self.rows)
        return not is_shown and name not in self.without_effect

    def status_of(self, name: str) -> str:
        return next((row.status for row in self.rows if row.name == name), "")


def advise(oom: OutOfMemory, cause: str, allocator_settings: str, run: RunFacts) -> tuple[str, ...]:
    allocator = _allocator_advice(oom, allocator_settings)
    less = _less_memory(oom, run)
    pids = ", ".join(str(process.pid) for process in own_and_others(oom)[1])
    pids = f" (process {pids})" if pids else ""
    by_cause = {
        "full": [*less, *allocator],
        "too_large": [
            "Make the tensor smaller: it is one allocation, often attention scores (sequence "
            'length squared; use `attn_implementation="sdpa"`), logits (batch x length x '
            "vocabulary) or a wrong shape that broadcasts.",
            *less,
        ],
        "limit": [
            "Raise or remove the limit: `MemSaveCallback(budget=...)` sets one, and so does "
            "`torch.cuda.set_per_process_memory_fraction`.",
            *less,
            *allocator,
        ],
        "fragmentation": [*allocator, *_STEADY_SHAPES, *less],
        "other_process": [
            f"Look with `nvidia-smi` and end what is not needed{pids}: "
            "often a notebook, a run that crashed, or another rank on the same device.",
            "Choose another device with `CUDA_VISIBLE_DEVICES` or `Trainer(devices=[...])`.",
            *less,
        ],
        "outside": [
            "Look with `nvidia-smi` which process uses it: another process that the message does "
            "not name, NCCL's buffers (one set for each communicator), or a second framework in "
            "this process.",
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
        "nccl": [
            "Look with `nvidia-smi` whether two ranks are on one device: "
            "`Trainer(devices=...)` and `CUDA_VISIBLE_DEVICES` choose them.",
            "Leave NCCL some memory: `MemSaveCallback(budget=0.9)`; `NCCL_BUFFSIZE=1048576` and "
            "`NCCL_MAX_NCHANNELS=4` make its buffers smaller, and communication slower.",
            *less,
        ],
        "bitsandbytes": [
            "Leave the driver some memory from the start: `MemSaveCallback(budget=0.9)`, or a size "
            "such as `micro_batch_size=4`. bitsandbytes ends the process instead of raising an "
            "error, so that no batch can be repeated.",
            *less,
        ],
        "kernel": [
            'Take another kernel: `attn_implementation="sdpa"` in place of one from a package; '
            "under `torch.compile` `torch._inductor.config.max_autotune = False`; in a kernel of "
            "your own smaller blocks or a smaller `num_stages`.",
            "Upgrade the package that has the kernel: many choose its sizes by the GPU, and fail "
            "on GPUs that came later.",
        ],
        "mps": [
            "Close what else uses memory: MPS shares it with the whole system. "
            "`PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0` lifts the limit; the system may then stall or "
            "end the process.",
            *less,
        ],
        "killed": [*_LESS_ON_HOST, *([] if run.is_evaluation else _LESS_OFFLOADED)],
        "shared_memory": [
            "Make it larger: `docker run --shm-size=16g` or `--ipc=host`; in Kubernetes an "
            "`emptyDir` with `medium: Memory` at `/dev/shm`.",
            "Or use less of it: `DataLoader(num_workers=0)` or fewer workers, a smaller "
            '`prefetch_factor`, or `torch.multiprocessing.set_sharing_strategy("file_system")`.',
        ],
        "host": [
            *_LESS_ON_HOST,
            *([] if run.is_evaluation else [_SMALLER_ON_CPU]),
        ],
        "unknown": [
            "Look at the whole message or log: the line after it often has the figures.",
            "Look with `nvidia-smi` whether other processes take memory on the device.",
            *less,
        ],
    }
    return (*([run.kept.advice] if run.kept else []), *by_cause[cause])


_LESS_ON_HOST = (
    "Use fewer or smaller copies in host memory: `DataLoader(num_workers=...)` copies what the "
    "dataset holds for each worker; load data as it is needed, or as a memory map.",
    "Look for what grows with each step, such as a list of losses or outputs: keep `loss.item()` "
    "and not `loss`.",
)
_LESS_OFFLOADED = (
    'Where `offload=` or `preset="offload"` is on, tell it what the host has: '
    '`MemSaveCallback(budget="free", host_budget="24GiB")` plans with it, and '
    "`memsave predict` says what the host needs.",
    "Ask the scheduler or the container for more, such as `srun --mem=64G` or `docker run -m 64g`.",
)
_SMALLER_ON_CPU = (
    "If the model is trained on the CPU: a smaller batch with `accumulate_grad_batches`."
)
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


def _less_memory(oom: OutOfMemory, run: RunFacts) -> list[str]:
    if run.is_evaluation:
        return _less_in_evaluation(run)
    if oom.phase == "optimizer":
        return _less_in_optimizer(run)
    if oom.phase == "setup":
        weights = {
            "offload": 'Keep the weights in host memory: `MemSaveCallback(offload="parameters")`. '
            "A smaller batch does not help here: nothing but the module was on its way to the "
            "device.",
            "low_precision_weights": "Keep them in bfloat16: "
            '`MemSaveCallback(low_precision_weights="stochastic")`.',
        }
        return [
            *(advice for name, advice in weights.items() if run.is_open(name)),
            "Use a smaller model, or shard it over several devices.",
        ]
    return [*_suite(run), *_smaller_batch(run), *_half_precision(run)]


def _suite(run: RunFacts) -> list[str]:
    if not run.has_memsave:
        return [
            "Add `MemSaveCallback()` to the Trainer: it recomputes activations, keeps the "
            "optimizer's state in 8 bits, and repeats a batch in micro-batches when memory runs "
            "out, with the same gradients."
        ]
    if not run.rows:
        return [
            "Look at the table that `MemSaveCallback` printed at the start of fit: what is off or "
            'unchanged there still saves, such as `activation_checkpointing="all"`, '
            '`optimizer="8bit"`, `micro_batch_size="halve"`.'
        ]
    if run.status_of("budget") == "on":  # it has planned all of them
        return ["Use a smaller `budget=`: settings are then planned that need less."]
    values = {entry.argument: entry.offers[-1].value for entry in entries() if entry.offers}
    values["micro_batch_size"] = "halve"
    is_open = [f"`{name}={value!r}`" for name, value in values.items() if run.is_open(name)]
    names = ", ".join(is_open).replace("'", '"')
    what = "Add to `MemSaveCallback`, one by one, what is neither on nor refused in its table"
    return [f"{what}: {names}."] if is_open else []


def _smaller_batch(run: RunFacts) -> list[str]:
    status = run.status_of("micro_batch_size")
    if status == "on":
        return ["Use shorter samples or a smaller model: what does not fit is split already."]
    advice = ["Use a smaller batch with `accumulate_grad_batches`, or shorter samples."]
    for row in run.rows:
        if row.name == "micro_batch_size" and any("split_batch" in text for text in row.details):
            remedy = next(text for text in row.details if "split_batch" in text)
            advice.insert(0, f"Let batches be split in parts, which is off: {remedy}.")
    return advice


def _half_precision(run: RunFacts) -> list[str]:
    if run.precision not in {"", "32", "32-true"} or run.status_of("precision") == "off":
        return []
    return ['Use `precision="bf16-mixed"` if the device supports it.']


def _less_in_optimizer(run: RunFacts) -> list[str]:
    if run.is_open("optimizer"):
        return [
            'Keep its state in 8 bits: `MemSaveCallback(optimizer="8bit")`; or in host memory when '
            'that does not fit: `optimizer="paged_8bit"`. A smaller batch does not help here.',
            "Train fewer parameters, or shard them over several devices.",
        ]
    host = 'Keep its state in host memory: `MemSaveCallback(offload="optimizer")`.'
    return [
        *([host] if run.is_open("offload") else []),
        "Train fewer parameters, or shard them over several devices. A smaller batch does not help "
        "here.",
    ]


def _less_in_evaluation(run: RunFacts) -> list[str]:
    advice = [
        "Keep less of each batch: what a metric needs in place of logits, on the host (`.cpu()`; "
        "`compute_on_cpu=True` in metrics of torchmetrics). There is no backward pass and no graph "
        "(`torch.no_grad` is on), so what saves activations or optimizer state does not help."
    ]
    status = run.status_of("evaluation")
    if status == "off":
        advice.insert(0, "Pass a smaller `batch_size` to that DataLoader.")
    elif status != "on":
        advice.insert(
            0,
            "Pass a smaller `batch_size` to that DataLoader; in one process "
            '`MemSaveCallback(micro_batch_size="halve")`, its default, splits batches of steps '
            "that can be split.",
        )
    return [*advice, *_half_precision(run)]
