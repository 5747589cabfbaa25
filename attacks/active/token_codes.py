"""Tokens that a server has set so that a layer can pick them out by place, and read a patch back from one of them.

Where the server chooses the parameters that a client is sent, it chooses the patch projection and the position
embedding too. Of the D channels of a token,

    two hold a and -a, two a cos(theta_i) and a sin(theta_i), with an angle for each of the N places i,
    one is left for a number that the first attention writes to all tokens of an image (their code, g),
    where a trap asks for it, r hold a at the remainder of i by r, and zeros,
    the others hold the patch's coefficients in an orthonormal cosine basis, the lowest frequencies first.

A layer norm returns n = (z - mu) / sigma. The two constants give mu and sigma back, so that a token's n is worth its z,
and sums of channels with weights that add up to zero are functions of z over sigma > 0: their signs do not depend on
the image. With them a unit of a layer is switched on by the token at one place (cos(theta_i - theta_t) = 1 for t = i
alone), and by images with a code above a threshold.

Tokens with codes stand in Fowl et al. 2023, "Decepticons: Corrupted Transformers Breach Privacy in Federated Learning
for Language Models" (section 3: positions from the embedding, a code of the sentence from the attention), and, for
image patches and adapters, in Sami et al. 2025, "Gradient Inversion Attacks on Parameter-Efficient Fine-Tuning"
(PEFTLeak). The two angles and the constants that undo the norm are ours: they need no calibration and no image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# a. Coefficients of a patch are at most 2 to 3 in these units, so that sigma depends little on the image.
AMPLITUDE = 4.0
PLUS, MINUS, COSINE, SINE, CODE = range(5)
CODES = 5  # channels that hold no coefficient of the patch
# Factors of a unit's weights: steep enough that it is on or off, for thresholds that lie this far from the tokens.
STEEPNESS = 1e4
# Norm of the weights that the units write by: they change the tokens by less than the digits that float32 has.
WRITTEN = 1e-10
# `TokenCodes.spread` above which a token is that of several images.
MIXED = 1e-3
# Rms of the coefficients that a token lacks, over that of the last quarter of those that it holds. Of 16,000 patches of
# 16 by 16 pixels (160 ImageNet photographs of 160 pixels) 454 lie below 25 dB without what 192 channels lack: by this
# factor 11,498 are vouched for, and none of those 454. With 384 channels none lies below.
LACKING = 0.7


@dataclass(frozen=True)
class TokenCodes:
    """What the tokens of a model are set to.

    Attributes:
        tokenizer: of the model.
        remainders: r, or 0.
    """

    tokenizer: Tokenizer
    remainders: int = 0

    @property
    def first(self) -> int:
        """The channel of the first coefficient."""
        return CODES + self.remainders

    @property
    def coefficients(self) -> int:
        """Coefficients of a patch that a token holds; P where there are channels enough."""
        return min(self.tokenizer.patch_dim, self.tokenizer.width - self.first)

    @cached_property
    def basis(self) -> Tensor:
        """(coefficients, P) float64, orthonormal rows, the mean of all pixels first."""
        size, channels = self.tokenizer.patch_size, self.tokenizer.channels
        waves, colours = cosine_basis(size), cosine_basis(channels)  # the first colour is the grey one
        rows = torch.einsum("ca,iy,jx->cijayx", colours, waves, waves).reshape(-1, channels * size * size)
        colour, row, column = (torch.arange(n, dtype=torch.float64) for n in (channels, size, size))
        # Colours are coarser than grey in photographs: a colour's frequency counts twice.
        order = (row[:, None] + column)[None] * (1 + (colour > 0)[:, None, None].double())
        order = order + 0.5 * (colour > 0)[:, None, None]
        return rows[torch.argsort(order.flatten(), stable=True)[: self.coefficients]]

    @property
    def scale(self) -> float:
        """Of the coefficients in a token: a patch of one colour of normalised value 1 has the first one 1."""
        return self.tokenizer.patch_dim**-0.5

    def angles(self) -> Tensor:
        """(N,) float64."""
        places = torch.arange(self.tokenizer.num_patches, dtype=torch.float64)
        return 2 * math.pi * places / self.tokenizer.num_patches

    def parameters(self, model: nn.Module) -> dict[str, Tensor]:
        """Patch projection, positions, prefix tokens and what hidden positions share, by name."""
        own, t = dict(model.named_parameters()), self.tokenizer
        weight = torch.zeros(t.width, t.patch_dim, dtype=torch.float64)
        weight[self.first : self.first + self.coefficients] = self.scale * self.basis
        constants = torch.zeros(t.width, dtype=torch.float64)
        constants[PLUS], constants[MINUS] = AMPLITUDE, -AMPLITUDE
        rows = constants.repeat(t.num_patches, 1)
        rows[:, COSINE], rows[:, SINE] = AMPLITUDE * self.angles().cos(), AMPLITUDE * self.angles().sin()
        prefix = constants.clone()
        if self.remainders:
            places = torch.arange(t.num_patches)
            rows[places, CODES + places % self.remainders] = AMPLITUDE
            prefix[CODES] = AMPLITUDE
        table = t.replace_patch_rows(torch.zeros_like(own[t.positions]), rows)
        table.reshape(-1, t.width)[: t.prefix] = prefix.to(table)
        found = {t.weight: weight.reshape(own[t.weight].shape), t.positions: table}
        if t.bias is not None:
            found[t.bias] = torch.zeros(t.width)
        if t.shared_position is not None:  # no unit is switched on by a hidden place
            found[t.shared_position] = constants.reshape(own[t.shared_position].shape)
        return found | {name: torch.zeros_like(own[name]) for name in t.prefix_tokens}

    def at_places(self, places: Tensor) -> Tensor:
        """Weights w (n, D) float64 of units: w n = a (cos(theta_i - theta_t) - 1) / sigma for the token at place t.

        Args:
            places: (n,) int64, i.
        """
        rows = torch.zeros(len(places), self.tokenizer.width, dtype=torch.float64)
        angle = self.angles()[places]
        rows[:, COSINE], rows[:, SINE] = angle.cos(), angle.sin()
        return self.balanced(rows, -torch.ones(len(places), dtype=torch.float64))

    def balanced(self, rows: Tensor, constant: Tensor) -> Tensor:
        """Rows (n, D) with weights on the two constants, so that they add up to zero and `constant` a is added."""
        rest = -rows.sum(dim=1) / 2
        rows = rows.clone()
        rows[:, PLUS], rows[:, MINUS] = rest + constant / 2, rest - constant / 2
        return rows

    @property
    def gap(self) -> float:
        """1 - cos of the angle between places that follow each other."""
        return 1 - math.cos(2 * math.pi / self.tokenizer.num_patches)

    def readable(self, normed: Tensor) -> Tensor:
        """(n,) bool, whether tokens (n, D) show the norm's deviation; of a rounded message they may not."""
        return normed[:, PLUS] > normed[:, MINUS]

    def patches(self, normed: Tensor) -> Tensor:
        """Patches (n, P) float64, normalised pixels, of `readable` tokens (n, D) float64 after the norm."""
        content = self._before_norm(normed)[:, self.first : self.first + self.coefficients]
        return content / self.scale @ self.basis.to(content)

    def holds(self, patches: Tensor, std: tuple[float, ...]) -> Tensor:
        """(n,) bool, whether the coefficients that tokens lack are expected to be too small to matter in `patches`.

        Args:
            patches: (n, P) float64, as `patches` gives them.
            std: of the normalisation.
        """
        lacking = (self.tokenizer.patch_dim - self.coefficients) / self.tokenizer.patch_dim
        last = patches @ self.basis[-(self.coefficients // 4) :].to(patches).T
        return max(std) * LACKING * (last.square().mean(dim=1) * lacking).sqrt() < VOUCHED_DEVIATION

    def misses(self, normed: Tensor, places: Tensor) -> Tensor:
        """What tokens miss the angles of their places by, cosine and sine, (n, 2) float64: as errors of normalised
        pixels, where all coefficients of a patch are off by as much.

        Args:
            normed: (n, D) float64, `readable` tokens after the norm.
            places: (n,) int64, i.
        """
        angle = self.angles().to(normed.device)[places]
        known = AMPLITUDE * torch.stack([angle.cos(), angle.sin()], dim=1)
        return (self._before_norm(normed)[:, [COSINE, SINE]] - known) * self.coefficients**0.5

    def _before_norm(self, normed: Tensor) -> Tensor:
        """The tokens (n, D) of which the norm made `normed`."""
        sigma = 2 * AMPLITUDE / (normed[:, PLUS] - normed[:, MINUS])
        mu = AMPLITUDE - sigma * normed[:, PLUS]
        return normed * sigma[:, None] + mu[:, None]

    def spread(self, normed: Tensor) -> Tensor:
        """(n,) by how much the mean square of a normed token is below 1: 0 for one token, else the variance of several.

        In units of the coefficients of a patch: their mean square deviation in a pixel's normalised value.
        """
        sigma = 2 * AMPLITUDE / (normed[:, PLUS] - normed[:, MINUS])
        lost = (1 - normed.square().mean(dim=1)) * self.tokenizer.width * sigma.square()
        return lost / (self.scale**2 * self.tokenizer.patch_dim)


def cosine_basis(size: int) -> Tensor:
    """The orthonormal discrete cosine basis, (size, size) float64, a frequency a row, the constant one first."""
    grid = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / size * (grid + 0.5) * grid[:, None])
    return rows / rows.norm(dim=1, keepdim=True)


def codes_for(model: nn.Module, image_shape: tuple[int, int, int], remainders: int = 0) -> TokenCodes:
    """The codes of a model.

    Args:
        remainders: see `TokenCodes`.

    Raises:
        UsageError: it has no learnable position embedding with a row a patch, or too few channels.
    """
    tokenizer = find_tokenizer(model, image_shape)
    if tokenizer.positions is None or tokenizer.shared_row is not None:
        raise UsageError(f"{type(model).__name__} has no learnable position embedding with one row a patch to be set")
    if tokenizer.width <= 2 * (CODES + remainders):
        raise UsageError(f"tokens of {tokenizer.width} channels are too narrow to hold codes and a patch")
    return TokenCodes(tokenizer, remainders)


def is_coded(model: nn.Module, codes: TokenCodes) -> bool:
    """Whether the tokens of the model that a client was sent are set so."""
    sent = dict(model.named_parameters())[codes.tokenizer.weight]
    expected = codes.parameters(model)[codes.tokenizer.weight]
    return torch.allclose(sent.detach().double().cpu(), expected, atol=1e-6)
