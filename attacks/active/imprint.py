"""Imprint: a layer of bins in front of the model, which keeps the images of a batch apart (Robbing the Fed).

Fowl et al. 2022, "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models",
section 3. The server puts a layer in front of the model that it sends, whose units measure the brightness of the whole
image and are on between two of K rising thresholds (`attacks.active.architecture.BinLayer`). Its gradient holds every
image that is alone between two thresholds (`attacks.active.imprint_rows`), whatever the model behind it, the labels,
the size of the batch and the order of its images are. A sum over several clients is a larger batch.

The thresholds need to be spread as the images' brightness is (`attacks.active.brightness`).

Departs from the paper: the layer adds a small number to every pixel and leaves the image as it is, where the paper's
second linear layer replaces it (the package `breaching` has both), so that the model computes what it did before to
within 0.001 of a pixel's normalised value; and it has one more input, the image's mean square q. For one image in a
bin the mean square of the recovered image is the recovered q; for a mixture of several it differs by their variance.
That is how the attack tells one image from several, without knowing any.

A client that clips its update before it adds noise, or sends its largest entries alone, leaves to the server what the
norm and the largest entries are. The layer measures less and writes more (`amplify`): the model computes the same, and
nearly all of the update's norm is the images'.

Of a client that moves patches (MJP) the layer sees what the model is fed: `attacks.active.moved_patches` puts them
back.

Of a client that sends signs, each entry says on which side of a level a pixel lies. A layer that measures every pixel
against several levels says between which two of them it lies (`levels`, `attacks.active.imprint_signs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.active.architecture import ADDED, ANCHOR, IMPRINT, BinLayer, anchor_scale, layers_with_bins
from attacks.active.base import SendContext, Sending, hides_positions, nobody
from attacks.active.brightness import BrightnessBins
from attacks.active.imprint_rows import ImprintRows, read_rows
from attacks.active.imprint_signs import holds_signs, read_signs
from attacks.active.moved_patches import put_back, seconds
from attacks.linear.completion import NOISE_SLACK, VOUCHED_DEVIATION
from attacks.linear.position_rows import unmet_assumptions
from attacks.observation import ORDER_GUESSED, Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

# What the layer adds to a normalised pixel at most: this times the part of all brightnesses that a bin spans.
GAIN = 1e-3
# Levels of a pixel, where a client sends signs, and by how much fewer the bins then are. Signs are short messages.
LEVELS, FEWER = 10, 4
ONE_LEVEL = (
    "the message holds signs, and the layer measures a pixel against one level: a client whose earlier message shows "
    "this, or imprint.levels, gets a layer with more"
)
EMPTY = (
    "no bin holds an image: the gradient of the layer in front of the model is zero, so that no image of the batch "
    "sends a gradient to its pixels"
)
NONE = {"held": 0, "single": 0}
IN_PART = (
    "no image can be read: of the layer in front of the model, no row has a gradient together with its anchor (one of "
    "them was frozen, left out, or is below the message's precision)"
)
SIGNS = "the message holds signs, which do not tell one image from several"
CONTRADICTED = (
    "the signs of some rows contradict each other, or their image: noise was added, or entries were left out, before "
    "the signs were taken"
)
PUT_BACK = (
    "the client hides positions (MJP), or sends nothing that would show it: patches that it may have moved are put "
    "back by their borders, which is a guess"
)
COARSE = "the message is too coarse to tell one image of a batch from several"


@dataclass(frozen=True, kw_only=True)
class Imprint(BrightnessBins):
    """The images that are alone in their bin.

    Args:
        bins: K; the layer has about K P parameters, P the numbers of an image. With J levels there are K / 4 bins, and
            J / 4 times as many parameters.
        amplify: factor by which the layer writes more and measures less. The model computes the same, and the layer's
            gradient is as many times larger than the others. Less where the model's type of numbers would round the
            measure to zero (float16).
        levels: J, of a normalised pixel. 0: one, or `LEVELS` where the client's last message held signs.
    """

    bins: int = 256
    amplify: float = 1e3
    levels: int = 0

    needs: ClassVar[frozenset[Capability]] = BrightnessBins.needs | {Capability.ACTIVE_ARCHITECTURE}

    def __post_init__(self) -> None:
        """Raise `UsageError` for no bins, a factor that is not positive, or a number of levels out of range."""
        if self.bins < 1:
            raise UsageError(f"imprint.bins must be at least 1, not {self.bins}")
        if self.levels < 0:
            raise UsageError(f"imprint.levels must not be negative, not {self.levels}")
        if not 0 < self.amplify < math.inf:
            raise UsageError(f"imprint.amplify must be positive, not {self.amplify:g}")

    def send(self, context: SendContext) -> Sending:
        """See `ActiveAttack.send`: the model as it is behind the layer."""
        like = next(context.model.parameters())
        weight, offset = brightness(context.image_shape, context.mean, context.std)
        levels = self._levels(context)
        count, bins = len(levels), self.bins if len(levels) == 1 else max(self.bins // FEWER, 1)
        offset += float(weight.sum() * levels.mean())  # sum_j w / J (x - l_j) = w x - w 1 mean(l)
        amplify = min(self.amplify, GAIN * float(weight.min()) / count / torch.finfo(like.dtype).tiny)
        gain = GAIN / amplify
        offsets = gain * (offset - self.thresholds(bins)) / anchor_scale(len(weight))
        parameters = {
            "measure.weight": gain / count * weight.repeat(count).expand(bins, -1),
            "anchor.weight": torch.stack([torch.zeros_like(offsets), offsets], dim=1),  # (K, 2)
            "levels": levels,
            "written": torch.tensor([amplify]),
        }
        named = {f"{IMPRINT}.{name}": value.to(like) for name, value in parameters.items()}
        return Sending(named, layers_with_bins(bins, count))

    def thresholds(self, bins: int) -> Tensor:
        """Rising brightnesses in [0, 1], (bins,) float64, the first one below all images."""
        return self.quantiles(torch.arange(bins) / bins)

    def _levels(self, context: SendContext) -> Tensor:
        """Levels of a normalised pixel, (J,) float64 rising: the middles of J equal parts of its range, or zero."""
        count = self.levels or (LEVELS if context.history and holds_signs(context.history[-1]) else 1)
        if count == 1:
            return torch.zeros(1, dtype=torch.float64)
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (context.mean, context.std))
        low, high = float((-mean / std).min()), float(((1 - mean) / std).max())
        return low + (high - low) * (torch.arange(count).double() + 0.5) / count

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: with the placing of patches that the client may have moved."""
        solve = super().estimated_seconds(observations)
        try:
            return solve + (seconds(observations[-1]) if hides_positions(observations[-1]) else 0.0)
        except UsageError:  # no ViT
            return solve

    def check_prepared(self, observation: Observation) -> None:
        """See `ActiveAttack.check_prepared`."""
        layer_of(observation)

    def remembered_layers(self, model: nn.Module, image_shape: tuple[int, int, int]) -> tuple[str, ...]:
        """See `Attack.remembered_layers`: nothing; of earlier rounds `send` reads the format of the tokenizer's."""
        return ()

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`: the image of every bin that holds one, then the mixtures of those that hold more.

        `details`: held (bins that hold images), single (of them with one).
        """
        observation = observations[-1]
        layer = layer_of(observation)
        if observation.local_steps > 1:
            raise UsageError(unmet_assumptions(1, observation.local_steps)[0])
        if not any(observation.gradient_of(name).any() for name in (ADDED, ANCHOR)):
            return nobody(EMPTY, NONE)
        return (_of_signs if holds_signs(observation) else _of_numbers)(observation, layer)


def _of_numbers(observation: Observation, layer: BinLayer) -> Reconstruction:
    """What the rows say of a message that holds numbers, exact, rounded or noised."""
    found, count = read_rows(observation, layer), observation.num_examples
    if not len(found.images):
        return nobody(_hidden_by_noise(found) if found.noise else IN_PART, NONE)
    alone = count == 1 and len(found.images) == 1
    single = (found.excess.abs() <= found.explained) | alone
    weights = single + found.shares.abs() / (2 * found.shares.abs().max())
    order = weights.topk(min(count, len(weights))).indices.sort().values
    order = order[torch.argsort(single[order].long(), descending=True, stable=True)]
    # A mixture of halves misses either image by the root of what its mean square misses q by.
    errors = (found.errors.square() + found.explained * (not alone)).sqrt()
    clear = found.clear | alone
    sure = single & clear & (NOISE_SLACK * sum(observation.std) / len(observation.std) * errors < VOUCHED_DEVIATION)
    several = int((~single & clear).sum())
    words = [_several(several)] * bool(several) + [COARSE] * bool((~clear).any())
    words += [_hidden_by_noise(found)] * (found.noise > 0 and len(order) < count)
    return _answer(observation, found.images[order], sure[order], words, len(single), int(single.sum()))


def _of_signs(observation: Observation, layer: BinLayer) -> Reconstruction:
    """What the rows say of a message of signs."""
    if len(layer.levels) == 1:
        return nobody(ONE_LEVEL, NONE)
    found, count = read_signs(observation, layer), observation.num_examples
    doubted = found.contradicted or not found.consistent.all()
    if not len(found.images):
        return nobody(CONTRADICTED if doubted else IN_PART, NONE)
    alone = count == 1 and len(found.images) == 1 and not doubted
    sure = torch.full_like(found.consistent, alone and max(observation.std) * found.error < VOUCHED_DEVIATION)
    words = [SIGNS] * (count > 1) + [CONTRADICTED] * doubted
    return _answer(observation, found.images[:count], sure[:count], words, len(sure), int(sure.sum()))


def _answer(
    observation: Observation, images: Tensor, sure: Tensor, words: Sequence[str], held: int, single: int
) -> Reconstruction:
    """Images (n, P), vouched for where `sure` (n,); where the client moves patches, put back and not vouched for."""
    moved, pixels = hides_positions(observation), observation.to_pixels(images.reshape(-1, *observation.image_shape))
    return Reconstruction(
        (put_back(observation, pixels) if moved else pixels).float(),
        (sure & (not moved))[:, None, None, None].expand(-1, 1, *observation.image_shape[1:]),
        diagnosis="; ".join([*[PUT_BACK] * moved, *words]),
        flags=(ORDER_GUESSED,) * moved,
        details={"held": held, "single": single},
    )


def brightness(image_shape: tuple[int, int, int], mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, float]:
    """The brightness of an image in [0, 1] as a function w x + o of its normalised pixels: w (P,) float64, and o."""
    channels, height, width = image_shape
    scale = torch.tensor(std, dtype=torch.float64).expand(channels) / (channels * height * width)
    return scale.repeat_interleave(height * width), float(torch.tensor(mean, dtype=torch.float64).mean())


def layer_of(observation: Observation) -> BinLayer:
    """The layer in front of the model that the client was sent.

    Raises:
        UsageError: it has none.
    """
    find_tokenizer(observation.model, observation.image_shape)
    layer = getattr(observation.model, IMPRINT, None)
    if not isinstance(layer, BinLayer):
        raise UsageError(
            "the model that the client was sent has no layer of bins in front; name imprint in --attacks and grant "
            "active_architecture, so that the server sends one"
        )
    return layer


def _hidden_by_noise(found: ImprintRows) -> str:
    return f"noise in the message hides what sends less than {found.least:.1e} to the layer in front of the model"


def _several(count: int) -> str:
    bins = (
        "1 bin holds several images, which come back as a mixture"
        if count == 1
        else (f"{count} bins hold several images each, which come back as their mixtures")
    )
    return f"{bins}: take more bins (imprint.bins), or calibrate them by public photographs (grant auxiliary_data)"
