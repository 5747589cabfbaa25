"""FFT_2D of the MJP paper: how far apart the two Fourier spectra of an image and its reconstruction point.

The paper calls it a cosine similarity and marks higher as more private, so it is the cosine *distance* 1 - cos. Its released
script takes that distance of the flattened spectra of all channels, but multiplies them without the complex conjugate; both
readings are here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedmjp.metrics.pixel import check_pair


def fft2d(reconstruction: Tensor, original: Tensor) -> Tensor:
    """1 - Re<F, G> / (|F| |G|) over all channels of (B, C, H, W) images; (B,), in [0, 2].

    By Parseval's identity this is the cosine distance of the pixels themselves.
    """
    check_pair(reconstruction, original)
    f, g = (torch.fft.fft2(x.double()).flatten(1) for x in (reconstruction, original))
    product = (f * g.conj()).real.sum(dim=1)
    return (1 - product / _norms(f, g)).to(original.dtype)


def fft2d_official(reconstruction: Tensor, original: Tensor) -> Tensor:
    """The released script's figure: |1 - sum F G / (|F| |G|)|, without the conjugate; (B,), in [0, 2].

    Not zero for identical images: F F differs from |F|^2 wherever the image is not symmetric about its centre.
    """
    check_pair(reconstruction, original)
    f, g = (torch.fft.fft2(x.double()).flatten(1) for x in (reconstruction, original))
    return (1 - (f * g).sum(dim=1) / _norms(f, g)).abs().to(original.dtype)


def _norms(f: Tensor, g: Tensor) -> Tensor:
    return (f.abs().square().sum(dim=1) * g.abs().square().sum(dim=1)).sqrt().clamp(min=1e-30)
