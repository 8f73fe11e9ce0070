"""Train small models under budgets, and compare with all plans there are: `--budgets`."""

import argparse
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from benchmarks._common import markdown_table, run_in_process
from benchmarks._training import LanguageModel, fit
from benchmarks.faults._fits import digest
from lightning_memsave import GPUMemoryMonitor, MemSaveCallback
from lightning_memsave.api import make_what_if
from lightning_memsave.errors import InfeasiblePlanError
from lightning_memsave.planning import search
from lightning_memsave.planning.plan import Plan
from lightning_memsave.planning.recorded_blocks import value_of
from lightning_memsave.planning.step_time import Rates, measure_cpu_rates, step_seconds
from lightning_memsave.units import MIB

SHARES = (0.25, 0.4, 0.55, 0.7, 0.9)
LESS_EXACT = (0.25, 0.55)
"""Those that are also planned less exactly: it takes several times as many predictions."""
NUM_STEPS, BATCH_SIZE, NUM_TOKENS, WIDTH = 6, 8, 64, 128
MAX_SLOWER = 0.01
"""Of the time of the plain step."""
_PART_BYTES = 8  # of the loss of a micro-batch; predictions simulate two of them
_FAR = 1.25  # budgets: settings whose four unmixed choices need more are not searched further
_LIMIT_S = 3000
_SIZES = (None, 2, 1)  # samples at once
_KINDS = ("nested", "full", "selective")


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.dropout = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return x + added


