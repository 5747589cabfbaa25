"""What a place does to a token, on noise with the spectrum of natural images: which token is where.

The server knows the model and needs no photographs to learn how its tokens depend on their places. Noise whose
amplitude falls with the frequency as in natural images (1 / f: Field 1987, "Relations between the statistics of natural
images and the response properties of cortical cells"), of random contrast and brightness and with colours that agree
for the most part, is sent through the model. On it token i at place p is

    y = mean_p + (x - mean patch) G + rest,    G (P, D) and the covariance of the rest the same at all places,

by least squares. Where an update shows that the patches of its image lie in an affine subspace, x = r + c B, a token
has at place p the mean mean_p + (r - mean patch) G and the covariance of (c B) G plus that of the rest: fewer
directions than on all images, and so more of them tell the place. A token's distance from that mean, in standard
deviations, is its cost at the place; the patch expected there, given the token, is where a search begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.features.block_encoder import BlockEncoder
from attacks.observation import Observation
from attacks.tokenizer import Tokenizer

# Tokens that the statistics are taken from, on at least so many images; images in a forward pass.
TOKENS, LEAST_IMAGES, TOGETHER = 25_600, 64, 16
SEED = 0  # of the noise: one update, one answer
# Colour channels of the noise: what they share, and two directions in which they differ.
COLOURS = ((0.9, 0.0, 0.0), (0.85, 0.25, 0.0), (0.8, 0.2, 0.2))
# Standard deviation of an image's values, and their mean: uniform within these bounds.
CONTRAST, BRIGHTNESS = (0.1, 0.35), (0.2, 0.75)
# Added to the variances of a patch, and of what is left of a token: these shares of their means.
ROUND_OFF, FLOOR = 1e-10, 1e-4
# Directions of a patch that move a token by less than this share of the one that moves it most are left at the mean.
LEAST_MOVE = 1e-6


def noise_images(count: int, image_shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """(count, C, H, W) float32 in [0, 1]; three channels are coloured, others are alike."""
    channels, height, width = image_shape
    frequency = (torch.fft.fftfreq(height)[:, None].square() + torch.fft.fftfreq(width).square()).sqrt()
    frequency[0, 0] = 1 / max(height, width)
    colours = torch.tensor(COLOURS) if channels == len(COLOURS) else torch.ones(channels, 1)
    white = torch.randn(count, colours.shape[1], height, width, generator=generator)
    noise = torch.fft.ifft2(torch.fft.fft2(white) / frequency).real
    noise = torch.einsum("ck,nkhw->nchw", colours, noise)
    noise = noise / noise.flatten(1).std(dim=1).view(-1, 1, 1, 1)
    contrast, brightness = (
        low + (high - low) * torch.rand(count, 1, 1, 1, generator=generator) for low, high in (CONTRAST, BRIGHTNESS)
    )
    return (brightness + contrast * noise).clamp(0, 1)


def batch_sizes(count: int, together: int) -> list[int]:
    """Sizes of the batches in which `count` images are sent through a model, at most `together` at once."""
    return [min(together, count - done) for done in range(0, count, together)]


def noise_batches(count: int, together: int, image_shape: tuple[int, int, int], seed: int) -> Iterator[Tensor]:
    """`count` of `noise_images` in batches of `together`."""
    generator = torch.Generator().manual_seed(seed)
    return (noise_images(size, image_shape, generator) for size in batch_sizes(count, together))


@dataclass(frozen=True)
class PlaceLikelihood:
    """How likely a token is at a place, and which patch is expected there, for patches r + c V.

    Attributes:
        tokens: (N', D) expected token at each place, prefix tokens first.
        whitening: W, (D, D), with W W^T the inverse covariance of a token at its place.
        gain: (D, k), expected coefficients c of the patch at a place for a token's difference from `tokens` there.
        origin: r, (P,).
        directions: V, (k, P); with c of size 1 they move a token about alike.
        spread: (k,) standard deviation of c.
        complete: whether the directions are all those in which the patches may differ.
    """

    tokens: Tensor
    whitening: Tensor
    gain: Tensor
    origin: Tensor
    directions: Tensor
    spread: Tensor
    complete: bool

    def costs(self, y: Tensor) -> Tensor:
        """(N', S) squared distance of tokens y (S, D) from each place's, in standard deviations."""
        return torch.cdist(self.tokens @ self.whitening, y @ self.whitening).square()

    def coefficients(self, y: Tensor, places: Tensor) -> Tensor:
        """(S, k) expected c of tokens y (S, D) at places (S,), counted with the prefix."""
        return (y - self.tokens[places]) @ self.gain


def place_likelihood(
    encoder: BlockEncoder, observation: Observation, origin: Tensor | None, basis: Tensor | None
) -> PlaceLikelihood:
    """Learn from noise how tokens depend on patches and places.

    Args:
        encoder: in float32.
        observation: its image shape and normalisation.
        origin, basis: r (P,) and B (k, P), float64, where it is known that patches are r + c B; None for all patches.
    """
    tokenizer = encoder.tokenizer
    count, generator = max(TOKENS // tokenizer.num_patches, LEAST_IMAGES), torch.Generator().manual_seed(SEED)
    patches, tokens = [], []
    device = next(t.device for t in encoder.tensors.values())
    for _ in range(0, count, TOGETHER):
        images = noise_images(TOGETHER, observation.image_shape, generator).to(device)
        patches.append(_patches(images, observation, tokenizer))
        tokens.append(encoder(patches[-1]))
    x, y = torch.cat(patches).double(), torch.cat(tokens).double()  # (n, N, P), (n, N', D)
    prefix = y.shape[1] - x.shape[1]
    mean = x.mean(dim=(0, 1))
    x, own = (x - mean).flatten(0, 1), y[:, prefix:]
    moved = (own - own.mean(dim=0)).flatten(0, 1)
    spread = x.T @ x / len(x)  # (P, P)
    slope = torch.linalg.solve(_floored(spread, ROUND_OFF), x.T @ moved / len(x))  # G, (P, D)
    rest = own - (x @ slope).view(own.shape)
    expected = rest.mean(dim=0)  # of the mean patch
    rest = (rest - expected).flatten(0, 1)
    if basis is None:
        origin, basis = mean, torch.eye(len(mean)).to(mean)
    within = basis @ spread @ basis.T  # (k, k), covariance of c
    along = basis @ slope  # (k, D)
    covariance = along.T @ within @ along + _floored(rest.T @ rest / len(rest), FLOOR)
    inverse = torch.linalg.inv(covariance)
    root = torch.linalg.cholesky(_floored(within, ROUND_OFF))
    left, moves, right = torch.linalg.svd(root.T @ along, full_matrices=False)
    kept = moves > LEAST_MOVE * moves[0]
    directions = (left[:, kept] / moves[kept]).T @ root.T @ basis  # of which each moves a token by a unit along `right`
    gain = inverse @ right[kept].T * moves[kept].square()
    shift = (origin - mean) @ slope
    return PlaceLikelihood(
        torch.cat([y[:, :prefix].mean(dim=0), expected + shift]),
        torch.linalg.cholesky(inverse),
        gain,
        origin,
        directions,
        moves[kept],
        int(kept.sum()) == len(basis),
    )


def _patches(images: Tensor, observation: Observation, tokenizer: Tokenizer) -> Tensor:
    mean, std = (torch.tensor(v).to(images).view(1, -1, 1, 1) for v in (observation.mean, observation.std))
    return tokenizer.patchify((images - mean) / std)


def _floored(covariance: Tensor, share: float) -> Tensor:
    floor = share * covariance.diagonal().mean()
    return covariance + floor * torch.eye(len(covariance)).to(covariance)
