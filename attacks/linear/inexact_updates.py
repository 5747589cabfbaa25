"""Inexact updates of one image (noised, rounded, not all sent) that hide positions: joined and solved together.

Patches and the factors of hidden ones multiply each other in `attacks.linear.errors_in_variables`, so that its search
needs a start, and several solves. The start is the solve of all updates as if what they show were exact, with the
hidden directions projected off (`attacks.linear.masked_update`): where errors are small it is nearly right, and where
they are large any start is.

*Which updates show the image.* Patches that are known from one update alone, however roughly, predict what another
update of the image sends far better than the same patches mirrored in themselves do, which have the same colours,
contrasts and smoothness. For another image both predict nothing. An update counts where

    misfit of X < `PREDICTS` times the least misfit of X with mirrored patches (columns, rows, or both reversed).

Measured with shipped vit_mini_32 and vit_mini_64, plain and MJP at gamma 0.1 and 0.5, eight photographs in all pairs,
noise of 1e-4 to 3e-1 of the update's rms entry: at least 0.80 for other images; at most 0.77 for the same image with
noise up to 1e-2, and up to 0.97 with more, where updates are left out. At gamma 0.9 and 32 pixels other images have
0.69, and with noise of 1e-4 the test fails.

Departs from `attacks.mjp.same_image`, whose tests of row space and agreement find augmented views, too, and are
made for updates with the digits of float32: here the view is the same in every update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.linear.completion import complete
from attacks.linear.errors_in_variables import Corrected, RoundedSystem, correct, marginal_misfit
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import PositionRows
from attacks.linear.views import mirror
from attacks.tokenizer import Tokenizer

# See the module.
PREDICTS = 0.65
# Solves, one from the other's answer, while the misfit falls to less than this share.
SOLVES, SETTLED = 4, 0.98


def predicts(patches: Tensor, system: RoundedSystem, tokenizer: Tokenizer) -> bool:
    """Whether patches (N, P) of one image explain an update so well that it shows the same; see the module."""
    own, *turned = (marginal_misfit(system, seen)[0] for seen in (patches, *_mirrored(patches, tokenizer)))
    return 0 < own < PREDICTS * min(turned)


def _mirrored(patches: Tensor, tokenizer: Tokenizer) -> list[Tensor]:
    """Every patch (N, P) mirrored in itself: columns, rows, or both reversed."""
    upside_down = patches.unflatten(1, (tokenizer.channels, -1, tokenizer.patch_size)).flip(2).flatten(1)
    return [mirror(patches, tokenizer), upside_down, mirror(upside_down, tokenizer)]


def solve_as_exact(updates: Sequence[PositionRows], std: tuple[float, ...], prior: VectorialVariation) -> Tensor:
    """The patches (N, P) of updates of one image as if their entries had no errors.

    Args:
        std: per-channel normalisation, to render in [0, 1].
        prior: completes what every update hides.
    """
    solved = [solve_masked(update) for update in updates]
    equations = solved[0].equations()
    for update in solved[1:]:
        equations.merge(update.equations())
    estimate = equations.solve() if len(solved) > 1 else solved[0].estimate()
    shown = torch.stack([~update.masked for update in updates]).any(dim=0)
    return complete(prior, estimate, updates[0].tokenizer, std, shown, updates=len(updates)).patches


def solve_inexact(
    systems: Sequence[RoundedSystem],
    starts: Sequence[Tensor],
    tokenizer: Tokenizer,
    std: tuple[float, ...],
    prior: VectorialVariation,
) -> Corrected:
    """The most probable patches of masked updates, from the start that leads to the least misfit.

    Args:
        systems: of the updates that show the image.
        starts: (N, P) each.
        std: per-channel normalisation, to render in [0, 1].
    """
    best = min((correct(systems, start, tokenizer, std, prior) for start in starts), key=lambda found: found.misfit)
    for _ in range(SOLVES - 1):
        found = correct(systems, best.patches, tokenizer, std, prior)
        if not found.misfit < SETTLED * best.misfit:
            break
        best = found
    return best