class _Convolution(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layers(x)
        return changed


class _Regression(LightningModule):
    """Learns to give the first of two tensors back, with AdamW."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _hugging_face(name: str, task: str, **config: Any) -> LightningModule:
    made = getattr(transformers, f"{name}Config")(vocab_size=500, use_cache=False, **config)
    made.decoder_start_token_id = 0
    return LanguageModel(getattr(transformers, f"{name}{task}")(made), lr=1e-3)


def _encoder() -> LightningModule:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
    return _Regression(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))


def _convolutions() -> LightningModule:
    widths = (3, 16, 32, 64, 3)
    blocks = [_Convolution(a, b) for a, b in itertools.pairwise(widths)]
    return _Regression(nn.Sequential(*blocks))


def _residual(num_blocks: int) -> LightningModule:
    return _Regression(nn.Sequential(*(_Residual(WIDTH) for _ in range(num_blocks))))


def _tokens(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(500, (BATCH_SIZE, NUM_TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda seed: torch.randn(
        BATCH_SIZE, *shape, generator=torch.Generator().manual_seed(seed)
    )


@dataclass(frozen=True)
class Small:
    """A model that trains here.

    Args:
        build: Makes the LightningModule.
        batch: Makes a batch from a seed.
        num_blocks: Blocks about which there is a choice.
        kinds: How they can be recomputed.
        has_logits: Whether the cross-entropy may be chunked.
    """

    build: Callable[[], LightningModule]
    batch: Callable[[int], Any]
    num_blocks: int
    kinds: tuple[str, ...] = _KINDS
    has_logits: bool = True


_BERT = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
_T5 = {
    "d_model": WIDTH,
    "d_kv": 32,
    "d_ff": 4 * WIDTH,
    "num_heads": 4,
    "num_layers": 1,
    "num_decoder_layers": 2,
}

MODELS = {
    "residual MLP": Small(partial(_residual, 6), _numbers(NUM_TOKENS, WIDTH), 6, has_logits=False),
    "convolutions": Small(
        _convolutions, _numbers(3, 32, 32), 4, ("full", "selective"), has_logits=False
    ),
    "encoder": Small(_encoder, _numbers(NUM_TOKENS, WIDTH), 4, has_logits=False),
    "GPT-2": Small(
        partial(_hugging_face, "GPT2", "LMHeadModel", n_embd=WIDTH, n_layer=3, n_head=4), _tokens, 3
    ),
    "BERT": Small(
        partial(_hugging_face, "Bert", "ForMaskedLM", num_hidden_layers=3, **_BERT), _tokens, 3
    ),
    "T5": Small(partial(_hugging_face, "T5", "ForConditionalGeneration", **_T5), _tokens, 3),
}
DRY = Small(partial(_residual, 2), _numbers(NUM_TOKENS, WIDTH), 2, has_logits=False)


class _Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(outputs["loss"].item())


def train(model: Small, **settings: Any) -> dict[str, Any]:
    """Train some steps and say what was counted; ``refused`` if no plan fits."""
    torch.manual_seed(0)
    module, losses = model.build(), _Losses()
    callback, monitor = MemSaveCallback(report=False, **settings), GPUMemoryMonitor()
    batches = [model.batch(seed) for seed in range(NUM_STEPS)]
    try:
        fit(module, batches, [callback, monitor, losses])
    except InfeasiblePlanError as error:
        return {"refused": str(error), "least_bytes": error.smallest.device_bytes}
    assert monitor.summary is not None, "the fit is over"
    found = {
        "counted_bytes": monitor.summary.peak_bytes,
        "losses": losses.found,
        "digest": digest(module),
    }
    if callback.plan is None:
        return found
    made = callback.plan
    last = callback.state_dict().get("plan", {}).get("plan", made.plan.to_dict())
    return found | {
        "plan": made.plan.to_dict(),
        "changed_to": None if last["settings"] == made.plan.settings else last,
        "search_s": made.seconds,
        "num_predictions": made.num_predictions,
    }


@contextlib.contextmanager
def fixed_rates(rates: Rates) -> Iterator[None]:
    """Let all searches use one measurement: those of a loaded machine differ."""
    with mock.patch.object(search, "rates_of", return_value=rates):
        yield


class Everything:
    """Predicts plans of a model whole, each once.

    Args:
        model: The model.
        rates: What this machine reaches.
    """

    def __init__(self, model: Small, rates: Rates) -> None:
        self._model, self._rates = model, rates
        self._what_if = make_what_if(
            model.build, model.batch(0), settings={"preset": "off"}, device="cpu"
        )

    @property
    def num_predictions(self) -> int:
        """How many there were."""
        return self._what_if.num_predictions

    def bitwise(self) -> list[tuple[int, float, dict[str, Any]]]:
        """Predict all plans that are bitwise: bytes, seconds, and the settings."""
        return [
            self._predict({"activation_checkpointing": value, "optimizer_in_backward": is_on})
            for value in self._cuts()
            for is_on in (None, True)
        ]

    def others_that_fit(self, budget_bytes: int) -> tuple[list[dict[str, Any]], int]:
        """Look for less exact plans that fit; also give how many were pruned as far away."""
        fitting, pruned = [], 0
        extremes = [
            None,
            *(value_of([kind] * self._model.num_blocks) for kind in self._model.kinds),
        ]
        for others in self._others():
            tried = [
                self._predict(others | {"activation_checkpointing": value}) for value in extremes
            ]
            if min(tried, key=lambda one: one[0])[0] > _FAR * budget_bytes:
                pruned += 1
                continue
            tried += [
                self._predict(others | {"activation_checkpointing": value})
                for value in self._cuts()
            ]
            fitting += [changes for size, _, changes in tried if size <= budget_bytes]
        return fitting, pruned

    def _others(self) -> Iterator[dict[str, Any]]:
        chunked = (None, True) if self._model.has_logits else (None,)
        for in_backward, is_chunked, optimizer, size in itertools.product(
            (None, True), chunked, (None, "8bit"), _SIZES
        ):
            yield {
                "optimizer_in_backward": in_backward,
                "chunked_cross_entropy": is_chunked,
                "optimizer": optimizer,
                "micro_batch_size": size,
            }

    # Kinds in their order, any number of blocks of each.
    def _cuts(self) -> list[Any]:
        number, kinds, found = self._model.num_blocks, self._model.kinds, []
        for ends in itertools.combinations_with_replacement(range(number + 1), len(kinds)):
            sizes = [b - a for a, b in itertools.pairwise((0, *ends, number))]
            names = [
                kind for kind, n in zip((*kinds, "keep"), sizes, strict=True) for _ in range(n)
            ]
            found.append(value_of(names))
        return list(dict.fromkeys(found))

    def _predict(self, changes: dict[str, Any]) -> tuple[int, float, dict[str, Any]]:
        prediction = self._what_if.predict({"precision": "32-true", **changes})
        return (
            prediction.device_bytes,
            sum(step_seconds(prediction.work, self._rates).values()),
            changes,
        )


def run_model(
    model: Small, shares: Sequence[float] = SHARES, less_exact: Sequence[float] = LESS_EXACT
) -> dict[str, Any]:
    """Train one model under all budgets, in this process."""
    rates = measure_cpu_rates()
    plain = train(model, preset="off", predict=False)
    everything = Everything(model, rates)
    bitwise = everything.bitwise()
    plain_s = next(seconds for _, seconds, changes in bitwise if not any(changes.values()))
    fits = []
    with fixed_rates(rates):
        all_of_them = [(share, "bitwise") for share in shares]
        all_of_them += [(share, "approximate") for share in less_exact]
        for share, exactness in all_of_them:
            budget = int(share * plain["counted_bytes"])
            found = train(model, budget=budget, exactness=exactness)
            found |= {"share": share, "exactness": exactness, "budget_bytes": budget}
            fitting = [one for one in bitwise if one[0] <= budget]
            if "refused" in found and exactness == "approximate":
                found["others_that_fit"], found["pruned"] = everything.others_that_fit(budget)
            if "refused" in found:
                found["bitwise_that_fit"] = [changes for _, _, changes in fitting]
            else:
                found |= _compare(found, bitwise, fitting, plain, plain_s)
            fits.append(found)
            print(f"{share} {exactness}: {_outcome(found)}", file=sys.stderr, flush=True)
    return {
        "plain": plain,
        "num_bitwise": len(bitwise),
        "num_predictions": everything.num_predictions,
        "fits": fits,
    }


def _outcome(found: Mapping[str, Any]) -> str:
    return "refused" if "refused" in found else f"{found['counted_bytes'] / MIB:.2f} MiB counted"


def _compare(
    found: Mapping[str, Any],
    bitwise: Sequence[tuple[int, float, dict[str, Any]]],
    fitting: Sequence[tuple[int, float, dict[str, Any]]],
    plain: Mapping[str, Any],
    plain_s: float,
) -> dict[str, Any]:
    is_equal = (found["digest"], found["losses"]) == (plain["digest"], plain["losses"])
    more: dict[str, Any] = {"is_equal": is_equal}
    if found["exactness"] != "bitwise":
        return more
    chosen = found["plan"]["settings"]
    (exact,) = (o for o in bitwise if all(chosen[name] == v for name, v in o[2].items()))
    best = min(fitting, key=lambda one: one[1], default=None)
    more["predicted_again_bytes"], more["ratio"] = exact[0], exact[1] / plain_s
    more["best_ratio"] = None if best is None else best[1] / plain_s
    more["best"] = None if best is None else best[2]
    return more


def run(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Train each model in a process of its own, two at a time: nothing is timed here."""

    def run_one(name: str) -> dict[str, Any]:
        found = run_in_process("benchmarks.plan._budgets", name, limit_s=_LIMIT_S)
        print(f"{name}: {found.get('error') or found['num_predictions']}", flush=True)
        return found

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(run_one, names), strict=True))


