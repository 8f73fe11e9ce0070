"""Names of GPUs in the spellings that people and drivers use."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.cuda.gpus import _KEYS, GPUS, local_gpu, parse_gpu
from lightning_memsave.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("T4", "T4"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("a100 80gib", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("h100", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla P100-PCIE-16GB", "P100-16GB"),
        ("p100", "P100-16GB"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("rtx-3060-12gb", "RTX-3060-12GB"),
        ("RTX_3060", "RTX-3060-12GB"),
        ("4090", "RTX-4090"),
        ("1080 ti", "GTX-1080-Ti"),
        ("4060 Ti 16GB", "RTX-4060-Ti-16GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("4070 ti super", "RTX-4070-Ti-SUPER"),
        ("RTX 4090 24GB", "RTX-4090"),
        ("NVIDIA L4 24 GiB", "L4"),
        ("B200-192GB", "B200"),
    ],
)
def test_finds_a_card_in_any_spelling(text, name):
    assert parse_gpu(text).name == name


@pytest.mark.parametrize(
    ("name", "mib", "num_multiprocessors", "known"),
    [
        ("NVIDIA GeForce RTX 3080", 10_002, 68, "RTX-3080-10GB"),
        ("NVIDIA GeForce RTX 3080", 12_045, 70, "RTX-3080-12GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 15_948, 34, "RTX-4060-Ti-16GB"),
        ("NVIDIA H100 PCIe", 81_079, 114, "H100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", 81_100, 132, "H100-80GB"),
    ],
)
def test_the_card_in_this_machine_is_as_fast_as_its_like(
    name, mib, num_multiprocessors, known, monkeypatch
):
    capability = GPUS[known].compute_capability
    properties = SimpleNamespace(
        name=name,
        total_memory=mib * MIB,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=num_multiprocessors,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu = local_gpu(torch.device("cuda", 0))
    assert gpu == replace(GPUS[known], name=name, total_bytes=mib * MIB)


def test_every_name_finds_its_card():
    assert [parse_gpu(name) for name in GPUS] == list(GPUS.values())
    assert len(_KEYS) == len(GPUS)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_what_is_said_of_a_card_goes_together(gpu):
    """Each core multiplies and adds once in a clock, and boost clocks lie between these."""
    assert gpu.has_bf16 == (gpu.compute_capability >= (8, 0))
    cores = 64 if gpu.compute_capability in {(6, 0), (7, 0), (7, 5), (8, 0)} else 128
    clock = gpu.throughput.float32 / (2 * cores * gpu.num_multiprocessors)
    slowest, fastest = (1.25e9, 1.9e9) if gpu.compute_capability < (8, 9) else (1.9e9, 2.7e9)
    if "PCIe" in gpu.name:  # with half the power: 1.755 GHz
        slowest = 1.7e9
    assert slowest < clock < fastest


@pytest.mark.parametrize(("text", "num_bytes"), [("12GiB", 12 * GIB), ("12 gb", 12 * 10**9)])
def test_a_size_is_a_card(text, num_bytes):
    gpu = parse_gpu(text)
    assert (gpu.name, gpu.total_bytes, gpu.has_bf16) == (text, num_bytes, True)
    assert gpu.compute_capability is None


def test_a_card_has_what_torch_reports():
    gpu = parse_gpu("T4")
    assert gpu.total_bytes == 14_930 * MIB
    assert not gpu.has_bf16


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("A100", 'Use "A100-40GB" or "A100-80GB"'),
        ("v100", 'Use "V100-16GB" or "V100-32GB"'),
        ("RTX 4060 Ti", 'Use "RTX-4060-Ti-8GB" or "RTX-4060-Ti-16GB"'),
        ("RTX 3091", '"RTX-3090"'),
        ("A100-60GB", '"A100-40GB"'),
        ("", '"T4", "P100-16GB"'),
        ("tpu-v5e", '"12GiB"'),
        ("12", 'Write for example "12GiB"'),
        ("0GiB", 'Write for example "12GiB"'),
        ("-12GiB", 'Write for example "12GiB"'),
        ("90000GiB", 'between 256.00 MiB and 4096.00 GiB. Write for example "12GiB"'),
        ("1.2.3GiB", 'Write for example "12GiB"'),
    ],
)
def test_says_what_to_type_instead(text, remedy):
    with pytest.raises(ConfigurationError) as caught:
        parse_gpu(text)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("text", ["RTX 4090 48GB", "RTX 3060 8GB", "L4 16GB"])
def test_a_size_that_no_such_card_has_is_refused(text):
    with pytest.raises(ConfigurationError, match="is not known"):
        parse_gpu(text)
