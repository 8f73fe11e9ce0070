"""Loss, perplexity and accuracy over tokens or samples, none of which keeps logits."""

import torch
from torch import Tensor
from torchmetrics import Metric

LM_TASKS = ("masked_lm", "causal_lm")
_IGNORED = -100  # what Hugging Face's losses leave out


class WeightedMean(Metric):
    """The mean of values of batches, each weighted with what it is a mean of.

    Unlike torchmetrics' ``MeanMetric`` it shows values that are not a number, and leaves out
    batches of which there is nothing to take a mean of.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor, count: Tensor) -> None:
        """Take a batch in.

        Args:
            value: Its mean.
            count: Number of tokens or samples.
        """
        # In float32, as sums of half precision stop growing; 0 times not a number would be none.
        self.total += torch.where(count > 0, value.detach().float() * count, 0.0)
        self.count += count

    def compute(self) -> Tensor:
        """Give the mean over all batches so far.

        Returns:
            A scalar.
        """
        return self.total / self.count


class LossPerplexity(WeightedMean):
    """The exponential of the mean loss per token: perplexity, without a look at the logits."""

    def compute(self) -> Tensor:
        """Give the perplexity of all batches so far.

        Returns:
            A scalar.
        """
        return super().compute().exp()


def targets_of(task: str | None, labels: Tensor) -> Tensor:
    """Take those labels that predictions are compared with.

    Args:
        task: Of the model.
        labels: (batch, tokens) or (batch,).

    Returns:
        The labels; for causal language models without the first token, which nothing predicts.
    """
    return labels[..., 1:] if task == "causal_lm" else labels


def num_targets(task: str | None, labels: Tensor) -> Tensor:
    """Count what a loss is the mean of.

    Args:
        task: Of the model.
        labels: (batch, tokens) or (batch,).

    Returns:
        Tokens or samples, as a scalar on the device of the labels.
    """
    return (targets_of(task, labels) != _IGNORED).sum()


def accuracy(task: str | None, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the share of targets for which the largest logit is the right one.

    Args:
        task: Of the model.
        logits: (batch, tokens, vocabulary) or (batch, classes).
        labels: (batch, tokens) or (batch,).

    Returns:
        A scalar; not a number without targets.

    Example:
        >>> logits = torch.eye(3).unsqueeze(0)
        >>> accuracy("masked_lm", logits, torch.tensor([[0, 2, -100]]))
        tensor(0.5000)
    """
    predictions = logits.argmax(-1)
    if task == "causal_lm":
        predictions = predictions[..., :-1]
    targets = targets_of(task, labels)
    is_asked = targets != _IGNORED
    return ((predictions == targets) & is_asked).sum() / is_asked.sum()