def make_text(found: dict[str, dict[str, Any]]) -> str:
    """Lay out what was found."""
    rows = []
    for name, one in _finished(found).items():
        for each in one["fits"]:
            row = [name, f"{each['share']:.2f}", each["exactness"]]
            row.append(f"{each['budget_bytes'] / MIB:.2f}")
            if "refused" in each:
                rows.append([*row, f"{each['least_bytes'] / MIB:.2f}", "", "refused", "", "", ""])
                continue
            plan = each["plan"]
            rows.append(
                [
                    *row,
                    f"{plan['device_bytes'] / MIB:.2f}",
                    f"{each['counted_bytes'] / MIB:.2f}",
                    _short(plan),
                    f"{plan['time_ratio']:.3f}",
                    f"{each['best_ratio']:.3f}" if each.get("best_ratio") else "",
                    "yes" if each["is_equal"] else "no",
                ]
            )
    header = ["model", "of plain", "may be", "budget", "predicted", "counted", "plan", "time"]
    return "\n\n".join(
        [
            f"Small models trained for {NUM_STEPS} steps on a CPU under budgets that are shares of "
            "the counted peak of plain training. Sizes in MiB; for what was refused, `predicted` "
            "is the least that was found. `time` is the estimated time of the plan over that of "
            "the plain step, `best` the least of all plans that fit, each predicted whole; `equal` "
            "says whether losses and weights are those of plain training bit for bit.",
            markdown_table([*header, "best", "equal"], rows),
            _searched(found),
        ]
    )


