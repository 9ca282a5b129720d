"""Segment attention: one operator for prefill, chunk, decode and tree.

Each task of a plan gives (o, lse) for its query rows over one run of KV; results of a row are
merged by log-sum-exp.  A trunk under k branches is one task: its KV is read once for the rows of
all k.  Query heads of one KV head are stacked as further query rows.

On a GPU the same operator is a Triton kernel: `forkserve.kernels.tile_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forkserve.kernels.merge import merge
from forkserve.kernels.plan import Plan, Task

__all__ = ["segment_attention"]

Part = tuple[torch.Tensor, torch.Tensor]

# Query rows from which heads are expanded over KV (a view of stride 0) instead of stacked (a copy
# of the queries); the products are the same.
_EXPAND_ROWS = 64
_CAPPED_ROWS = 128  # query rows whose scores are held at a time where they are soft-capped


@dataclass(frozen=True, slots=True)
class _Score:
    """How a layer scores a key, and attention by those scores."""

    scale: float
    softcap: float

    def flash(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
    ) -> Part:
        """q [B, H, n, D], k and v [B, H, T, D] -> o like q, lse [B, H, n]."""
        if self.softcap:
            return self._capped(q, k, v, causal, mask)
        if mask is not None and mask.dtype != q.dtype:
            mask = mask.to(q.dtype)
        # torch's CPU flash attention, the only operator that also returns the lse.
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=self.scale
        )
        return o, lse

    def _capped(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
    ) -> Part:
        """The same by plain products in float32, which a soft cap needs; a few rows at a time."""
        outs, lses = [], []
        keys, values = k.float().transpose(-1, -2), v.float()
        for low in range(0, q.shape[-2], _CAPPED_ROWS):
            part = q[..., low : low + _CAPPED_ROWS, :].float()
            rows = part.shape[-2]
            scores = (part @ keys).mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
            if causal:
                hidden = torch.ones(rows, k.shape[-2], dtype=torch.bool).triu_(low + 1)
                scores.masked_fill_(hidden, float("-inf"))
            if mask is not None:
                scores += mask[..., low : low + rows, :] if mask.shape[-2] > 1 else mask
            lse = scores.logsumexp(-1)
            outs.append((scores.sub_(lse.unsqueeze(-1)).exp_() @ values).to(q.dtype))
            lses.append(lse)
        return torch.cat(outs, -2), torch.cat(lses, -1)


def segment_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: Plan,
    window: int = 0,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [n, H, D] rotated, kv [2*Hk, rows, D] of one layer with fresh rows written -> [n, H*D].

    window: the layer's, one of those the plan was made for.  scale: of the scores, by default
    D ** -0.5.  softcap: scaled scores s become softcap * tanh(s / softcap); 0 leaves them.  Only
    rows that the plan names are read.
    """
    n, heads, dim = q.shape
    kv_heads = kv.shape[0] // 2
    q = q.view(n, kv_heads, heads // kv_heads, dim)
    score = _Score(dim**-0.5 if scale is None else scale, softcap)
    tasks = plan.of(window)
    whole = tasks[0].n_rows == n and isinstance(tasks[0].rows, slice)
    if whole:
        out, total = _attend(q, kv, tasks[0], score)
        tasks = tasks[1:]
    else:
        out = torch.empty_like(q)
        total = q.new_empty(q.shape[:3], dtype=torch.float32)
    for task in tasks:
        o, lse = _attend(q, kv, task, score)
        rows = task.rows
        if task.own:
            out[rows], total[rows] = o, lse
        elif task.n_rows == n and isinstance(rows, slice):
            out, total = merge(out, total, o, lse)
        else:
            out[rows], total[rows] = merge(out[rows], total[rows], o, lse)
    return out.reshape(n, heads * dim)


def _attend(q: torch.Tensor, kv: torch.Tensor, task: Task, score: _Score) -> Part:
    """q [n, Hk, G, D] -> o [rows, Hk, G, D], lse [rows, Hk, G] of the task's rows."""
    _, kv_heads, group, dim = q.shape
    if isinstance(task.rows, torch.Tensor):
        q = q.index_select(0, task.rows)
    elif task.n_rows != q.shape[0]:
        q = q[task.rows]
    both = kv[:, task.keys] if isinstance(task.keys, slice) else kv.index_select(1, task.keys)
    count, rows = task.groups, task.n_rows // task.groups
    band = task.mask is not None and task.mask.shape[2] > 1
    if count == 1 and (task.causal or band or rows >= _EXPAND_ROWS):
        # [Hk, G, rows, D]: KV heads are the batch, their query heads share K and V by stride 0.
        k, v = both[:kv_heads, None], both[kv_heads:, None]
        shape = (kv_heads, group, task.n_keys, dim)
        query = q.permute(1, 2, 0, 3)
        mask = task.mask if band else None
        o, lse = score.flash(query, k.expand(shape), v.expand(shape), task.causal, mask)
        return o.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
    # [count, Hk, rows * G, D]
    query = q.view(count, rows, kv_heads, group, dim).transpose(1, 2)
    query = query.reshape(count, kv_heads, rows * group, dim)
    both = both.unflatten(1, (count, -1)).transpose(0, 1)  # [count, 2*Hk, T, D]
    o, lse = score.flash(query, both[:, :kv_heads], both[:, kv_heads:], False, task.mask)
    o = o.view(count, kv_heads, rows, group, dim).transpose(1, 2)
    lse = lse.view(count, kv_heads, rows, group).transpose(1, 2)
    return o.reshape(count * rows, kv_heads, group, dim), lse.reshape(-1, kv_heads, group)
