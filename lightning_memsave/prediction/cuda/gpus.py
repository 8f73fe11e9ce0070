"""Common GPUs and the memory that torch sees on them."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.trainer.precision import BF16_CAPABILITY
from lightning_memsave.units import GIB, MIB, format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class Throughput:
    float32: float
    float16: float
    bfloat16: float
    memory_bytes: float
    host_bytes: float
    link_bytes: float
    """To another GPU of the machine, in one direction."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    has_bf16: bool = True
    compute_capability: tuple[int, int] | None = None
    throughput: Throughput | None = None
    num_multiprocessors: int | None = None

    @property
    def known_name(self) -> str:
        """Its name; empty if only a size is given."""
        return "" if self.compute_capability is None else self.name


# Name, `total_memory` in MiB, compute capability, multiprocessors. `total_memory` comes from the
# output of `torch.cuda.get_device_properties` in public logs and issues on GitHub (often the first
# line that ultralytics prints), looked up in 2026. It differs by some 0.1 GiB between drivers;
# these are the smallest values found on Linux, so that "fits" holds for all of them. No value was
# found for the last group: each has the smallest one above with the same size. Compute capabilities
# are those of https://developer.nvidia.com/cuda-gpus. Multiprocessors: as public logs of devices
# have them for T4, V100, A10G, A40, A100, H100, GTX 1080 Ti and 1660 Ti, RTX 2080 Ti, 3060, 3090,
# 4060 Ti, 4090 and 5090; for the others NVIDIA's number of cores by the cores of each. All agree
# with TFLOP/s and boost clock.
#
# Then TFLOP/s of products in float32 and float16, GB/s of memory and GB/s of PCIe.
# TFLOP/s and memory as in NVIDIA's data sheets and architecture white papers, at boost clock, dense
# and with sums in float32, which halves the rate of GeForce cards; of models that exist with PCIe
# and SXM, SXM, but the P100 and the H100 with PCIe in its name. bfloat16 is as fast as float16
# where there is bfloat16. PCIe as pinned copies reach it: 12, 24 and 52 for 16 lanes of generation
# 3, 4 and 5.
_ROWS = (
    ("T4", 14_930, (7, 5), 40, 8.1, 65, 320, 12),
    ("P100-16GB", 16_269, (6, 0), 56, 9.3, 18.7, 732, 12),
    ("V100-16GB", 16_130, (7, 0), 80, 15.7, 125, 900, 12),
    ("V100-32GB", 32_510, (7, 0), 80, 15.7, 125, 900, 12),
    ("A10G", 22_587, (8, 6), 80, 31.5, 70, 600, 24),
    ("A40", 45_416, (8, 6), 84, 37.4, 149.7, 696, 24),
    ("A100-40GB", 40_441, (8, 0), 108, 19.5, 312, 1_555, 24),
    ("A100-80GB", 81_038, (8, 0), 108, 19.5, 312, 2_039, 24),
    ("L4", 22_563, (8, 9), 58, 30.3, 121, 300, 24),
    ("L40S", 45_495, (8, 9), 142, 91.6, 362, 864, 24),
    ("H20-96GB", 97_285, (9, 0), 78, 44, 148, 4_000, 52),
    ("H100-80GB", 81_008, (9, 0), 132, 66.9, 989, 3_352, 52),
    ("H200", 143_156, (9, 0), 132, 66.9, 989, 4_800, 52),
    ("B200", 182_631, (10, 0), 148, 75, 2250, 7_700, 52),
    ("GTX-1080", 8_118, (6, 1), 20, 8.9, 8.9, 320, 12),
    ("GTX-1080-Ti", 11_172, (6, 1), 28, 11.3, 11.3, 484, 12),
    ("GTX-1660-Ti", 5_936, (7, 5), 24, 5.4, 10.9, 288, 12),
    ("RTX-2060", 5_918, (7, 5), 30, 6.5, 25.8, 336, 12),
    ("RTX-2070", 7_949, (7, 5), 36, 7.5, 29.9, 448, 12),
    ("RTX-2080-Ti", 11_019, (7, 5), 68, 13.4, 53.8, 616, 12),
    ("TITAN-RTX", 24_212, (7, 5), 72, 16.3, 130.5, 672, 12),
    ("RTX-8000", 48_380, (7, 5), 72, 16.3, 130.5, 672, 12),
    ("RTX-3060-12GB", 11_931, (8, 6), 28, 12.7, 25.5, 360, 24),
    ("RTX-3060-Ti", 7_833, (8, 6), 38, 16.2, 32.4, 448, 24),
    ("RTX-3070", 7_753, (8, 6), 46, 20.3, 40.6, 448, 24),
    ("RTX-3080-10GB", 10_002, (8, 6), 68, 29.8, 59.5, 760, 24),
    ("RTX-3080-Ti", 11_910, (8, 6), 80, 34.1, 68.2, 912, 24),
    ("RTX-3090", 24_259, (8, 6), 82, 35.6, 71.2, 936, 24),
    ("RTX-A5000", 24_114, (8, 6), 64, 27.8, 111.1, 768, 24),
    ("RTX-A6000", 48_676, (8, 6), 84, 38.7, 154.8, 768, 24),
    ("RTX-4060", 7_807, (8, 9), 24, 15.1, 30.2, 272, 12),
    ("RTX-4060-Ti-8GB", 7_806, (8, 9), 34, 22.1, 44.1, 288, 12),
    ("RTX-4070", 11_994, (8, 9), 46, 29.1, 58.3, 504, 24),
    ("RTX-4070-Ti", 12_007, (8, 9), 60, 40.1, 80.2, 504, 24),
    ("RTX-4070-Ti-SUPER", 15_934, (8, 9), 66, 44.1, 88.2, 672, 24),
    ("RTX-4080", 16_049, (8, 9), 76, 48.7, 97.5, 717, 24),
    ("RTX-4090", 24_177, (8, 9), 128, 82.6, 165.2, 1_008, 24),
    ("RTX-6000-Ada", 48_622, (8, 9), 142, 91.1, 364.2, 960, 24),
    ("RTX-5060-Ti-16GB", 15_848, (12, 0), 36, 23.7, 47.4, 448, 26),
    ("RTX-5080", 15_840, (12, 0), 84, 56.3, 112.6, 960, 52),
    ("RTX-5090", 32_120, (12, 0), 170, 104.8, 209.5, 1_792, 52),
    ("RTX-PRO-6000", 97_250, (12, 0), 188, 125, 503.8, 1_792, 52),
    # Not found in any log.
    ("A10", 22_563, (8, 6), 72, 31.2, 125, 600, 24),
    ("H100-PCIe-80GB", 81_008, (9, 0), 114, 51.2, 756, 2_039, 52),
    ("L40", 45_416, (8, 9), 142, 90.5, 181, 864, 24),
    ("RTX-2080", 7_753, (7, 5), 46, 10.1, 40.3, 448, 12),
    ("RTX-3070-Ti", 7_753, (8, 6), 48, 21.7, 43.5, 608, 24),
    ("RTX-3080-12GB", 11_910, (8, 6), 70, 30.6, 61.3, 912, 24),
    ("RTX-3090-Ti", 24_114, (8, 6), 84, 40, 80, 1_008, 24),
    ("RTX-4060-Ti-16GB", 15_840, (8, 9), 34, 22.1, 44.1, 288, 12),
    ("RTX-4070-SUPER", 11_910, (8, 9), 56, 35.5, 71, 504, 24),
    ("RTX-4080-SUPER", 15_840, (8, 9), 80, 52.2, 104.4, 736, 24),
    ("RTX-5060-8GB", 7_753, (12, 0), 30, 19.2, 38.4, 448, 26),
    ("RTX-5060-Ti-8GB", 7_753, (12, 0), 36, 23.7, 47.4, 448, 26),
    ("RTX-5070", 11_910, (12, 0), 48, 30.9, 61.7, 672, 52),
    ("RTX-5070-Ti", 15_840, (12, 0), 70, 43.9, 87.9, 896, 52),
)


