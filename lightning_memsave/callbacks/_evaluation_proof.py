"""Prove that the batches of validation, test or prediction may be split, before they are."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memsave import host
from lightning_memsave.core.batches import merge_outputs
from lightning_memsave.core.nesting import items_of
from lightning_memsave.techniques._micro_batches.loss_proof import Proof
from lightning_memsave.techniques._micro_batches.loss_weights import read_weights, shares_of

# Kernels for one sample and for two round differently, and deep models add that up.
_TOLERANCE = 1e-3


class _Seen(NamedTuple):
    part: Any
    logged: dict[str, tuple[Any, Tensor]]
    output: Any


class EvaluationStep:
    """A step that is looked at with two samples together and with each alone.

    Args:
        run: The step, of a batch.
        logged: Where what it logs is held back.
    """

    def __init__(self, run: Callable[[Any], Any], logged: host.LoggedValues) -> None:
        self._run, self._logged = run, logged
        self._seen: list[_Seen] = []
        self.has_numbers = False
        """Whether it logged or returned any."""

    def numbers(self, part: Any) -> Tensor:
        """Run the step for what would be averaged over the parts of a batch; nothing is logged.

        Args:
            part: A batch.

        Returns:
            The sum of the numbers that it logs and returns, of shape ().
        """
        with self._logged.forgotten():
            self._logged.start_part(1.0, None)
            output = self._run(part)
            logged = self._logged.tensors()
        self._seen.append(_Seen(part, logged, output))
        numbers = [value for meta, value in logged.values() if meta.is_mean_reduction]
        numbers += _numbers_of(output)
        if not numbers:
            return torch.zeros(())
        self.has_numbers = True
        is_double = all(number.dtype == torch.float64 for number in numbers)
        total = torch.stack([number.double().cpu() for number in numbers]).sum()
        return total if is_double else total.float()

    def difference(self, proof: Proof) -> str:
        """Compare what was seen last: two samples together, and put together from each alone.

        Args:
            proof: What the numbers are the mean over.

        Returns:
            What is not as it was together, as a clause; empty if everything is.
        """
        if len(self._seen) < 3:  # a batch of one sample
            return ""
        both, *alone = self._seen[-3:]
        weights = [0.5, 0.5]
        if proof.weightings:
            rows = read_weights(proof.weightings[:1], [seen.part for seen in alone])
            weights = shares_of(proof.weightings[0], rows[0]) or weights
        # A sample without a label has no loss, and passes in no part.
        parts = [(seen, weight) for seen, weight in zip(alone, weights, strict=True) if weight]
        for name, (meta, value) in both.logged.items():
            values = [seen.logged[name][1] for seen, _ in parts if name in seen.logged]
            if len(values) < len(parts) or not _agree(
                value, host.combined(meta, values, [weight for _, weight in parts])
            ):
                return f"`{name}`, which it logs, is no mean over samples or tokens"
        try:
            merged = merge_outputs(
                [seen.output for seen, _ in parts], [1] * len(parts), [w for _, w in parts]
            )
        except ValueError as error:
            return f"what it returns cannot be put together: {error}"
        same = len(parts) < 2 or _agree(both.output, merged)
        return "" if same else "what it returns for a sample depends on the others in its batch"


def _numbers_of(output: Any) -> Iterator[Tensor]:
    if isinstance(output, float):
        yield torch.tensor(output)
    elif isinstance(output, Tensor):
        if output.ndim == 0 and output.is_floating_point():
            yield output.detach()
    else:
        for _, item in items_of(output):
            yield from _numbers_of(item)


def _agree(whole: Any, merged: Any) -> bool:
    if isinstance(whole, Tensor):
        if not whole.is_floating_point() or not whole.numel():
            return True  # a class that was chosen may be another one after rounding
        atol = _TOLERANCE * float(whole.nan_to_num(0.0, 0.0, 0.0).abs().max())
        return whole.shape == merged.shape and torch.allclose(
            merged.to(whole), whole, rtol=_TOLERANCE, atol=atol, equal_nan=True
        )
    if isinstance(whole, float):
        return math.isclose(whole, merged, rel_tol=_TOLERANCE) or math.isnan(whole)
    items = dict(items_of(merged))
    return all(_agree(item, items.get(name)) for name, item in items_of(whole))
