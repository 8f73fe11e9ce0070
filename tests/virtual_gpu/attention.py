"""Flash and efficient attention of CUDA, forward and backward, computed on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Random:
    """The random numbers of one operator: of the CUDA generator's seed and offset."""

    def __init__(self, seed: int, *, is_given: bool) -> None:
        self.seed, self.is_given = seed, is_given
        self.generator = torch.Generator().manual_seed(seed)

    def as_tensor(self) -> Tensor:
        """What an operator saves of them for its backward."""
        return torch.tensor(self.seed % 2**31, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Attention:
    """What forward and backward need of an operator's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    p: float
    is_causal: bool
    scale: float | None

    def widened(self) -> tuple[Tensor, Tensor, Tensor]:
        """In 32 bits, with keys and values repeated for the heads that share them."""
        groups = self.q.shape[1] // self.k.shape[1]
        k, v = self.k.float(), self.v.float()
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return self.q.float() * (self.scale or self.q.shape[-1] ** -0.5), k, v

    def scores(self, scaled_q: Tensor, k: Tensor) -> Tensor:
        scores = scaled_q @ k.transpose(-1, -2)
        if self.bias is not None:
            scores = scores + self.bias.float()
        if self.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        return scores

    def mask(self, shape: torch.Size, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.empty(shape, device="cpu").uniform_(generator=generator) >= self.p
        return kept.float() / (1 - self.p)

    def forward(self, random: Random | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.widened()
        scores = self.scores(q, k)
        weights = torch.softmax(scores, -1)
        if self.p and random is not None:
            weights = weights * self.mask(weights.shape, int(random.as_tensor()))
        return weights @ v, torch.logsumexp(scores, -1)

    def backward(self, grad: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q, k, v and the scores."""
        q, k, v = self.widened()
        grad, weights = grad.float(), torch.softmax(self.scores(q, k), -1)
        mask: Any = self.mask(weights.shape, seed) if self.p else 1.0
        dv = (weights * mask).transpose(-1, -2) @ grad
        dweights = grad @ v.transpose(-1, -2) * mask
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
        dq, dk = dscores @ k, dscores.transpose(-1, -2) @ q
        heads = self.k.shape[1]
        dk, dv = (t.unflatten(1, (heads, -1)).sum(2) for t in (dk, dv))
        return dq * (self.scale or self.q.shape[-1] ** -0.5), dk, dv, dscores


def _flash(random: Any, *args: Any, scale: float | None = None) -> tuple[Any, ...]:
    defaults: list[Any] = [0.0, False]
    q, k, v, p, is_causal, *_ = [*args, *defaults[len(args) - 3 :]]
    out, lse = Attention(q, k, v, None, p, is_causal, scale).forward(random)
    seed = torch.stack([random.as_tensor()] * 2).view(torch.uint64) if p else None
    return out, lse, None, None, None, None, seed, None, None


def _flash_backward(_: Any, *args: Any, scale: float | None = None) -> tuple[Any, ...]:
    grad, q, k, v, _out, _lse, _cum_q, _cum_k, _max_q, _max_k, p, is_causal, seed, _offset = args
    number = int(seed.view(torch.int64).flatten()[0]) if p else 0
    return Attention(q, k, v, None, p, is_causal, scale).backward(grad, number)[:3]


def _efficient(random: Any, *args: Any, scale: float | None = None) -> tuple[Any, ...]:
    defaults: list[Any] = [0.0, False]
    q, k, v, bias, is_trained, p, is_causal = [*args, *defaults[len(args) - 5 :]]
    out, lse = Attention(q, k, v, bias, p, is_causal, scale).forward(random)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))  # as the kernel pads rows
    return out, padded if is_trained else None, random.as_tensor() if p else None, None


def _efficient_backward(_: Any, *args: Any, scale: float | None = None) -> tuple[Any, ...]:
    grad, q, k, v, bias, _out, _lse, seed, _offset, p, wanted, *rest = args
    attention = Attention(q, k, v, bias, p, bool(rest and rest[0]), scale)
    dq, dk, dv, dbias = attention.backward(grad, int(seed) if p else 0)
    if bias is None or not wanted[3]:
        return dq, dk, dv, None
    shared = [dim for dim in range(4) if bias.shape[dim] == 1]
    return dq, dk, dv, dbias.sum(shared, keepdim=True) if shared else dbias


ATTENTION: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