def _finished(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in found.items() if "error" not in one}


def _searched(found: Mapping[str, dict[str, Any]]) -> str:
    found = _finished(found)
    number = sum(one["num_bitwise"] for one in found.values())
    pruned = sum(each.get("pruned", 0) for one in found.values() for each in one["fits"])
    whole = sum(one["num_predictions"] for one in found.values())
    return (
        f"All plans: {number} bitwise ones (kinds of recomputation in their order, any number of "
        "blocks each, with and without the optimizer in backward), and where a budget was refused "
        "each of these also with chunked cross-entropy, 8-bit state and micro-batches of 2 and "
        f"1 samples; {whole:,} predictions. {pruned} combinations of those settings were left out, "
        f"as with no, full, selective and nested recomputation of all blocks they need more than "
        f"{_FAR} budgets."
    )


def _short(plan: Mapping[str, Any]) -> str:
    return Plan(**plan).short


def check_claims(found: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Say which claims hold."""
    claims = {
        f"{name} trains: {one['error']}": False for name, one in found.items() if "error" in one
    }
    for name, one in _finished(found).items():
        fits = one["fits"]
        trained = [each for each in fits if "refused" not in each]
        refused = [each for each in fits if "refused" in each]
        bitwise = [each for each in trained if each["exactness"] == "bitwise"]
        for exactness in dict.fromkeys(each["exactness"] for each in trained):
            these = [each for each in trained if each["exactness"] == exactness]
            what = f"{name}: {len(these)} fits planned as {exactness}"
            claims[f"{what} stay within their budgets, as counted"] = all(
                each["counted_bytes"] <= each["budget_bytes"] for each in these
            )
            exact = f"{what} were predicted whole, and counted as predicted, to the byte"
            if exactness != "bitwise":
                exact += f", but for the losses of micro-batches, {_PART_BYTES} bytes each"
            claims[exact] = all(
                each["plan"]["is_verified"]
                and each["plan"]["peak_bytes"] + _unseen_bytes(each) == each["counted_bytes"]
                for each in these
                if each["changed_to"] is None
            )
        claims |= {
            f"{name}: {len(bitwise)} bitwise fits give the losses and weights of plain training": (
                all(each["is_equal"] for each in bitwise)
            ),
            f"{name}: their plans are within {MAX_SLOWER:.0%} of the fastest that fits": all(
                each["best_ratio"] is not None
                and each["ratio"] <= each["best_ratio"] + MAX_SLOWER
                and each["predicted_again_bytes"] == each["plan"]["device_bytes"]
                for each in bitwise
            ),
            f"{name}: where {len(refused)} budgets were refused, no plan fits": not any(
                each["bitwise_that_fit"] or each.get("others_that_fit") for each in refused
            ),
        }
    return claims


def _unseen_bytes(fit: Mapping[str, Any]) -> int:
    size = fit["plan"]["settings"]["micro_batch_size"]
    return _PART_BYTES * max(0, BATCH_SIZE // size - 2) if isinstance(size, int) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan._budgets")
    parser.add_argument("model", choices=MODELS)
    options = parser.parse_args()
    logging.getLogger("lightning_memsave").setLevel(logging.ERROR)  # the table of each fit
    print(json.dumps(run_model(MODELS[options.model])))
