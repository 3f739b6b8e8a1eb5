"""What a draft distribution q is asked to be, given the target's p, and its gradient.

::

    kl         -sum_v p_v log q_v                              (KL(p | q) but for a constant)
    lk_alpha   -log a,               a = sum_v min(p_v, q_v)
    lk_lambda  w kl + (1 - w)(1 - a),  w = exp(-3 a), no gradient through w

``a`` is the probability that speculative sampling accepts a draft of q, 1 - a the total variation
distance; p and q are over the draft vocabulary. Source of both LK losses: arXiv 2602.23881.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle2_kernels.models.heads import EagleHead

__all__ = ["LOSSES", "own_head_loss", "row_loss", "shared_head_loss"]

LOSSES = ("kl", "lk_alpha", "lk_lambda")

# lk_lambda: how fast acceptance takes weight from the cross-entropy (the paper's best).
_DECAY = 3.0


def row_loss(p: Tensor, logp: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Loss of each row and its gradient by the logits behind ``logp`` = log q.

    p, logp [R, V] float32 (logp is overwritten) -> [R] and [R, V].
    """
    entropy = -torch.linalg.vecdot(p, logp) if loss != "lk_alpha" else None
    q = logp.exp_()
    if loss == "kl":
        return entropy, q.sub_(p)
    # Two distributions that share no token leave a finite loss.
    accept = torch.minimum(p, q).sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    # Raising q_v below p_v is what raises a; the softmax takes the mean off.
    below = (q < p).to(q.dtype)
    gain = q * (below - (q * below).sum(-1, keepdim=True))
    if loss == "lk_alpha":
        return -accept.log(), gain.div_(-accept[:, None])
    w = torch.exp(-_DECAY * accept)
    gradient = q.sub_(p).mul_(w[:, None]).sub_(gain.mul_(1 - w[:, None]))
    return w * entropy + (1 - w) * (1 - accept), gradient


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, loss: str) -> Tensor:
        rows, gradient = row_loss(p, torch.log_softmax(logits.float(), dim=-1), loss)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return rows

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_rows[:, None].to(gradient.dtype), None, None


class _SharedHeadLoss(torch.autograd.Function):
    """Loss and gradient in one pass over chunks of rows: no [rows, Vd] tensor outlives a chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, features: Tensor, weight: Tensor, loss: str, chunk: int
    ) -> Tensor:
        levels, rows = hidden.shape[:2]
        grad = torch.empty_like(hidden)
        losses = torch.zeros(levels, dtype=torch.float32, device=hidden.device)
        low = hidden.to(weight.dtype)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            p = torch.softmax((features[part].to(weight.dtype) @ weight.T).float(), dim=-1)
            for level in range(levels):
                logp = torch.log_softmax((low[level, part] @ weight.T).float(), dim=-1)
                value, by_logits = row_loss(p, logp, loss)
                losses[level] += value.sum()
                grad[level, part] = (by_logits.to(weight.dtype) @ weight).to(grad.dtype)
        ctx.save_for_backward(grad)
        ctx.rows = rows
        return losses / rows

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        scale = (grad_losses / ctx.rows)[:, None, None].to(grad.dtype)
        return grad * scale, None, None, None, None


def shared_head_loss(
    hidden: Tensor, features: Tensor, weight: Tensor, loss: str = "kl", chunk: int = 64
) -> Tensor:
    """Mean loss of each level, q_s = softmax(W g_s) against p = softmax(W f).

    hidden [S, R, H] (what the head predicts, S levels), features [R, H] (what the target has),
    weight [Vd, H] (lm_head rows, frozen) -> [S] float32; differentiable in `hidden` only.
    """
    return _SharedHeadLoss.apply(hidden, features, weight, loss, chunk)


def own_head_loss(
    head: EagleHead,
    hidden: Tensor,
    features: Tensor,
    weight: Tensor,
    loss: str = "kl",
    chunk: int = 256,
) -> Tensor:
    """`shared_head_loss` with the head's own logits of g_s in place of W g_s.

    Differentiable in the head's norm and lm_head too. Logits live a chunk of rows at a time and are
    computed again for the gradient.
    """

    def part(g: Tensor, f: Tensor) -> Tensor:
        p = torch.softmax((f.to(weight.dtype) @ weight.T).float(), dim=-1)
        return _RowLoss.apply(head.logits(g), p, loss).sum()

    losses = []
    for level in hidden:
        pairs = zip(level.split(chunk), features.split(chunk), strict=True)
        parts = [checkpoint(part, g, f, use_reentrant=False) for g, f in pairs]
        losses.append(torch.stack(parts).sum() / len(features))
    return torch.stack(losses)
