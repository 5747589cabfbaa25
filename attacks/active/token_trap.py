"""What traps in small trained layers have in common: a round reads the tokens of some places, and rounds add up.

Sami et al. 2025, "Gradient Inversion Attacks on Parameter-Efficient Fine-Tuning" (PEFTLeak): of a client that trains
small layers beside a frozen backbone, a server that sends both reads the image. Here the tokens carry codes of their
places (`attacks.active.token_codes`), and the blocks hand them on unchanged to the layers that are trained.

The frozen parameters are set too, as in the paper: a client that takes its backbone from elsewhere, and of the server's
message the trained layers alone, is not attacked by this.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.active.base import ActiveAttack, nobody
from attacks.active.token_codes import TokenCodes, codes_for, is_coded
from attacks.classifier import classifier_of
from attacks.linear.position_rows import unmet_assumptions
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

# Largest relative difference of the classifier's gradients of two rounds on the same image: measured 2e-9 and below,
# and 8e-4 and above between photographs (random vit_micro_32 and DeiT-S, trained vit_mini_32).
SAME = 1e-5


@dataclass(frozen=True)
class Picked:
    """Tokens that an update shows.

    Attributes:
        places: (n,) int64.
        normed: (n, D) float64, each behind a norm, of any positive scale.
        alone: (n,) bool, whether each is known to be the token of one image.
    """

    places: Tensor
    normed: Tensor
    alone: Tensor

    @classmethod
    def join(cls, parts: Sequence[Picked], like: Tensor) -> Picked:
        """All of them together; none on the device of `like` (., D)."""
        if not parts:
            nothing = torch.zeros(0, dtype=torch.int64, device=like.device)
            return cls(nothing, like.new_zeros(0, like.shape[1]).double(), nothing.bool())
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("places", "normed", "alone")))

    def readable(self, codes: TokenCodes) -> Picked:
        """Those of them that patches can be computed of."""
        kept = codes.readable(self.normed)
        return Picked(self.places.to(kept.device)[kept], self.normed[kept], self.alone[kept])


@dataclass(frozen=True, kw_only=True)
class TokenTrap(ActiveAttack):
    """The image of a client with one image a batch, the same one in every round that is needed.

    Rounds on other images are recognised by the classifier's gradient, and left out.
    """

    needs: ClassVar[frozenset[Capability]] = ActiveAttack.needs | {
        Capability.ACTIVE_PARAMETERS,
        Capability.SEVERAL_ROUNDS,
    }
    same_model: ClassVar[bool] = True
    left: ClassVar[int]  # blocks at the end that stay as they are
    kind: ClassVar[str]  # of trained layers, in words

    @abstractmethod
    def trained_layers(self, model: nn.Module) -> list[str]:
        """Names of the trained layers that could read tokens, of all blocks."""

    def trapped(self, model: nn.Module) -> list[str]:
        """Names of those that do, of all blocks but the last ones.

        Raises:
            UsageError: the model has none.
        """
        found = self.trained_layers(model)
        if len(found) <= self.left:
            raise UsageError(f"the model has no {self.kind} in {self.left + 1} blocks or more, which are read here")
        return found[: -self.left]

    def codes_for(self, model: nn.Module, image_shape: tuple[int, int, int]) -> TokenCodes:
        """The codes of the model's tokens; see `attacks.active.token_codes.codes_for`."""
        return codes_for(model, image_shape)

    @abstractmethod
    def places(self, observation: Observation, codes: TokenCodes) -> Tensor:
        """The places that an update's model reads, (n,) int64, from what was sent."""

    @abstractmethod
    def picked(self, observation: Observation, codes: TokenCodes) -> Picked:
        """The tokens that an update shows."""

    def check_prepared(self, observation: Observation) -> None:
        """See `ActiveAttack.check_prepared`."""
        self._codes(observation)

    def remembered_layers(self, model: nn.Module, image_shape: tuple[int, int, int]) -> tuple[str, ...]:
        """See `Attack.remembered_layers`: what reads the tokens, and the classifier."""
        head = classifier_of(model, image_shape)
        return (*self.trained_layers(model), *([head] if head else []))

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; one image.

        `details`: patches (that prepared rounds have read), rounds (prepared, on the same image).
        """
        last = observations[-1]
        codes = self._codes(last)
        if last.local_steps > 1:
            raise UsageError(unmet_assumptions(1, last.local_steps)[0])
        prepared = [one for one in observations if self._is_prepared(one, codes) and of_one_image(one, last)]
        t, like = codes.tokenizer, next(iter(last.gradients.values()))
        patches = torch.zeros(t.num_patches, t.patch_dim, dtype=torch.float64, device=like.device)
        read, alone = torch.zeros(2, t.num_patches, dtype=torch.bool, device=like.device)
        for found in (self.picked(one, codes).readable(codes) for one in prepared):
            patches[found.places], read[found.places] = codes.patches(found.normed), True
            alone[found.places] = found.alone
        details = {"patches": int(read.sum()), "rounds": len(prepared)}
        if not read.any():
            return nobody("the layers that read tokens send no gradient", details)
        reasons = unmet_assumptions(last.num_examples, 1)
        if not read.all():
            reasons.append(
                f"{int(read.sum())} of {t.num_patches} patches were read so far; the next prepared rounds read others"
            )
        elif not alone.all() and not reasons:
            reasons.append(f"{int((~alone).sum())} patches are known badly, or not those of one image")
        known = (alone & read & codes.holds(patches, last.std) & (last.num_examples == 1)).reshape(t.grid)
        known = known.repeat_interleave(t.patch_size, 0).repeat_interleave(t.patch_size, 1)[None, None]
        images = last.to_pixels(t.unpatchify(patches[None])).float()
        return Reconstruction(images, known, diagnosis="; ".join(reasons), details=details)

    def _is_prepared(self, observation: Observation, codes: TokenCodes) -> bool:
        return is_coded(observation.model, codes) and bool(len(self.places(observation, codes)))

    def _codes(self, observation: Observation) -> TokenCodes:
        """The codes of the model that the client was sent.

        Raises:
            UsageError: it was not prepared.
        """
        from attacks import ATTACKS

        find_tokenizer(observation.model, observation.image_shape)
        codes = self.codes_for(observation.model, observation.image_shape)
        self.trapped(observation.model)
        if not self._is_prepared(observation, codes):
            raise UsageError(
                f"the model that the client was sent was not prepared for this attack; name "
                f"{ATTACKS.name_of(type(self))} in --attacks and grant active_parameters, so that the server sends "
                "what it sets"
            )
        return codes


def of_one_image(earlier: Observation, last: Observation) -> bool:
    """Whether two prepared rounds were on the same images: their classifier's gradients are equal.

    The places that a round reads change nothing in what the model computes (`WRITTEN`). Without the classifier's
    gradient nothing shows it, and a round is read by itself.
    """
    head = classifier_of(last.model, last.image_shape)
    if earlier is last:
        return True
    before, now = (one.gradients.get(f"{head}.weight") for one in (earlier, last))
    return before is not None and now is not None and float((before - now).norm()) <= SAME * float(now.norm())
