"""Compare what the planner says with what is so: `python -m benchmarks.plan`.

Without an option, estimated times of plans with measured ones; with `--frontier` large models are
planned for GPUs, with `--host` for hosts with little memory; with `--budgets` small ones train
under budgets, beside all plans there are.

Two small transformers train on this machine's CPU with ten plans each, the plans in turn, several
times. The estimate comes from the kernels of the predicted step and from rates that were measured
here, in a second, on other tensors. What is compared is the time of a plan over that of plain
training on the same model: that is what a planner asks. 8-bit optimizers are left out: their CPU
kernels are not those of a GPU.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from benchmarks._common import RESULTS, markdown_table, write_results
from benchmarks._training import LanguageModel, fit
from benchmarks.launches.__main__ import Model
from benchmarks.plan import _budgets, _frontier
from lightning_memsave import MemSaveCallback, predict_memory
from lightning_memsave.planning.step_time import Rates, measure_cpu_rates, step_seconds

MAX_ERROR = 0.15
MIN_RANK = 0.9
STEPS = 3  # of a fit that are timed, after the first

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute all blocks": {"activation_checkpointing": "all"},
    "recompute half of the blocks": {"activation_checkpointing": "50%"},
    "recompute selectively": {"activation_checkpointing": "selective"},
    "recompute nested": {"activation_checkpointing": "nested"},
    "chunked cross-entropy": {"chunked_cross_entropy": True},
    "optimizer in backward": {"optimizer_in_backward": True},
    "4 samples at once": {"micro_batch_size": 4},
    "1 sample at once": {"micro_batch_size": 1},
    "recompute all, chunked, in backward": {
        "activation_checkpointing": "all",
        "chunked_cross_entropy": True,
        "optimizer_in_backward": True,
    },
}


DRY = ("plain", "recompute all blocks", "1 sample at once")


def models(width: int, num_blocks: int) -> dict[str, Model]:
    """Make the two models: with labels for 15 % of the tokens, and for all."""
    ids = torch.randint(8000, (16, 128), generator=torch.Generator().manual_seed(0))
    is_masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.15
    bert = BertConfig(
        vocab_size=8000,
        hidden_size=width,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        intermediate_size=4 * width,
    )
    gpt2 = GPT2Config(
        vocab_size=8000,
        n_embd=width,
        n_layer=num_blocks,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return {
        "BERT, 16 x 128": Model(
            lambda: BertForMaskedLM(bert),
            {"input_ids": ids, "labels": ids.masked_fill(~is_masked, -100)},
        ),
        "GPT-2, 8 x 128": Model(
            lambda: GPT2LMHeadModel(gpt2), {"input_ids": ids[:8], "labels": ids[:8]}
        ),
    }


class _Timer(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def measure(model: Model, plan: dict[str, Any]) -> list[float]:
    """Train some steps and return their seconds, without the first."""
    timer = _Timer()
    callback = MemSaveCallback(preset="off", report=False, predict=False, **plan)
    batches = [model.batch] * (STEPS + 1)
    fit(LanguageModel(model.build()), batches, [callback, timer])
    return timer.seconds[1:]


def compare(
    model: Model, plans: Mapping[str, dict[str, Any]], rates: Rates, num_rounds: int
) -> dict[str, dict[str, float]]:
    """Estimate and measure the time of each plan."""
    measured: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(num_rounds):
        for name, plan in plans.items():
            measured[name] += measure(model, plan)
    found = {}
    for name, plan in plans.items():
        prediction = predict_memory(
            lambda: LanguageModel(model.build()), model.batch, settings=plan, device="cpu"
        )
        estimate = sum(step_seconds(prediction.work, rates).values())
        # The best of all: what else runs here only adds to it.
        found[name] = {"estimated_s": estimate, "measured_s": min(measured[name])}
    plain = dict(found["plain"])
    for times in found.values():
        times["estimated_ratio"] = times["estimated_s"] / plain["estimated_s"]
        times["measured_ratio"] = times["measured_s"] / plain["measured_s"]
        times["error"] = times["estimated_ratio"] / times["measured_ratio"] - 1
    return found


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks."""
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def check_claims(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, bool]:
    """Say which claims hold."""
    claims = {}
    for model, plans in found.items():
        worst = max(abs(times["error"]) for times in plans.values())
        rank = rank_correlation(
            [times["estimated_s"] for times in plans.values()],
            [times["measured_s"] for times in plans.values()],
        )
        claims[f"{model}: estimated ratios are within {MAX_ERROR:.0%} ({worst:.1%})"] = (
            worst <= MAX_ERROR
        )
        claims[f"{model}: rank correlation at least {MIN_RANK} ({rank:.3f})"] = rank >= MIN_RANK
    return claims


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="fits of each plan")
    parser.add_argument("--dry-run", action="store_true", help="tiny models, one round")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--frontier", action="store_true", help="plan large models for GPUs")
    which.add_argument("--host", action="store_true", help="plan for hosts with little memory")
    which.add_argument("--budgets", action="store_true", help="train small models under budgets")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning_memsave").setLevel(logging.ERROR)  # the table of each fit
    if arguments.frontier:
        _write("plan_frontier", *_plan_for_gpus(arguments.dry_run), arguments)
    elif arguments.host:
        _write("plan_host", *_plan_for_hosts(arguments.dry_run), arguments)
    elif arguments.budgets:
        _write("plan_budgets_cpu", *_train_under_budgets(arguments.dry_run), arguments)
    else:
        _write("step_time_cpu", *_compare_times(arguments), arguments)


