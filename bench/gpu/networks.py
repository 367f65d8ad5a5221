"""The networks, with random weights: ResNet-50, a small MLP, an encoder and a decoder of texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 30_522


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.convolutions = nn.Sequential(
            *_convolution(inside, width, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outside, 1, 1),
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inside, outside, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.convolutions(x) + self.shortcut(x))


def _convolution(inside: int, outside: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outside)


class ResNet50(nn.Module):
    """Images of bytes, (n, 3, side, side), to 1,000 numbers each (He et al., arXiv 1512.03385)."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        layers: list[nn.Module] = []
        inside = 64
        for at, count in enumerate(blocks):
            width = 64 << at
            for i in range(count):
                layers.append(Bottleneck(inside, width, 2 if at and not i else 1))
                inside = 4 * width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inside, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(self.head.weight.dtype).sub_(127.5).div_(64)
        x = self.layers(self.stem(x.contiguous(memory_format=torch.channels_last)))
        return self.head(x.mean((2, 3)))


class MLP(nn.Module):
    """Rows of 512 numbers to 16: kernels of some 50 µs for a batch of 64 on a large card."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(512, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 16),
        )  # fmt: skip

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows.to(self.layers[0].weight.dtype))


class Layer(nn.Module):
    """One layer of a transformer; with a cache it is one of a decoder (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        n, length, width = x.shape
        query, key, value = self.three(self.first(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            keys, values, rows, at = cache
            keys[rows, :, at], values[rows, :, at] = key[:, :, 0], value[:, :, 0]
            key, value = keys, values
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Encoder(nn.Module):
    """Texts of token ids, (n, longest) with -1 behind their ends, to their mean vectors (n, width).

    MiniLM has 6 layers of width 384, BERT-base 12 of 768 (arXiv 2002.10957 and 1810.04805).
    """

    def __init__(self, layers: int, width: int, longest: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, 12) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        there = ids >= 0
        x = self.tokens(ids.clamp(min=0).long()) + self.places.weight[: ids.shape[1]]
        mask = there[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        weights = there[:, :, None].to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1)


class Decoder(nn.Module):
    """One token a row in each step, over a cache of a fixed shape; about 110 million weights.

    All rows are computed in each step, whether they are taken or not: shapes never change.
    """

    def __init__(self, rows: int, layers: int = 12, width: int = 768, longest: int = 256) -> None:
        super().__init__()
        self.rows, self.longest = rows, longest
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, 12) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        shape = (layers, 2, rows, 12, longest, width // 12)
        self.register_buffer("cache", torch.zeros(shape), persistent=False)
        self.register_buffer("row", torch.arange(rows), persistent=False)
        self.register_buffer("place", torch.arange(longest), persistent=False)

    def forward(self, last: Tensor, at: Tensor) -> Tensor:
        """Return the next token of each row.

        Args:
            last: The last token of each row, shape (rows,).
            at: The place of that token in its row, shape (rows,).
        """
        x = (self.tokens(last) + self.places(at))[:, None]
        mask = (self.place <= at[:, None])[:, None, None, :]
        for layer, cache in zip(self.layers, self.cache, strict=True):
            x = layer(x, mask, (cache[0], cache[1], self.row, at))
        return (self.norm(x[:, 0]) @ self.tokens.weight.T).argmax(-1)
