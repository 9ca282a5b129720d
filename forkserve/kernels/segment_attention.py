"""Segment attention: one operator for prefill, chunk, decode and tree.

Each task of a plan gives (o, lse) for its query rows over one run of KV; results of a row are
merged by log-sum-exp.  A trunk under k branches is one task: its KV is read once for the rows of
all k.  Query heads of one KV head are stacked as further query rows.
"""

from __future__ import annotations

import torch

from forkserve.kernels.merge import merge
from forkserve.kernels.plan import Plan, Task

__all__ = ["segment_attention"]

Part = tuple[torch.Tensor, torch.Tensor]

# Query rows from which heads are expanded over KV (a view of stride 0) instead of stacked (a copy
# of the queries); the products are the same.
_EXPAND_ROWS = 64


def segment_attention(q: torch.Tensor, kv: torch.Tensor, plan: Plan) -> torch.Tensor:
    """q [n, H, D] rotated, kv [2*Hk, rows, D] of one layer with fresh rows written -> [n, H*D].

    Scores are scaled by D ** -0.5.  Only rows that the plan names are read.
    """
    n, heads, dim = q.shape
    kv_heads = kv.shape[0] // 2
    q = q.view(n, kv_heads, heads // kv_heads, dim)
    tasks = plan.tasks
    whole = tasks[0].n_rows == n and isinstance(tasks[0].rows, slice)
    if whole:
        out, total = _attend(q, kv, tasks[0])
        tasks = tasks[1:]
    else:
        out = torch.empty_like(q)
        total = q.new_empty(q.shape[:3], dtype=torch.float32)
    for task in tasks:
        o, lse = _attend(q, kv, task)
        rows = task.rows
        if task.own:
            out[rows], total[rows] = o, lse
        elif task.n_rows == n and isinstance(rows, slice):
            out, total = merge(out, total, o, lse)
        else:
            out[rows], total[rows] = merge(out[rows], total[rows], o, lse)
    return out.reshape(n, heads * dim)


def _attend(q: torch.Tensor, kv: torch.Tensor, task: Task) -> Part:
    """q [n, Hk, G, D] -> o [rows, Hk, G, D], lse [rows, Hk, G] of the task's rows."""
    _, kv_heads, group, dim = q.shape
    if isinstance(task.rows, torch.Tensor):
        q = q.index_select(0, task.rows)
    elif task.n_rows != q.shape[0]:
        q = q[task.rows]
    both = kv[:, task.keys] if isinstance(task.keys, slice) else kv.index_select(1, task.keys)
    count, rows = task.groups, task.n_rows // task.groups
    if count == 1 and (task.causal or rows >= _EXPAND_ROWS):
        # [Hk, G, rows, D]: KV heads are the batch, their query heads share K and V by stride 0.
        k, v = both[:kv_heads, None], both[kv_heads:, None]
        shape = (kv_heads, group, task.n_keys, dim)
        query = q.permute(1, 2, 0, 3)
        o, lse = _flash(query, k.expand(shape), v.expand(shape), task.causal, None)
        return o.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
    # [count, Hk, rows * G, D]
    query = q.view(count, rows, kv_heads, group, dim).transpose(1, 2)
    query = query.reshape(count, kv_heads, rows * group, dim)
    both = both.unflatten(1, (count, -1)).transpose(0, 1)  # [count, 2*Hk, T, D]
    o, lse = _flash(query, both[:, :kv_heads], both[:, kv_heads:], False, task.mask)
    o = o.view(count, kv_heads, rows, group, dim).transpose(1, 2)
    lse = lse.view(count, kv_heads, rows, group).transpose(1, 2)
    return o.reshape(count * rows, kv_heads, group, dim), lse.reshape(-1, kv_heads, group)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
) -> Part:
    """torch's CPU flash attention, the only operator that also returns the lse."""
    if mask is not None and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
    return o, lse