Written = tuple[dict[str, Any], str, dict[str, bool]]
"""Results, what is shown of them, and claims."""


def _plan_for_gpus(is_dry: bool) -> Written:
    cases = _frontier.DRY if is_dry else _frontier.CASES
    found = _frontier.run(cases, in_process=is_dry)
    return {"cases": found}, _frontier.make_text(found), _frontier.check_claims(found)


def _plan_for_hosts(is_dry: bool) -> Written:
    found = _frontier.run(_frontier.DRY_HOST if is_dry else _frontier.HOSTS, in_process=is_dry)
    return (
        {"cases": found},
        _frontier.make_host_text(found),
        _frontier.check_host_claims(found),
    )


def _train_under_budgets(is_dry: bool) -> Written:
    if is_dry:
        found = {"residual MLP, 2 blocks": _budgets.run_model(_budgets.DRY, (0.85,), ())}
    else:
        found = _budgets.run(list(_budgets.MODELS))
    return {"models": found}, _budgets.make_text(found), _budgets.check_claims(found)


def _compare_times(arguments: argparse.Namespace) -> Written:
    rates = measure_cpu_rates()
    chosen = models(32, 1) if arguments.dry_run else models(256, 6)
    num_rounds = 1 if arguments.dry_run else arguments.rounds
    plans = {name: PLANS[name] for name in DRY} if arguments.dry_run else PLANS
    found = {name: compare(model, plans, rates, num_rounds) for name, model in chosen.items()}
    rows = [
        (model, plan, *(f"{times[key]:.2f}" for key in ("estimated_ratio", "measured_ratio")),
         f"{times['error']:+.1%}")
        for model, plans in found.items()
        for plan, times in plans.items()
    ]  # fmt: skip
    table = markdown_table(("model", "plan", "estimated", "measured", "error"), rows)
    title = "Time of a step over that of plain training on the same model, on a CPU:"
    return {"models": found}, f"{title}\n\n{table}", check_claims(found)


def _write(
    name: str,
    results: dict[str, Any],
    text: str,
    claims: dict[str, bool],
    arguments: argparse.Namespace,
) -> None:
    text += "\n" + "".join(
        f"\n- {'' if holds else 'Does not hold: '}{claim}" for claim, holds in claims.items()
    )
    path = write_results(name, {**results, "claims": claims}, text, folder=arguments.results)
    print(f"{text}\n\nWritten to {path}")
    failed = [claim for claim, holds in claims.items() if not holds]
    if failed and not arguments.dry_run:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
