"""Extract from an update what an attack matches: gradients without the localisation loss, and the position mask.

The position rows of an MJP client's masked patches are exactly zero, so the mask can be read from the update. Simulated
clients use the same mask. The localisation loss does not depend on the images: `attacks.linear.position_rows` subtracts
its gradient from the position rows. The gradients of the localisation map itself are not matched, and neither are those
of any other parameter that the images do not influence (`attacks.gradient_matching.simulation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from attacks.linear.position_rows import IMBALANCE, position_gradient, remove_localisation, unseen_localisation
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer


@dataclass(frozen=True)
class MatchedUpdate:
    """The part of one update that an attack matches.

    Attributes:
        gradients: by parameter name, the gradients that are suitable for matching.
        mask: (N,) bool, positions to mask in the simulated client too, or None.
        flags: warnings, see `attacks.observation.Reconstruction`.
    """

    gradients: Mapping[str, Tensor]
    mask: Tensor | None
    flags: tuple[str, ...]

    def without(self, leave_out: str) -> MatchedUpdate:
        """The update without the parameters whose names begin as `leave_out` says (`GradientMatching.leave_out`).

        Raises:
            UsageError: no parameter's name begins so, or every one's does.
        """
        if not leave_out:
            return self
        beginnings = tuple(leave_out.split("+"))
        kept = {name: gradient for name, gradient in self.gradients.items() if not name.startswith(beginnings)}
        idle = [b for b in beginnings if not b or not any(name.startswith(b) for name in self.gradients)]
        if idle or not kept:
            which = f"no parameter's name begins with {idle[0]!r}" if idle else "no parameter is left"
            raise UsageError(f"leave_out {leave_out!r}: {which}; the update holds {', '.join(self.gradients)[:80]} ...")
        return replace(self, gradients=kept)


def extract_matched_update(observation: Observation) -> MatchedUpdate:
    """Extract what an attack matches from one update.

    Position rows that hold a contribution other than the images' and the known localisation term are left out.
    """
    gradients, flags = dict(observation.gradients), []
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in observation.model.modules()):
        flags.append("batch_statistics_assumed")
    try:
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
    except UsageError:  # not a ViT, so it has no positions to mask
        return MatchedUpdate(gradients, None, tuple(flags))
    rows = position_gradient(observation, tokenizer)
    if rows is None:
        return MatchedUpdate(gradients, None, tuple(flags))
    clean, masked, weight, imbalance = remove_localisation(observation, tokenizer, rows[tokenizer.prefix :])
    if tokenizer.localisation is not None and (
        imbalance > IMBALANCE or unseen_localisation(observation, tokenizer, clean, masked)
    ):
        del gradients[tokenizer.positions]
    elif weight:
        gradients[tokenizer.positions] = tokenizer.replace_patch_rows(gradients[tokenizer.positions], clean)
    if tokenizer.mask_argument is None:
        hidden = (rows[tokenizer.prefix :] == 0).all(dim=1).any()
        return MatchedUpdate(gradients, None, (*flags, "zero_rows_ignored") if hidden else tuple(flags))
    if not masked.any():
        return MatchedUpdate(gradients, None, tuple(flags))
    if observation.num_examples > 1 or observation.local_steps > 1:
        flags.append("one_mask_assumed")  # rows are zero where all images of the update are masked
    return MatchedUpdate(gradients, masked, tuple(flags))
