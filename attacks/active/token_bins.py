"""Bins in the first MLP: the patches of single images out of a batch, by the parameters alone.

The idea of `imprint` without a layer of its own. The server sets the tokens (`attacks.active.token_codes`); the first
attention, with equal weights for all tokens, writes the brightness g of the image to each of them; and every unit of
the first MLP is switched on by one place i and the images brighter than one threshold b_k:

    w_ik n = [ M a (cos(theta_i - theta_t) - 1) + g - a b_k ] / sigma,

M so large that other places never switch it on. The units of a place are the cumulative bins of `attacks.active.bins`:
their differences hold the token of that place of the images between two thresholds, and all places together such an
image. The MLP has 4 D units, so that there are 4 D / N thresholds a round: 12, with 11 bins between them, on a ViT of
192 channels and 64 patches. Of a batch with more images a round reads a slice of the brightnesses, and the next round
the next one (`slices`).

Fowl et al. 2023 ("Decepticons") do this to words, with a random measure of the token in place of (i, k), so that tokens
come back in no order and are assigned by their embeddings; codes of places need no assignment.

The thresholds are spread as those of `imprint` are: evenly, or by public photographs (auxiliary data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.active.base import MOVED, ActiveAttack, SendContext, Sending, hides_positions, nobody
from attacks.active.bins import Bins, read_bins, round_off
from attacks.active.blocks import Block, blocks_of, plain_norms, same_direction, zeros_in
from attacks.active.brightness import BrightnessBins
from attacks.active.token_codes import (
    AMPLITUDE,
    CODE,
    MIXED,
    STEEPNESS,
    WRITTEN,
    TokenCodes,
    codes_for,
    is_coded,
)
from attacks.linear.position_rows import unmet_assumptions
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError

# Share of the places at which a bin must hold a token for its image to be shown.
LEAST_PLACES = 0.5
NAME = "token_bins"


@dataclass(frozen=True, kw_only=True)
class TokenBins(BrightnessBins):
    """The images that are alone in their bin, patch by patch.

    Args:
        slices: rounds in which the thresholds pass over all brightnesses; the n-th prepared round of a client takes the
            n-th slice.
    """

    slices: int = 1

    needs: ClassVar[frozenset[Capability]] = ActiveAttack.needs | {Capability.ACTIVE_PARAMETERS}
    same_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise `UsageError` for no slice."""
        if self.slices < 1:
            raise UsageError(f"{NAME}.slices must be at least 1, not {self.slices}")

    def used(self) -> frozenset[Capability]:
        """Several rounds too, where the thresholds take turns."""
        return super().used() | ({Capability.SEVERAL_ROUNDS} if self.slices > 1 else frozenset())

    def send(self, context: SendContext) -> Sending:
        """See `ActiveAttack.send`: tokens, the first attention and the first MLP.

        Raises:
            UsageError: the model is no plain ViT with one fused attention, or its MLP has fewer units than patches.
        """
        codes = codes_for(context.model, context.image_shape)
        block = blocks_of(context.model, codes.tokenizer.width)[0]
        units = context.model.get_submodule(block.first).out_features
        per_place = units // codes.tokenizer.num_patches
        if per_place < 2:
            raise UsageError(
                f"the first MLP has {units} units for {codes.tokenizer.num_patches} patches: two thresholds for each "
                "place, which make a bin, are the least"
            )
        turn = sum(is_coded(observation.model, codes) for observation in context.history) % self.slices
        shares = (turn + torch.linspace(0, 1, per_place, dtype=torch.float64)) / self.slices
        thresholds = self.quantiles(shares)
        parameters = codes.parameters(context.model) | writes_brightness(
            context.model, codes, block, context.mean, context.std
        )
        return Sending(parameters | set_units(context.model, block, unit_rows(codes, thresholds, units)))

    def check_prepared(self, observation: Observation) -> None:
        """See `ActiveAttack.check_prepared`."""
        _codes_of(observation)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`: the image of each bin, those of one image first.

        `details`: patches (bins of a place that hold tokens), single_patches (of them with one), held (bins of
        brightness that hold images), single (of them with one image).
        """
        observation = observations[-1]
        codes = _codes_of(observation)
        if observation.local_steps > 1:
            raise UsageError(unmet_assumptions(1, observation.local_steps)[0])
        places = codes.tokenizer.num_patches
        bins, per_place = self.occupied(observation, codes)
        bins = bins.where(codes.readable(bins.inputs))
        alone = codes.spread(bins.inputs).abs() <= MIXED
        image_of, place_of = bins.places % per_place, bins.places // per_place
        found = []
        for number in image_of.unique().tolist():
            own = image_of == number
            if own.sum() >= LEAST_PLACES * places:
                found.append(_Image(place_of[own], codes.patches(bins.inputs[own]), alone[own]))
        found.sort(key=lambda image: -int(image.alone.sum()))
        single = [image for image in found if bool(image.alone.all()) and len(image.alone) == places]
        details = {
            "patches": len(bins.places),
            "single_patches": int(alone.sum()),
            "held": len(found),
            "single": len(single),
        }
        if not found:
            return nobody("no bin of the first MLP holds an image: its units send no gradient", details)
        shown = found[: observation.num_examples]
        patches = torch.stack([image.whole(codes) for image in shown])
        known = torch.stack([image.known(codes, observation.std) for image in shown])
        several, moved = len(found) - len(single), hides_positions(observation)
        return Reconstruction(
            observation.to_pixels(codes.tokenizer.unpatchify(patches)).float(),
            known & (not moved),
            diagnosis="; ".join([MOVED] * moved + [_several(several)] * bool(several)),
            details=details,
        )

    def occupied(self, observation: Observation, codes: TokenCodes) -> tuple[Bins, int]:
        """The bins that hold tokens, and the number of thresholds of a place."""
        layer = blocks_of(observation.model, codes.tokenizer.width)[0].first
        weight, bias = (observation.gradient_of(f"{layer}.{part}") for part in ("weight", "bias"))
        places = codes.tokenizer.num_patches
        per_place = len(weight) // places
        used = places * per_place
        weight, bias = weight[:used].reshape(places, per_place, -1), bias[:used].reshape(places, per_place)
        found = read_bins(weight, bias, round_off(observation, f"{layer}.bias"))
        # Above the last threshold lie the images of other slices.
        return found.where(found.places % per_place < per_place - 1), per_place


@dataclass(frozen=True)
class _Image:
    """What a bin holds of an image.

    Attributes:
        places: (n,) int64.
        patches: (n, P) float64.
        alone: (n,) bool, whether the patch is that of one image.
    """

    places: Tensor
    patches: Tensor
    alone: Tensor

    def whole(self, codes: TokenCodes) -> Tensor:
        """All patches (N, P), grey where none is known."""
        found = self.patches.new_zeros(codes.tokenizer.num_patches, codes.tokenizer.patch_dim)
        found[self.places] = self.patches
        return found

    def known(self, codes: TokenCodes, std: tuple[float, ...]) -> Tensor:
        """(1, H, W) bool, the patches of one image whose tokens hold all that matters of them."""
        t = codes.tokenizer
        found = torch.zeros(t.num_patches, dtype=torch.bool, device=self.alone.device)
        found[self.places] = self.alone & codes.holds(self.patches, std)
        grid = found.reshape(t.grid).repeat_interleave(t.patch_size, 0).repeat_interleave(t.patch_size, 1)
        return grid[None]


def unit_rows(codes: TokenCodes, thresholds: Tensor, units: int) -> Tensor:
    """Weights (units, D) float64 of the first MLP: for each place one unit a threshold, then units that are never on.

    Args:
        thresholds: (K,) brightnesses in [0, 1], rising.
    """
    places = torch.arange(codes.tokenizer.num_patches).repeat_interleave(len(thresholds))
    at = codes.at_places(places)
    code = torch.zeros_like(at)
    code[:, CODE] = 1.0
    # g lies in [0, a], and so do a b_k: twice that is never reached at another place.
    rows = 2 / codes.gap * at + codes.balanced(code, -thresholds.repeat(codes.tokenizer.num_patches))
    return torch.cat([STEEPNESS * rows, rows.new_zeros(units - len(rows), rows.shape[1])])


def writes_brightness(
    model: nn.Module, codes: TokenCodes, block: Block, mean: Sequence[float], std: Sequence[float]
) -> dict[str, Tensor]:
    """The first attention, which adds a times the image's brightness to the code of all its tokens, by name.

    Queries and keys are zero, so that every token attends to all alike. The first value of the first head is the
    patch's mean over the token's sigma, which is that of a grey patch but for a few per cent.
    """
    t = codes.tokenizer
    found = zeros_in(model, block.qkv, block.output) | plain_norms(model, block.norm)
    value = torch.zeros(1, t.width, dtype=torch.float64)
    value[0, codes.first] = sum(std) / len(std)  # the first coefficient is the mean of a patch's normalised values
    offset = torch.tensor([sum(mean) / len(mean) / AMPLITUDE], dtype=torch.float64)
    grey = AMPLITUDE * (3 / t.width) ** 0.5  # sigma of a patch of zeros
    found[f"{block.qkv}.weight"][2 * t.width] = codes.balanced(value, offset)[0].to(found[f"{block.qkv}.weight"])
    found[f"{block.output}.weight"][CODE, 0] = AMPLITUDE * grey * (t.num_patches + t.prefix) / t.num_patches
    return found


def set_units(model: nn.Module, block: Block, rows: Tensor) -> dict[str, Tensor]:
    """The first MLP with units of these weights, which all write the same small vector, by name."""
    found = zeros_in(model, block.first, block.second) | plain_norms(model, block.mlp_norm)
    found[f"{block.first}.weight"] = rows.to(found[f"{block.first}.weight"])
    found[f"{block.second}.weight"] = same_direction(found[f"{block.second}.weight"], WRITTEN)
    return found


def _codes_of(observation: Observation) -> TokenCodes:
    """The codes of the model that the client was sent.

    Raises:
        UsageError: it was not prepared.
    """
    codes = codes_for(observation.model, observation.image_shape)
    if not is_coded(observation.model, codes):
        raise UsageError(
            f"the model that the client was sent was not prepared for this attack; name {NAME} in --attacks and grant "
            "active_parameters, so that the server sends what it sets"
        )
    return codes


def _several(count: int) -> str:
    bins = "1 bin holds" if count == 1 else f"{count} bins hold"
    return (
        f"{bins} several images, or not all of an image's patches: patches marked as unknown are mixtures; take more "
        f"slices ({NAME}.slices), a round each"
    )
