"""The image to be expected for a feature, linear in it: learned from images that are sent through the model.

Least squares with a penalty (Hoerl and Kennard 1970) over pairs of image and feature, the penalty chosen by images that
were held out. Dosovitskiy and Brox 2016 ("Inverting visual representations with convolutional networks") learn such a
decoder as a deep network; it takes a linear one seconds to be learned for the weights of one round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# One image of so many is held out. Penalties, in mean variances of a feature's channels.
HELD_OUT, PENALTIES = 8, (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class LinearDecoder:
    """Images from features, by second moments of both.

    Attributes:
        shape: (C, H, W).
        feature, image: means, (D,) float64 and (P,) float32.
        variances, vectors: of the features' covariance, (D,) and (D, D) float64.
        cross: covariance of features along `vectors` and pixels, (D, P) float32.
        penalty: added to the variances.
        gain: dB that decoded images which were held out are nearer than the mean image, in the mean.
        examples: features of the images that were held out, (n, D) float64.
    """

    shape: tuple[int, int, int]
    feature: Tensor
    image: Tensor
    variances: Tensor
    vectors: Tensor
    cross: Tensor
    penalty: float
    gain: float
    examples: Tensor

    def __call__(self, features: Tensor, error: float = 0.0) -> Tensor:
        """Images (B, C, H, W) float32 in [0, 1] of features (B, D) with a relative error."""
        noise = error**2 * features.square().mean(dim=1, keepdim=True)
        return self._decoded(features, self.penalty + noise).view(-1, *self.shape)

    def _decoded(self, features: Tensor, penalty: Tensor | float) -> Tensor:
        weights = (features - self.feature) @ self.vectors / (self.variances + penalty)
        return (self.image + weights.float() @ self.cross).clamp(0, 1)


def learn_decoder(encode: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> LinearDecoder:
    """Learn from images, which are not kept but for those that are held out.

    Args:
        encode: images (B, C, H, W) float32 in [0, 1] -> features (B, D) float64.
        batches: of such images, in all a few times as many as a feature has channels.
    """
    held, features, sums, count = [], [], None, 0
    for batch in batches:
        found = encode(batch)
        pixels, out = batch.flatten(1), torch.arange(len(batch)) % HELD_OUT == 0
        held.append((pixels[out], found[out.to(found.device)]))
        kept, own = found[~out.to(found.device)], pixels[~out].to(found.device)
        features.append(kept)
        now = (own.sum(dim=0), kept.float().T @ own)
        sums = now if sums is None else tuple(total + part for total, part in zip(sums, now, strict=True))
        count += len(own)
        shape = tuple(batch.shape[1:])
    x = torch.cat(features)
    feature, image = x.mean(dim=0), sums[0] / count
    variances, vectors = torch.linalg.eigh(torch.cov(x.T, correction=0))
    cross = vectors.float().T @ (sums[1] / count - torch.outer(feature.float(), image))
    pixels, examples = (torch.cat(parts) for parts in zip(*held, strict=True))
    decoder = LinearDecoder(shape, feature, image, variances.clamp(min=0), vectors, cross, 0.0, 0.0, examples)
    return _with_penalty(decoder, pixels.to(image.device))


def _with_penalty(decoder: LinearDecoder, pixels: Tensor) -> LinearDecoder:
    """The decoder with the penalty that is best for the images held out, (n, P)."""
    unit = float(decoder.variances.mean())
    mean = (decoder.image - pixels).square().mean(dim=1).log10()
    gains = {}
    for share in PENALTIES:
        left = (decoder._decoded(decoder.examples, share * unit) - pixels).square().mean(dim=1).log10()
        gains[share * unit] = float(10 * (mean - left).mean())
    penalty = max(gains, key=gains.get)
    return replace(decoder, penalty=penalty, gain=gains[penalty])
