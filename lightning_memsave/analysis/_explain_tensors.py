"""What the data, the vocabulary and the structure of the model take."""

from dataclasses import dataclass

from lightning_memsave.analysis._explain_suspect import Suspect, Verdict, answered, unknown
from lightning_memsave.analysis._explain_trials import Trials
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.planning._dominant_parts import embedding_tables
from lightning_memsave.planning._tensor_entries import TensorEntry
from lightning_memsave.planning.fixed_costs import FixedCosts, fixed_costs
from lightning_memsave.planning.parameter_sentences import explain_parameters
from lightning_memsave.planning.parameter_table import ParameterTable
from lightning_memsave.planning.prediction import MemoryPrediction, TensorMemory
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
