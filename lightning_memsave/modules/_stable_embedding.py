"""The stable embedding of Dettmers et al.: layer normalisation right behind the token embedding."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.errors import Problem


class StableEmbedding(nn.Embedding):
    """A token embedding with Xavier uniform weights and a LayerNorm behind it.

    It keeps large gradients of rare tokens from upsetting low-bit optimizer states, for one
    activation of the size of the embedded batch. The norm stands before position embeddings are
    added.

    Args:
        embedding: The embedding whose sizes and settings it takes, not the weights.

    Note:
        The norm is part of the model: its ``weight`` and ``bias`` are in ``state_dict``.

    References:
        Dettmers et al. (2022), 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        weight = embedding.weight
        super().__init__(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            max_norm=embedding.max_norm,
            norm_type=embedding.norm_type,
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            sparse=embedding.sparse,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.norm = nn.LayerNorm(self.embedding_dim, device=weight.device, dtype=weight.dtype)
        nn.init.xavier_uniform_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].fill_(0.0)

    def forward(self, input: Tensor) -> Tensor:
        """Embed and normalise.

        Args:
            input: Tokens of any shape.

        Returns:
            One vector per token.
        """
        vectors: Tensor = self.norm(super().forward(input))
        return vectors


def install(model: Any) -> None:
    """Put a stable embedding in the place of a Hugging Face model's token embedding.

    Args:
        model: The model, for which `embedding_problems` found nothing.
    """
    model.set_input_embeddings(StableEmbedding(model.get_input_embeddings()))
    model.tie_weights()  # the head goes on sharing the weight


def has_stable_embedding(model: Any) -> bool:
    """Say whether a model's token embedding is a stable one.

    Args:
        model: A Hugging Face model.

    Returns:
        True after `install`, and in copies.
    """
    return isinstance(model.get_input_embeddings(), StableEmbedding)


def embedding_problems(model: Any) -> list[Problem]:
    """Find out why a model's token embedding cannot be a stable one.

    Args:
        model: A Hugging Face model.

    Returns:
        All problems.
    """
    embedding = model.get_input_embeddings()
    if type(embedding) is nn.Embedding:
        return []
    return [
        Problem(
            "`stable_embedding=True`",
            f"the token embedding of `{type(model).__name__}` is a "
            f"`{type(embedding).__name__}`, which does more than to look up vectors",
            "Use `stable_embedding=False`.",
        )
    ]
