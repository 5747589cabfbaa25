"""FFT_2D of the MJP paper: the cosine distance of two images' 2-D spectra, as it should be and as its script has it.

MJP ("Masked Jigsaw Puzzle: A Versatile Position Embedding for Vision Transformers", Ren et al., CVPR 2023) marks
higher as more private. With F, G the spectra of reconstruction and original, sums over all channels and frequencies:

    fft2d           1 - Re(sum F conj(G)) / (|F| |G|)
    fft2d_official  |1 - sum F G / sqrt(sum F^2 sum G^2)|, at most 2

The second is what the released `eval/cal_fft2d.py` gets by handing complex vectors to SciPy's `cosine`, which
conjugates nothing, neither in the product nor in the norms (checked with SciPy 1.9.3; 1.17 refuses complex vectors).

By Parseval the first is the cosine distance of the pixels. The second compares the original with the reconstruction
turned by 180 degrees: sum F G = HW sum_n rec(n) orig(-n mod (H, W)), and likewise the two sums of squares. Nothing
keeps it below 2, hence SciPy's clamp, and images other than the original reach 0. It serves comparison with the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedmjp.metrics.pairs import checked_pair

NEGLIGIBLE = 1e-12


def fft2d(reconstruction: Tensor, original: Tensor) -> Tensor:
    """Cosine distance of the spectra, with the conjugate, over all channels of (B, C, H, W) images in [0, 1].

    Returns:
        (B,), in [0, 1] (in [0, 2] for signed images); 0 for images equal up to a positive factor. Where an image is
        black the angle is undefined: 1, or 0 if both are.
    """
    f, g = _spectra(reconstruction, original)
    product = (f * g.conj()).sum(dim=1).real
    return _distance(product, _energy(f, g), f, g).float()


def fft2d_official(reconstruction: Tensor, original: Tensor) -> Tensor:
    """The released script's figure, without the conjugate, over all channels of (B, C, H, W) images in [0, 1].

    Returns:
        (B,), in [0, 2]; 0 for identical images, but not only for them. Where the denominator vanishes (a black image,
        or bright pixels that never meet under the half turn) the script divides rounding errors: here 1, or 0 if the
        images are identical.
    """
    f, g = _spectra(reconstruction, original)
    norm = torch.sqrt((f * f).sum(dim=1) * (g * g).sum(dim=1))
    return _distance((f * g).sum(dim=1), norm, f, g).float()


def _spectra(reconstruction: Tensor, original: Tensor) -> tuple[Tensor, Tensor]:
    rec, orig = checked_pair(reconstruction, original)
    return torch.fft.fft2(rec).flatten(1), torch.fft.fft2(orig).flatten(1)  # (B, C H W) each


def _energy(f: Tensor, g: Tensor) -> Tensor:
    return torch.linalg.vector_norm(f, dim=1) * torch.linalg.vector_norm(g, dim=1)  # (B,)


def _distance(product: Tensor, norm: Tensor, f: Tensor, g: Tensor) -> Tensor:
    # Compared as "<=", so that a NaN in the reconstruction stays a NaN in the score.
    undefined = norm.abs() <= NEGLIGIBLE * _energy(f, g)
    same = (f == g).all(dim=1).to(product.dtype)
    return (1 - torch.where(undefined, same, product / norm)).abs().clamp(max=2)