# GB/s in one direction, as in NVIDIA's data sheets, of GPUs that are sold with NVLink between them.
# Others share over PCIe.
_NVLINK = {
    "P100-16GB": 80,
    "V100-16GB": 150,
    "V100-32GB": 150,
    "A100-40GB": 300,
    "A100-80GB": 300,
    "H20-96GB": 450,
    "H100-80GB": 450,
    "H200": 450,
    "B200": 900,
}


# What a GPU cannot do in low precision is done in float32.
def _throughput(name: str, capability: tuple[int, int], rates: Sequence[float]) -> Throughput:
    float32, float16 = (1e12 * rate for rate in rates[:2])
    memory_bytes, host_bytes = (1e9 * rate for rate in rates[2:])
    bfloat16 = float16 if capability >= BF16_CAPABILITY else float32
    link_bytes = 1e9 * _NVLINK.get(name, rates[3])
    return Throughput(float32, float16, bfloat16, memory_bytes, host_bytes, link_bytes)


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        name: Gpu(
            name,
            mib * MIB,
            capability >= BF16_CAPABILITY,
            capability,
            _throughput(name, capability, rates),
            num_multiprocessors,
        )
        for name, mib, capability, num_multiprocessors, *rates in _ROWS
    }
)
"""All known GPUs by name."""

