"""What another kind of attention, or gradients that are freed in time, would change."""

from collections.abc import Collection, Sequence

from lightning_memsave.analysis._explain_suspect import Figure, Suspect, answered, unknown
from lightning_memsave.analysis._explain_trials import Trials
from lightning_memsave.planning.peaks import NUM_LARGEST
from lightning_memsave.planning.prediction import MemoryPrediction, TensorMemory
from lightning_memsave.units import format_bytes

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
