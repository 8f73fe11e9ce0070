"""Measure updates that begin in backward: what they hide, what they cost, whether they are exact.

The machine is simulated: device, bus and host are clocks. Bits and kills are of real trainings.
"""

import argparse
import functools
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks.faults._attack import in_process
from benchmarks.faults._fits import Case, Fit
from benchmarks.offloading._hidden import hide, threshold_tokens
from lightning_memsave import Offloading
from lightning_memsave.techniques.offloading.early_updates import EarlyUpdate, EarlyUpdates
from lightning_memsave.techniques.offloading.host_worker import HostWorker

PRESET = "offload parameters, early updates"
_EARLY = (0, "100%")
_HOSTS = {80e9: "desktop, 80 GB/s", 300e9: "server, 300 GB/s"}
_CLIP = 10.0


def compare_bits(num_steps: int) -> dict[str, Any]:
    """Train a transformer with early updates and without offloading; one step of ten clips.

    Returns:
        Values that differ after any step, steps that clip, and updates by what became of them.
    """
    runs, counts = [_trainer(None), _trainer("100%")], {"stood": 0, "taken back": 0}
    settle = EarlyUpdates.settle

    def counted(updates: Any, *found: Any) -> Any:
        settled = settle(updates, *found)
        counts["stood"] += sum(settled.values())
        counts["taken back"] += len(settled) - sum(settled.values())
        return settled

    num_different = num_clipped = 0
    with mock.patch.object(EarlyUpdates, "settle", counted):
        for number in range(num_steps):
            found = [_step(*run, number) for run in runs]
            num_clipped += float(found[0][1]) > _CLIP
            pairs = zip(
                *([*each, *_weights_of(run)] for each, run in zip(found, runs, strict=True)),
                strict=True,
            )
            num_different += sum(int((a != b).sum()) for a, b in pairs)
    return {"steps": num_steps, "clipped": num_clipped, "different": num_different, **counts}


def _trainer(early: str | None) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(6)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if early is None:
        return model, optimizer, None
    technique = Offloading("parameters", early_updates=early)
    technique.apply(model)
    return model, optimizer, technique.update_in_background(optimizer)


def _step(model: nn.Module, optimizer: Any, updates: Any, number: int) -> list[Tensor]:
    torch.manual_seed(number)
    loss = model(torch.randn(4, 16, 64)).square().mean() * (100.0 if number % 10 == 5 else 1.0)
    loss.backward()
    clip = functools.partial(nn.utils.clip_grad_norm_, model.parameters())
    norm = (clip if updates is None else updates.clip_grad_norm_)(_CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), norm]


# In the middle of training they are there after their updates only.
def _weights_of(run: tuple[nn.Module, Any, Any]) -> list[Tensor]:
    state = sorted(run[1].state_dict()["state"].items())
    return [*run[0].state_dict().values(), *(v for _, own in state for v in own.values())]


