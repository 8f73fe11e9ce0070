"""Say in sentences which part of a model dominates its parameters, why, and what that costs."""

from collections.abc import Iterable, Mapping, Sequence

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning._dominant_parts import (
    Part,
    dominant_embedding,
    dominant_parts,
    embedding_tables,
    percent_of,
    shape_of,
)
from lightning_memsave.planning._tensor_entries import TensorEntry
from lightning_memsave.planning.fixed_costs import FixedCosts
from lightning_memsave.planning.parameter_table import ParameterTable
from lightning_memsave.units import format_bytes

# A part below this share of the parameters is not said to hold much of them.
_MIN_SHARE = 0.1
_MIN_BUFFER_SHARE = 0.01


def explain_parameters(
    table: ParameterTable,
    costs: FixedCosts | None = None,
    cardinalities: Mapping[str, int] | None = None,
) -> list[str]:
    """Say what dominates a model and why.

    Args:
        table: What the model holds.
        costs: From `fixed_costs` or ``FixedCosts.from_prediction``; without them, sentences are
            about numbers of parameters only.
        cardinalities: For models of tables: how many categories each column has.

    Returns:
        Sentences, the largest part first; at least one.

    Raises:
        ConfigurationError: If a cardinality is not a whole number of at least 0.

    Example:
        >>> from lightning_memsave.planning.parameter_table import parameter_table
        >>> table = parameter_table({"embed.weight": (50000, 64), "head.weight": (10, 64)})
        >>> explain_parameters(table)[0]
        'The embedding table `embed` (50,000 x 64) holds 100.0 % of the 3,200,640 parameters.'
    """
    if table.num_parameters == 0:
        return _lazy(table) or [f"{table.model} has no parameters."]
    tables = embedding_tables(table)
    parts = dominant_parts(table, tables)
    large = [part for part in parts if part.num_parameters >= _MIN_SHARE * table.num_parameters]
    sentences = []
    for i, part in enumerate(large):
        # Only the first one says of how many.
        of_all = f" of the {table.num_parameters:,} parameters"
        sentences.append(part.sentence.replace(of_all, "") if i else part.sentence)
        if costs is not None:
            sentences.append(_cost(part, costs, is_first=i == 0))
    if not large:
        largest = max(table.parameters, key=lambda entry: entry.num_elements)
        sentences.append(
            f"Nothing dominates the {table.num_parameters:,} parameters: the largest, "
            f"`{largest.name}` ({shape_of(largest)}), holds {percent_of(table, [largest])}."
        )
    return [
        *sentences,
        *_cardinality(table, tables, cardinalities or {}),
        *_sparse(table, tables),
        *_tied(part.entries for part in large),
        *_frozen(table),
        *_buffers(table),
        *_lazy(table),
    ]


def _cost(part: Part, costs: FixedCosts, *, is_first: bool) -> str:
    verb = "they cost" if part.is_several else "it costs"
    own = format_bytes(_cost_of(part.entries, costs))
    if not is_first:
        return f"With {costs.optimizer} {verb} {own}."
    remark = f" at the peak; {costs.remark}" if costs.remark else ""
    return (
        f"With {costs.optimizer} {verb} {own} of the {format_bytes(costs.total_bytes)} that "
        f"{costs.summary} take together{remark}."
    )


def _cost_of(entries: Iterable[TensorEntry], costs: FixedCosts) -> int:
    return costs.of(entry.module for entry in entries)


def _cardinality(
    table: ParameterTable, tables: Sequence[TensorEntry], cardinalities: Mapping[str, int]
) -> list[str]:
    for column, number in cardinalities.items():
        if type(number) is not int or number < 0:
            raise ConfigurationError(
                f"`cardinalities={{{column!r}: {number!r}}}` is not a number of categories: it "
                "must be a whole number of at least 0, such as `{'country': 195}`."
            )
    total = sum(cardinalities.values())
    if not total:
        return []
    column, number = max(cardinalities.items(), key=lambda item: item[1])
    shared = [e for e in tables if e.shape and e.shape[0] >= total and number / e.shape[0] > 0.5]
    rows = shared[0].shape[0] if shared and shared[0].shape else total
    largest = (
        f"Of the {len(cardinalities)} columns one, `{column}`, has {number:,} of the {rows:,} "
        f"categories ({number / rows:.2%})"
    ).replace("%", " %")
    if not shared:
        return [f"{largest}."]
    # The bias of an output layer and its matrix, where it is not tied, have as many rows.
    saved = sum(
        number * entry.num_elements // rows
        for entry in table.parameters
        if entry.shape and entry.shape[0] == rows
    )
    return [
        f"{largest}: without it the embedding table{'s' if len(shared) > 1 else ''} would have "
        f"{rows - number:,} rows, and the model {table.num_parameters - saved:,} parameters."
    ]


def _sparse(table: ParameterTable, tables: Sequence[TensorEntry]) -> list[str]:
    # What is tied to a head has a gradient in every row.
    if not dominant_embedding(table) or tables[0].aliases or not table.class_names:
        return []
    return [
        f"A batch changes only its own rows of `{tables[0].name}`: with `sparse=True` of "
        "`nn.Embedding`, and `torch.optim.SparseAdam` or SGD for it, its gradient has just these."
    ]


def _tied(groups: Iterable[Iterable[TensorEntry]]) -> list[str]:
    return [
        f"`{entry.name}` is also `{'`, `'.join(entry.aliases)}`: it is one tensor and counts once."
        for entries in groups
        for entry in entries
        if entry.aliases
    ]


def _frozen(table: ParameterTable) -> list[str]:
    frozen = [entry for entry in table.parameters if entry.is_trainable is False]
    if not any(entry.num_elements for entry in frozen):
        return []
    share = percent_of(table, frozen)
    return [f"{share} of the parameters are frozen: they need neither gradient nor state."]


def _buffers(table: ParameterTable) -> list[str]:
    if table.buffer_bytes < _MIN_BUFFER_SHARE * table.num_bytes:
        return []
    return [f"Buffers take {format_bytes(table.buffer_bytes)} more."]


def _lazy(table: ParameterTable) -> list[str]:
    if not table.num_lazy:
        return []
    return [
        f"{table.num_lazy} lazy parameters have no shape before the first forward pass, and do not "
        "count."
    ]
