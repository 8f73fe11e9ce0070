"""What the data, the vocabulary and the structure of the model take."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lightning_memsave.explain.dominant_parts import embedding_tables, explain_parameters
from lightning_memsave.explain.finding import Figure, Suspect, Verdict, answered, unknown
from lightning_memsave.explain.model_states import FixedCosts, fixed_costs
from lightning_memsave.explain.parameters import ParameterTable, TensorEntry
from lightning_memsave.explain.what_if import Trials
from lightning_memsave.measure.nvml import read_nvml
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.prediction.peaks import NUM_LARGEST
from lightning_memsave.prediction.result import MemoryPrediction, TensorMemory
from lightning_memsave.units import format_bytes

_MADE = ("activation", "temporary", "other")
_MATRIX = 2
_SMALL = 0.1


@dataclass(frozen=True, slots=True)
class Outputs:
    """The layer that has an output for each class or token.

    Args:
        num_outputs: How many.
        num_inputs: Of the layer.
        name: Of its matrix.
    """

    num_outputs: int
    num_inputs: int
    name: str


def find_outputs(table: ParameterTable) -> Outputs | None:
    """Find the output layer.

    Args:
        table: The parameters.

    Returns:
        An embedding table that serves as one, too; else the last matrix if nothing takes what it
        gives; ``None`` if there is neither.
    """
    matrices = [e for e in table.parameters if e.shape is not None and len(e.shape) == _MATRIX]
    tied = [e for e in matrices if any(_is_layer(table, alias) for alias in e.aliases)]
    last = [e for e in matrices if _is_layer(table, e.name)][-1:]
    # Of other layers the last one may well be inside.
    inputs = {e.shape[1] for e in matrices if e.shape}
    free = [e for e in last if e.shape and e.shape[0] not in inputs]
    for entry in [*tied, *free]:
        if entry.shape is not None and entry.shape[0] > 1:
            return Outputs(entry.shape[0], entry.shape[1], entry.name)
    return None


def _is_layer(table: ParameterTable, name: str) -> bool:
    kind = table.class_names.get(name.rpartition(".")[0], "")
    return not kind.lower().endswith(("embedding", "embeddingbag"))


def logits_of(base: MemoryPrediction, outputs: Outputs) -> list[TensorMemory]:
    """Find what is as large as the logits and alive at the peak.

    Args:
        base: The prediction.
        outputs: The output layer.

    Returns:
        Tensors with a number for each output, largest first.
    """
    return [
        tensor
        for tensor in base.largest_tensors
        if tensor.category in _MADE
        and len(tensor.shape) >= _MATRIX
        and tensor.shape[-1] == outputs.num_outputs
        and tensor.shape != (outputs.num_inputs, outputs.num_outputs)
        and not (len(tensor.shape) > _MATRIX and tensor.shape[-2] == outputs.num_outputs)
    ]


def logits_copies(trials: Trials) -> Suspect:
    """Count what is as large as the logits.

    Args:
        trials: What predicts.

    Returns:
        The answer.
    """
    name, base, outputs = "copies of the logits", trials.base(), find_outputs(trials.table)
    if outputs is None:
        return answered(name, 0, "There is no layer that gives logits.", base)
    logits = logits_of(base, outputs)
    num_bytes = sum(tensor.num_bytes for tensor in logits)
    count = f"{len(logits)} tensor{'' if len(logits) == 1 else 's'}"
    sentence = f"Nothing with {outputs.num_outputs:,} outputs is alive at the peak."
    if logits:
        made = ", ".join(dict.fromkeys(tensor.op.removeprefix("aten.") for tensor in logits))
        sentence = (
            f"{count} of {outputs.num_outputs:,} outputs for each position or sample, "
            f"{format_bytes(num_bytes)} together, are alive at the peak ({made})."
        )
    return answered(name, num_bytes, sentence, base, num_copies=len(logits))


def data_on_device(trials: Trials) -> Suspect:
    """Say what the batch takes, and what the module keeps in buffers.

    Args:
        trials: What predicts.

    Returns:
        The answer.
    """
    name, base = "data on the device", trials.base()
    if next(tensors_in_batch(trials.batch), None) is None:
        kind = type(trials.batch).__name__
        return unknown(name, f"No tensors were found in the batch, which is of class `{kind}`.")
    buffers = base.peak.buffer_bytes
    beside = f", and buffers of the module {format_bytes(buffers)}" if buffers else ""
    return answered(
        name,
        base.peak.input_bytes,
        f"The batch takes {format_bytes(base.peak.input_bytes)}{beside}. A whole data set that is "
        "moved to the device comes on top.",
        base,
        buffer_bytes=buffers,
    )


def costs_of(trials: Trials) -> FixedCosts:
    """Find what parameters cost, from the prediction where there is a batch.

    Args:
        trials: What predicts.

    Returns:
        The costs at the peak; without a batch, with the optimizer that was given or AdamW.
    """
    if trials.can_predict:
        return FixedCosts.from_prediction(trials.base(), trials.optimizer_name)
    optimizer = trials.options.get("optimizer")
    return fixed_costs(trials.table, optimizer) if optimizer else fixed_costs(trials.table)


def cardinality(trials: Trials) -> Suspect:
    """Say what the number of labels and of entries of the vocabulary costs.

    Args:
        trials: What predicts.

    Returns:
        The answer: embedding tables, output layer and logits.
    """
    name, table = "vocabulary and labels", trials.table
    outputs, tables = find_outputs(table), embedding_tables(table)
    if outputs is None and not tables:
        return Suspect(name, "does not matter", 0, "There is neither a vocabulary nor labels.")
    # Positions and kinds of tokens have tables, too: small ones.
    large = [e for e in tables if e.num_elements >= _SMALL * tables[0].num_elements]
    chosen = {e.module: e for e in large}
    if outputs is not None:
        chosen |= {e.module: e for e in table.parameters if e.name == outputs.name}
    costs = costs_of(trials)
    of_tables = costs.of(chosen)
    logits = []
    if outputs is not None and trials.can_predict:
        logits = logits_of(trials.base(), outputs)
    of_logits = sum(tensor.num_bytes for tensor in logits)
    num_bytes = of_tables + of_logits
    sentence = f"{_named(list(chosen.values()))}: {_with_name(costs)} {format_bytes(of_tables)}"
    if logits:
        sentence += f", and {format_bytes(of_logits)} of logits"
    whole = trials.base().peak_bytes if trials.can_predict else costs.total_bytes
    verdict: Verdict = "matters" if num_bytes >= 0.05 * whole else "does not matter"
    figures = {"table_bytes": of_tables, "logits_bytes": of_logits}
    return Suspect(name, verdict, num_bytes, f"{sentence}.", figures)


def _with_name(costs: FixedCosts) -> str:
    return costs.summary.replace("optimizer state", f"state of {costs.optimizer}")


def _named(entries: list[TensorEntry]) -> str:
    shown = [
        f"`{e.module or e.name}` ({' x '.join(f'{n:,}' for n in e.shape or ())})" for e in entries
    ]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"{', '.join(shown[:3])}{more}"


def structure(trials: Trials) -> Suspect:
    """Say what the parameters cost before the first activation.

    Args:
        trials: What predicts.

    Returns:
        The answer, with the part of the model that holds most.
    """
    costs = costs_of(trials)
    total = costs.total_bytes
    largest = explain_parameters(trials.table)[0]
    what = _with_name(costs)
    remark = f" at the peak; {costs.remark}" if costs.remark else ""
    sentence = f"{what[0].upper()}{what[1:]}: {format_bytes(total)}{remark}."
    whole = trials.base().peak_bytes if trials.can_predict else total
    verdict: Verdict = "matters" if total >= 0.05 * whole and total else "does not matter"
    figures = {"num_parameters": trials.table.num_parameters}
    return Suspect("model structure", verdict, total, f"{sentence} {largest}", figures)


_NAME = "attention kernel"


def attention_kernel(trials: Trials) -> Suspect:
    """Compare the kinds of attention.

    Args:
        trials: What predicts.

    Returns:
        What ``sdpa`` would save if attention is eager, else what it saves already.
    """
    base, now = trials.base(), trials.attention
    if now is None:
        return _of_scores(trials)
    other = "sdpa" if now == "eager" else "eager"
    found = trials.attempt(attention=other)
    if isinstance(found, str):
        return unknown(_NAME, f"The model cannot do with `{other}`: {found}.")
    saved = base.peak_bytes - found.peak_bytes
    figures: dict[str, Figure] = {
        "attention": now,
        "other": other,
        "other_peak_bytes": found.peak_bytes,
    }
    if now != "eager":
        what = f"would take {format_bytes(-saved)} more" if saved < 0 else "would take no more"
        return answered(
            _NAME, 0, f"It is `{now}` already; `eager` {what}.", base, **figures, saved_bytes=0
        )
    if saved <= 0:
        sentence = f"It is `eager`, and `{other}` would not lower the peak here."
    else:
        sentence = (
            f"It is `eager`, which keeps the scores of all pairs of tokens: `{other}` would save "
            f"{format_bytes(saved)} of {format_bytes(base.peak_bytes)} "
            f"({saved / base.peak_bytes:.0%}). Type "
            f'`model.set_attn_implementation("{other}")`.'
        )
    return answered(_NAME, max(saved, 0), sentence, base, **figures, saved_bytes=max(saved, 0))


def _of_scores(trials: Trials) -> Suspect:
    base = trials.base()
    if not trials.lengths:
        return Suspect(_NAME, "does not matter", 0, "Nothing is attended to in this step.")
    scores = scores_of(base, trials.lengths)
    num_bytes = sum(tensor.num_bytes for tensor in scores)
    if not scores:
        pairs = f"No matrix of all pairs of {trials.lengths[0]:,} tokens is alive at the peak."
        return answered(_NAME, 0, pairs, base)
    at_least = "At least " if are_maybe_more(base, scores) else ""
    return answered(
        _NAME,
        num_bytes,
        f"{at_least}{len(scores)} matrices of all pairs of tokens take {format_bytes(num_bytes)} "
        "at the peak: `torch.nn.functional.scaled_dot_product_attention` keeps none.",
        base,
        num_matrices=len(scores),
    )


def scores_of(base: MemoryPrediction, lengths: Collection[int]) -> list[TensorMemory]:
    """Find the scores of attention that are alive at the peak.

    Args:
        base: The prediction.
        lengths: How many tokens are attended to.

    Returns:
        Those among its largest tensors that have an entry for each pair of tokens.
    """
    return [
        tensor
        for tensor in base.largest_tensors
        if tensor.category in {"activation", "temporary"}
        and len(tensor.shape) > 2
        and tensor.shape[-1] in lengths
        and tensor.shape[-1] == tensor.shape[-2]
    ]


def are_maybe_more(base: MemoryPrediction, tensors: Sequence[TensorMemory]) -> bool:
    """Say whether smaller ones may be missing in what a prediction lists.

    Args:
        base: The prediction; it lists its largest tensors, and of deep models those of a copy.
        tensors: Some of them.

    Returns:
        True if they are of blocks that the copy lacks, or among the smallest that are listed.
    """
    listed = base.largest_tensors
    if not tensors or len(listed) < NUM_LARGEST:
        return False
    is_of_blocks = any(part.isdigit() for t in tensors for part in t.module.split("."))
    return (base.is_extrapolated and is_of_blocks) or tensors[-1].num_bytes <= listed[-1].num_bytes


def old_gradients(trials: Trials) -> Suspect:
    """Find gradients of the step before that are alive beside the activations.

    Args:
        trials: What predicts.

    Returns:
        The answer, with what it would save to free them before the forward pass.
    """
    name, base = "old gradients", trials.base()
    in_forward = base.by_phase.get("forward")
    alive = 0
    if base.peak_phase == "forward" and in_forward is not None:
        alive = base.peak.gradient_bytes
    in_force = trials.in_force
    if in_force["micro_batch_size"] is not None or in_force["early_release"]:
        return answered(name, alive, "`MemSaveCallback` frees them before the forward pass.", base)
    found = trials.attempt({"early_release": True})
    if isinstance(found, str) or "early_release" not in found.settings:
        why = found if isinstance(found, str) else "the module runs its own steps"
        return unknown(name, f"What it would save to free them earlier is not known: {why}.")
    saved = max(base.peak_bytes - found.peak_bytes, 0)
    if not alive:
        sentence = "None are alive at the peak."
    else:
        sentence = (
            f"Lightning frees gradients after the forward pass, so that {format_bytes(alive)} of "
            "the step before are alive beside the activations. To free them before it saves "
            f"{format_bytes(saved)}: `MemSaveCallback(early_release=True)` does so."
        )
    return answered(name, alive, sentence, base, alive_bytes=alive, saved_bytes=saved)


def fragmentation(trials: Trials) -> Suspect:
    """Say what the allocator holds that no tensor uses.

    Args:
        trials: What predicts.

    Returns:
        The answer.
    """
    name, base = "fragmentation", trials.base()
    if base.reserved_bytes is None:
        return answered(name, 0, "It is a matter of CUDA's caching allocator.", base)
    slack = base.reserved_bytes - base.peak_bytes
    return answered(
        name,
        slack,
        f"The allocator takes {format_bytes(base.reserved_bytes)} from the driver for "
        f"{format_bytes(base.peak_bytes)} in tensors: {format_bytes(slack)} lies between them. "
        "With samples of many lengths it is more; `PYTORCH_CUDA_ALLOC_CONF="
        "expandable_segments:True` lowers it.",
        base,
        reserved_bytes=base.reserved_bytes,
    )


def other_process(trials: Trials) -> Suspect:
    """Ask the driver whether others are on the device.

    Args:
        trials: What predicts.

    Returns:
        The answer; unknown without NVIDIA's driver.
    """
    name = "another process"
    if trials.device != "cuda":
        return Suspect(name, "does not matter", 0, "It is not on a GPU.")
    # To ask torch would begin to use the device.
    is_used = torch.cuda.is_initialized()
    reserved_bytes = torch.cuda.memory_reserved() if is_used else None
    reading = read_nvml(0, reserved_bytes)
    own_bytes = reading.process_bytes if is_used else 0
    if reading.used_bytes is None or own_bytes is None:
        return unknown(name, f"It is not known here ({reading.reason}). `nvidia-smi` shows it.")
    others = max(reading.used_bytes - own_bytes, 0)
    total = reading.total_bytes or 0
    return Suspect(
        name,
        "matters" if others >= 0.05 * total else "does not matter",
        others,
        f"Other processes and the driver hold {format_bytes(others)} of {format_bytes(total)} on "
        "the GPU of this machine now.",
        {"used_bytes": reading.used_bytes, "total_bytes": total},
    )


def cuda_context(trials: Trials) -> Suspect:
    """Say what CUDA needs for itself.

    Args:
        trials: What predicts.

    Returns:
        What NVML tells of this process if it uses the device, else what the prediction assumes.
    """
    name, base = "CUDA context", trials.base()
    if trials.device != "cuda":
        return answered(name, 0, "It is not on a GPU.", base)
    if torch.cuda.is_initialized():
        context_bytes = read_nvml(0, torch.cuda.memory_reserved()).context_bytes
        if context_bytes is not None:
            return answered(
                name,
                context_bytes,
                f"It takes {format_bytes(context_bytes)} in this process, with the libraries.",
                base,
                is_measured=True,
            )
    return answered(
        name,
        base.context_bytes,
        f"It is taken to be {format_bytes(base.context_bytes)}; it depends on GPU and driver.",
        base,
        is_measured=False,
    )
