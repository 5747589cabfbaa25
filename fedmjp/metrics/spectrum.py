"""FFT_2D of the MJP paper: the cosine distance of two images' 2-D spectra, in its correct form and in the released one.

In MJP ("Masked Jigsaw Puzzle: A Versatile Position Embedding for Vision Transformers", Ren et al., CVPR 2023) a higher
value means more privacy. Let F and G be the spectra of reconstruction and original; sums are over all channels and
frequencies:

    fft2d           1 - Re(sum F conj(G)) / (|F| |G|)
    fft2d_official  |1 - sum F G / sqrt(sum F^2 sum G^2)|, at most 2

The second is the result of the released `eval/cal_fft2d.py`, which passes complex vectors to SciPy's `cosine`. That
function conjugates neither in the product nor in the norms (checked with SciPy 1.9.3; 1.17 refuses complex vectors).

No spectrum is computed. By Parseval sum F conj(G) = HW sum_n rec(n) orig(n), so the first is the cosine distance of the
pixels. Likewise sum F G = HW sum_n rec(n) orig(-n mod (H, W)), so the second compares the original with the
reconstruction rotated by 180 degrees. That distance can exceed 2, which is why SciPy clamps it, and it is 0 for some
images other than the original. It is provided for comparison with the paper only. Tests compare both with the
transforms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedmjp.metrics.pairs import checked_pair

NEGLIGIBLE = 1e-12


def fft2d(reconstruction: Tensor, original: Tensor) -> Tensor:
    """Cosine distance of the spectra, with the conjugate, over all channels of (B, C, H, W) images in [0, 1].

    Returns:
        (B,) float32, in [0, 1] (in [0, 2] for signed images); 0 for images equal up to a positive factor. If an image
        is black, the angle is undefined and the result is 1, or 0 if both are black.

    Raises:
        UsageError: see `pairs.checked_pair`.
    """
    rec, orig = checked_pair(reconstruction, original)
    return _distance(_inner(rec, orig).to(torch.complex128), _energy(rec, orig).to(torch.complex128), rec, orig)


def fft2d_official(reconstruction: Tensor, original: Tensor) -> Tensor:
    """The released script's value, without the conjugate, over all channels of (B, C, H, W) images in [0, 1].

    Returns:
        (B,) float32, in [0, 2]; 0 for identical images, but not only for them. If the denominator is zero (a black
        image, or an image whose bright pixels do not overlap with those of its rotated copy), the script divides
        round-off errors; here the result is 1, or 0 if the images are identical.

    Raises:
        UsageError: see `pairs.checked_pair`.
    """
    rec, orig = checked_pair(reconstruction, original)
    turned = _half_turn(orig)
    squares = _inner(rec, _half_turn(rec)) * _inner(orig, turned)
    # For signed images `squares` can be negative; the script's root is then imaginary.
    return _distance(_inner(rec, turned), squares.to(torch.complex128).sqrt(), rec, orig)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(dim=1)  # (B,)


def _half_turn(images: Tensor) -> Tensor:
    """The pixel at -n mod (H, W) for every n: a rotation by 180 degrees that keeps pixel (0, 0) in place."""
    return images.flip((-2, -1)).roll((1, 1), dims=(-2, -1))


def _energy(rec: Tensor, orig: Tensor) -> Tensor:
    return rec.flatten(1).norm(dim=1) * orig.flatten(1).norm(dim=1)  # (B,)


def _distance(product: Tensor, norm: Tensor, rec: Tensor, orig: Tensor) -> Tensor:
    # The comparison is "<=", so that a NaN in the reconstruction gives a NaN score.
    undefined = norm.abs() <= NEGLIGIBLE * _energy(rec, orig)
    same = (rec == orig).flatten(1).all(dim=1).to(norm.dtype)
    return (1 - torch.where(undefined, same, product / norm)).abs().clamp(max=2).float()