def kill(number: int) -> str:
    """Kill a fit that clips when an update was taken back, before or after; resume and compare.

    Args:
        number: Of the kill: the place, and whether the fit accumulates.

    Returns:
        "right", "wrong", "hung" or "not killed".
    """
    case = Case("words", PRESET, 1 + number // 2 % 2, 0.01)
    submit = HostWorker.submit

    def waiting(worker: Any, work: Any) -> Any:  # so that early updates run before their step
        update = submit(worker, work)
        wait([update])
        return update

    def train(folder: str, place: int = 0) -> Any:
        take_back, count = EarlyUpdate.take_back, 0

        def dying(early: Any) -> None:
            nonlocal count
            count += 1
            if count == place and number % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            take_back(early)
            if count == place:
                os.kill(os.getpid(), signal.SIGKILL)

        fit = Fit(case, folder=Path(folder), num_epochs=3, num_batches=4)
        patch = mock.patch.object
        with patch(EarlyUpdate, "take_back", dying), patch(HostWorker, "submit", waiting):
            found = fit.run()
        return {"digest": found, "error": str(fit.error or ""), "count": count}

    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as cut:
        plain = in_process(lambda: train(whole))
        place = 1 + number * 7 % plain["count"]
        died = in_process(lambda: train(cut, place))
        if died is not None:
            return "hung" if died == "hung" else "not killed"
        resumed = in_process(lambda: train(cut))
    is_right = isinstance(resumed, dict) and resumed["digest"] == plain["digest"]
    return "hung" if resumed == "hung" else ("right" if is_right else "wrong")


def block_seconds(num_blocks: int, kind: str | None, early: int | str = 0) -> float:
    """Return the seconds of its processor that the main thread needs for a tiny block in a step."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(num_blocks)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    handle = None
    if kind is not None:
        technique = Offloading(kind, early_updates=early)
        handle = technique.apply(model)
        technique.update_in_background(optimizer)
    found = []
    for _ in range(12):
        start_s = time.thread_time()
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.wait()
        found.append(time.thread_time() - start_s)
    return min(found[2:]) / num_blocks


def make_text(results: dict[str, Any]) -> str:
    """Lay out what was found as Markdown."""
    rows = [
        [
            f"{one['tokens']:,.0f} ({one['factor']} x)",
            one["host"],
            *(f"{100 * one[str(early)]['share']:.0f} %" for early in _EARLY),
            *(f"{one[str(early)]['ratio']:.2f}" for early in _EARLY),
        ]
        for one in results["hidden"]
    ]
    names = ["no block" if early == 0 else f"{early}" for early in _EARLY]
    bits, kills = results["bits"], results["kills"]
    overhead = [
        [number, *(f"{1e6 * found[kind]:.0f}" for kind in ("parameters", "optimizer", "early"))]
        for number, found in results["overhead"].items()
    ]
    return "\n\n".join(
        [
            "Simulated: 24 blocks on an RTX 4090 (60 % of 165 TFLOP/s, 24 GB/s each way), all "
            'recomputed, clipped by norm, `offload="parameters"`. By tokens in a step (and over '
            "those whose computation takes as long as copies of weights) the share of the host's "
            "work beside computation, and the time of a step over that of its computation, where "
            "updates of so many blocks may begin in backward. An update reads and writes 30 bytes "
            "per parameter, keeping its old values 24, a norm 4:",
            markdown_table(
                [
                    "tokens",
                    "host",
                    *(f"beside, {n}" for n in names),
                    *(f"time, {n}" for n in names),
                ],
                rows,
            ),
            f"Real, in {bits['steps']} steps of which {bits['clipped']} clip: {bits['different']} "
            "values of losses, norms, weights and state differ from training without offloading; "
            f"{bits['stood']} early updates stood and {bits['taken back']} were taken back or had "
            "not begun.",
            f"Of {sum(kills.values())} fits that were killed when an update was taken back, before "
            f"or after, and resumed: {', '.join(f'{n} {what}' for what, n in kills.items())}.",
            "Time of the main thread's processor for a tiny block in a step, less that without "
            "offloading, in microseconds:",
            markdown_table(
                ["blocks", '"parameters"', '"optimizer"', '"parameters", early'], overhead
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="one machine, few steps and kills")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    is_dry = options.dry_run
    hidden = [
        {
            "tokens": factor * threshold_tokens(),
            "factor": factor,
            "host": name,
            **{
                str(early): asdict(
                    hide(
                        tokens=factor * threshold_tokens(),
                        host_bytes=host,
                        early=early,
                        num_blocks=3 if is_dry else 24,
                    )
                )
                for early in _EARLY
            },
        }
        for factor in ((2,) if is_dry else (2, 4, 8))
        for host, name in ([*_HOSTS.items()][:1] if is_dry else _HOSTS.items())
    ]
    outcomes = [kill(number) for number in range(1 if is_dry else 40)]
    overhead = {}
    for number in (2, 4) if is_dry else (8, 32, 128):
        plain = block_seconds(number, None)
        overhead[str(number)] = {
            "parameters": block_seconds(number, "parameters") - plain,
            "optimizer": block_seconds(number, "optimizer") - plain,
            "early": block_seconds(number, "parameters", "100%") - plain,
        }
    results = {
        "hidden": hidden,
        "bits": compare_bits(20 if is_dry else 200),
        "kills": {what: outcomes.count(what) for what in sorted(set(outcomes))},
        "overhead": overhead,
    }
    text = make_text(results)
    print(text)
    write_results("early_updates_cpu", results, text, folder=options.results)


if __name__ == "__main__":
    main()
