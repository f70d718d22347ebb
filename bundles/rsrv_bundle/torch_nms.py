"""Non-maximum suppression with a fixed number of results, for PyTorch modules that are exported."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, count: int) -> torch.Tensor:
    """Return the indices of at most `count` boxes that overlap no box with a higher score, and -1 after the last index.

    boxes: [..., n, 4] as x1, y1, x2, y2.
    scores: [..., n]. A score of -infinity excludes its box.

    The result is [..., count], in int64. A compiled model cannot return a variable number of indices, as torchvision's
    nms does.
    """
    kept_boxes: torch.Tensor = torch.ops.rsrv.nms(boxes, scores, iou_threshold, count)
    return kept_boxes


@torch.library.custom_op("rsrv::nms", mutates_args=())
def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, count: int) -> torch.Tensor:
    areas = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    left = scores.clone()
    selected = []
    for _ in range(count):
        best = left.argmax(-1, keepdim=True)
        selected.append(torch.where(left.gather(-1, best) > -torch.inf, best, -1))
        corners = boxes.take_along_dim(best[..., None], -2)
        low, high = torch.maximum(boxes, corners)[..., :2], torch.minimum(boxes, corners)[..., 2:]
        common = (high - low).clamp(min=0).prod(-1)
        overlap = common / (areas + areas.gather(-1, best) - common)
        left = left.masked_fill(overlap > iou_threshold, -torch.inf).scatter(-1, best, -torch.inf)
    return torch.cat(selected, -1)


@_nms.register_fake
def _(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, count: int) -> torch.Tensor:
    return scores.new_empty((*scores.shape[:-1], count), dtype=torch.int64)


def lowered_nms(boxes: Any, scores: Any, iou_threshold: float, count: int) -> Any:
    """Compute `nms` with JAX."""
    import jax
    import jax.numpy as jnp

    rows = jax.vmap(partial(_row, iou_threshold=iou_threshold, count=count))
    selected = rows(boxes.reshape(-1, *boxes.shape[-2:]), scores.reshape(-1, scores.shape[-1]))
    return selected.reshape(*scores.shape[:-1], count).astype(jnp.int64)


def _row(boxes: Any, scores: Any, iou_threshold: float, count: int) -> Any:
    import jax
    import jax.numpy as jnp

    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])

    def step(left: Any, _: Any) -> tuple[Any, Any]:
        best = jnp.argmax(left)
        low = jnp.maximum(boxes[:, :2], boxes[best, :2])
        high = jnp.minimum(boxes[:, 2:], boxes[best, 2:])
        common = jnp.maximum(high - low, 0).prod(-1)
        overlap = common / (areas + areas[best] - common)
        after = jnp.where(overlap > iou_threshold, -jnp.inf, left).at[best].set(-jnp.inf)
        return after, jnp.where(left[best] > -jnp.inf, best, -1)

    return jax.lax.scan(step, scores, length=count)[1]