_IGNORED_WORDS = re.compile(
    r"nvidia|geforce|tesla|quadro|generation|blackwell|(?:server|workstation) edition"
    r"|sxm\d?|(?<!h100.)pcie|hbm\d?e?"
)
_LEAST_BYTES, _MOST_BYTES = 256 * MIB, 4096 * GIB


def parse_gpu(text: str) -> Gpu:
    if re.match(r"\s*[-+]?[\d.]+\s*([KMG]i?B|B)?\s*$", text, re.IGNORECASE) and not _find_by_name(
        text
    ):
        return _gpu_from_size(text.strip())
    found = _find_by_name(text) or _find_with_size(text)
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(f'"{gpu.name}"' for gpu in found)
        raise ConfigurationError(f"GPU {text!r} exists with several memory sizes. Use {names}.")
    near = difflib.get_close_matches(_key(text), _KEYS, n=3, cutoff=0.5)
    names = ", ".join(f'"{_KEYS[key].name}"' for key in near) or ", ".join(f'"{n}"' for n in GPUS)
    raise ConfigurationError(
        f'GPU {text!r} is not known. Use {names}, or the size of its memory, such as "12GiB".'
    )


def as_gpu(gpu: object) -> Gpu | None:
    if gpu is None or isinstance(gpu, Gpu):
        return gpu
    if not isinstance(gpu, str):
        raise ConfigurationError(
            f'`gpu={gpu!r}` is not a string. Use `gpu="T4"`, or the size of its memory: '
            '`gpu="12GiB"`.'
        )
    return parse_gpu(gpu)


def _find_by_name(text: str) -> list[Gpu]:
    spelled = _key(text)
    for key in (spelled, "rtx" + spelled, "gtx" + spelled) if spelled else ():
        if key in _KEYS:
            return [_KEYS[key]]
        with_size = re.compile(re.escape(key) + r"\d+gb")
        found = [gpu for name, gpu in _KEYS.items() if with_size.fullmatch(name)]
        if found:
            return found
    return []


# Data sheets say up to a tenth more than what a GPU with error correction has.
_AGREES = 0.91, 1.02


# With the size of a GPU that exists with one size only.
def _find_with_size(text: str) -> list[Gpu]:
    match = re.fullmatch(r"(.*\D)(\d+)\s*gi?b\s*", text, re.IGNORECASE)
    if match is None:
        return []
    num_bytes = int(match[2]) * GIB
    least, most = (share * num_bytes for share in _AGREES)
    return [gpu for gpu in _find_by_name(match[1]) if least <= gpu.total_bytes <= most]


def local_gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    found = min(
        _find_by_name(properties.name),
        # Of cards with one name, such as the RTX 3080 of 10 and 12 GB, the most similar one.
        key=lambda gpu: (
            abs((gpu.num_multiprocessors or 0) - properties.multi_processor_count),
            abs(gpu.total_bytes - properties.total_memory),
        ),
        default=None,
    )
    has_bf16 = capability >= BF16_CAPABILITY
    return Gpu(
        properties.name,
        properties.total_memory,
        has_bf16,
        capability,
        None if found is None else found.throughput,
        properties.multi_processor_count,
    )


# "NVIDIA A100-SXM4-40GB" and "a100 40 GiB" are both "a10040gb".
def _key(name: str) -> str:
    words = _IGNORED_WORDS.sub(" ", name.lower().replace("gib", "gb"))
    return re.sub(r"[^a-z0-9]", "", words)


def _gpu_from_size(text: str) -> Gpu:
    num_bytes = 0 if text.startswith("-") else parse_bytes(text)
    if not _LEAST_BYTES <= num_bytes <= _MOST_BYTES:
        raise ConfigurationError(
            f"GPU {text!r} is not a realistic memory size: it must be between "
            f"{format_bytes(_LEAST_BYTES)} and {format_bytes(_MOST_BYTES)}. "
            'Write for example "12GiB".'
        )
    return Gpu(text, num_bytes)


_KEYS = {_key(name): gpu for name, gpu in GPUS.items()}
