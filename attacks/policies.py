"""Transformation policies of ATS (Gao et al., CVPR 2021) by number, as their paper writes them. Imports no torch.

3-1-7 applies transformations 3, 1 and 7 of the released code's library of 50, numbered from 0, and 3-1-7+43-18-18 draws
one of two policies for each image.
"""

from __future__ import annotations

from attacks.registry import UsageError

PUBLISHED = "3-1-7+43-18-18"  # released code, CIFAR-100 and ResNet20

# The 25 pairs of AutoAugment's policy for CIFAR-10 in a row, with some levels changed.
_LIBRARY = """
invert 7, contrast 6, rotate 2, translate_x 9, sharpness 1, sharpness 3, shear_y 2, translate_y 2, autocontrast 5,
equalize 2, shear_y 5, posterize 5, color 3, brightness 5, sharpness 9, brightness 9, equalize 5, equalize 1,
contrast 7, sharpness 5, color 5, translate_x 5, equalize 7, autocontrast 8, translate_y 3, sharpness 6, brightness 6,
color 8, solarize 0, invert 0, equalize 0, autocontrast 0, equalize 8, equalize 4, color 5, equalize 5, autocontrast 4,
solarize 4, brightness 3, color 0, solarize 1, autocontrast 0, translate_y 3, translate_y 3, autocontrast 1,
solarize 1, equalize 5, invert 0, translate_y 3, autocontrast 1
"""
# (operation, level) by number.
LIBRARY = tuple((name, int(level)) for name, level in (entry.split() for entry in _LIBRARY.split(",")))


def read_policies(text: str) -> list[list[tuple[str, int]]]:
    """The policies that `text` names, such as 3-1-7+43-18-18, as (operation, level) in order.

    Raises:
        UsageError: another form, or a number that is not in the library.
    """
    try:
        return [[LIBRARY[int(number)] for number in policy.split("-")] for policy in text.split("+")]
    except (ValueError, IndexError) as error:
        raise UsageError(
            f"a policy is numbers from 0 to {len(LIBRARY) - 1} joined by '-', and several policies are joined by '+' "
            f"(3-1-7+43-18-18), not {text!r}"
        ) from error
