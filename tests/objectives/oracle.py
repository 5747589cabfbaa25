"""A slow Vision Transformer in NumPy's float64: one image, token and head at a time, attention by lists of keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

Array = np.ndarray


def _w(parameter: Tensor) -> Array:
    return parameter.detach().double().numpy()


def linear(layer: nn.Linear, x: Array) -> Array:
    return _w(layer.weight) @ x + _w(layer.bias)


def norm(layer: nn.LayerNorm, x: Array) -> Array:
    return (x - x.mean()) / math.sqrt(x.var() + layer.eps) * _w(layer.weight) + _w(layer.bias)


def gelu(x: Array) -> Array:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def attend(layer: nn.Module, tokens: list[Array], keys: Sequence[int], bias: Array | None = None) -> list[Array]:
    """Each token attends to those whose number is in `keys`; `bias` (heads, T, T) is added to the scores."""
    width, heads = len(tokens[0]), layer.num_heads
    size = width // heads
    triples = [linear(layer.qkv, t) for t in tokens]
    found = []
    for i, own in enumerate(triples):
        mixed = []
        for h in range(heads):
            cut = slice(h * size, (h + 1) * size)
            scores = [own[:width][cut] @ triples[j][width : 2 * width][cut] / math.sqrt(size) for j in keys]
            if bias is not None:
                scores = [s + bias[h, i, j] for s, j in zip(scores, keys, strict=True)]
            weights = softmax(np.array(scores))
            mixed.append(sum(w * triples[j][2 * width :][cut] for w, j in zip(weights, keys, strict=True)))
        found.append(linear(layer.proj, np.concatenate(mixed)))
    return found


def block(layer: nn.Module, tokens: list[Array], keys: Sequence[int], bias: Array | None = None) -> list[Array]:
    mixed = attend(layer.attn, [norm(layer.norm1, t) for t in tokens], keys, bias)
    tokens = [t + m for t, m in zip(tokens, mixed, strict=True)]
    hidden = [gelu(linear(layer.mlp.fc1, norm(layer.norm2, t))) for t in tokens]
    return [t + linear(layer.mlp.fc2, h) for t, h in zip(tokens, hidden, strict=True)]


def patches_of(module: nn.Module, image: Tensor) -> list[Array]:
    """Embedded patches in raster order."""
    side = module.patch_embed.patch_size[0]
    weight, bias = _w(module.patch_embed.proj.weight), _w(module.patch_embed.proj.bias)
    pixels, found = image.double().numpy(), []
    for top in range(0, pixels.shape[1], side):
        for left in range(0, pixels.shape[2], side):
            patch = pixels[:, top : top + side, left : left + side]
            found.append(np.array([(w * patch).sum() for w in weight]) + bias)
    return found


def encode(module: nn.Module, tokens: list[Array], keys: Sequence[int] | None = None) -> list[Array]:
    keys = range(len(tokens)) if keys is None else keys
    for number, layer in enumerate(module.blocks):
        bias = None if module.relative is None else relative_bias(module.relative[number], module.patch_embed.grid_size)
        tokens = block(layer, tokens, keys, bias)
    return [norm(module.norm, t) for t in tokens]


def relative_bias(layer: nn.Module, grid: tuple[int, int]) -> Array:
    """(heads, 1 + N, 1 + N) by offset: the table counts from the most negative offset and ends with three for [CLS]."""
    table, (rows, columns) = _w(layer.relative_position_bias_table), grid
    offsets, count = (2 * rows - 1) * (2 * columns - 1), rows * columns
    bias = np.zeros((table.shape[1], count + 1, count + 1))
    bias[:, 0, :], bias[:, :, 0] = table[offsets][:, None], table[offsets + 1][:, None]
    bias[:, 0, 0] = table[offsets + 2]
    for i in range(count):
        for j in range(count):
            down, right = i // columns - j // columns + rows - 1, i % columns - j % columns + columns - 1
            bias[:, i + 1, j + 1] = table[down * (2 * columns - 1) + right]
    return bias


def sincos(grid: tuple[int, int], width: int) -> list[Array]:
    """For each patch: sines of row and column angles, then their cosines (timm's order of MAE's embedding)."""
    quarter, found = width // 4, []
    bands = [1 / 10000 ** (k / quarter) for k in range(quarter)]
    for i in range(grid[0]):
        for j in range(grid[1]):
            angles = [(i * b, j * b) for b in bands]
            rows, columns = [a for a, _ in angles], [b for _, b in angles]
            order = [math.sin(a) for a in rows] + [math.sin(b) for b in columns]
            found.append(np.array(order + [math.cos(a) for a in rows] + [math.cos(b) for b in columns]))
    return found


def smoothed(grid: tuple[int, int], sigma: float) -> Array:
    """Rows of targets, cell by cell."""
    places = [(i, j) for i in range(grid[0]) for j in range(grid[1])]
    map_ = np.zeros((len(places), len(places)))
    for a, (i, j) in enumerate(places):
        for b, (k, m) in enumerate(places):
            distance = (i - k) ** 2 + (j - m) ** 2
            map_[a, b] = float(a == b) if sigma == 0 else math.exp(-distance / sigma**2)
        map_[a] /= map_[a].sum()
    return map_


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))
