"""One failing test never fails another."""

import itertools
import shutil
import subprocess

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memsave.measure.live_tensors import LiveTensors
from tests.conftest import (
    MOST_CASES,
    SLOW_TURNS,
    ProcessState,
    half_of,
    left_to_test_all,
    number_of_commit,
)
from tests.helpers import IN_CI, ResidentGrowth, in_pairs, nothing_waits
from tests.prediction.architectures import Architecture, Lit
from tests.prediction.counting import count


class _Fails(Lit):
    def loss(self, batch: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_a_fit_that_raises_ends_the_counting() -> None:
    with pytest.raises(ZeroDivisionError):
        count(Architecture(lambda: _Fails(nn.Linear(2, 2)), lambda: torch.ones(4, 2)), {})
    assert _get_current_dispatch_mode_stack() == []


def test_what_a_test_leaves_behind_is_named_and_taken_back() -> None:
    before = ProcessState()
    module = nn.Linear(2, 2)
    LiveTensors(module).__enter__()
    nn.modules.module.register_module_forward_hook(lambda *_: None)
    nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    assert before.restore() == [
        "LiveTensors",
        "global hooks of modules",
        "set_default_dtype",
        "set_float32_matmul_precision",
        "set_grad_enabled",
        "use_deterministic_algorithms",
    ]
    assert before.restore() == []
    assert _get_current_dispatch_mode_stack() == []
    assert not _has_any_global_hook()
    assert torch.ones(1).dtype is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_a_mode_in_which_each_wait_is_an_error_is_taken_back() -> None:
    torch.zeros(1, device="cuda")
    before = ProcessState()
    with nothing_waits(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        torch.ones(1, device="cuda").item()
    assert before.restore() == []
    mode = nothing_waits()
    mode.__enter__()
    assert before.restore() == ["set_sync_debug_mode"]
    assert torch.ones(1, device="cuda").item() == 1.0


def made_items(request, *names: str) -> list[pytest.Item]:
    return [
        pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        for name in names
    ]


def test_a_few_cases_of_each_test_run_other_ones_for_each_commit(request) -> None:
    items = made_items(request, *(f"test_{name}[{n}]" for name in "ab" for n in range(9)), "test_c")
    items[-2].add_marker(pytest.mark.exhaustive)
    run = [{*items} - {*left_to_test_all(items, number)} for number in range(60)]
    assert all(len(of_one) == 2 * MOST_CASES + 1 and items[-1] in of_one for of_one in run)
    assert set.union(*run) == {*items} - {items[-2]}


def test_slow_ones_run_in_turns(request) -> None:
    items = made_items(request, "test_a", "test_b", "test_c[1]")
    for item in items[1:]:
        item.add_marker(pytest.mark.slow)
    left = [left_to_test_all(items, number) for number in range(SLOW_TURNS)]
    assert sorted(left, key=len) == [[], *[items[1:]] * (SLOW_TURNS - 1)]


def test_of_what_is_left_half_runs_in_ci_and_of_each_test_something(request) -> None:
    items = made_items(request, *(f"test_a[{n}]" for n in range(200)), "test_b", "test_c")
    left = {*items[:-1]}
    first, second = (half_of(left, items, number) for number in (6, 7))
    assert first | second == left
    assert first & second == {items[-2]}
    assert 80 <= len(first) <= 120


def test_each_pair_of_values_is_in_a_case() -> None:
    values = ["abcd", [1, 2, 3], [True, False], ["x", "y"]]
    cases = in_pairs(*values)
    assert len(cases) <= 14
    for one, other in itertools.combinations(range(4), 2):
        pairs = itertools.product(values[one], values[other])
        assert {(case[one], case[other]) for case in cases} == {*pairs}


@pytest.mark.skipif(shutil.which("git") is None and not IN_CI, reason="needs git")
def test_the_cases_of_a_commit_are_always_the_same(tmp_path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def committed(text: str) -> int:
        (tmp_path / "file").write_text(text)
        git("add", ".")
        git("commit", "-m", "A change")
        return number_of_commit(tmp_path)

    assert number_of_commit(tmp_path) == 0
    git("init")
    assert number_of_commit(tmp_path) == 0  # nothing is committed
    first, second = committed("1"), committed("2")
    assert 0 != first != second
    assert committed("1") == first  # by what is in it, not by when it was made
    assert first == int(git("rev-parse", "HEAD^{tree}")[:12], 16)


def test_memory_that_is_there_for_a_moment_is_seen() -> None:
    with ResidentGrowth() as growth:
        tensor = torch.ones(2**26)  # 256 MiB, which takes some ten milliseconds
        del tensor
    assert growth.num_bytes >= 2**26
