"""An image of what the classifier receives: features from the classifier's gradient, decoded.

Where a client trains little but the classifier (linear probing, biases, norms, low-rank factors), no closed form finds
the pixels. Its feature, the classifier's input, is known exactly (`attacks.features.classifier_features`), and that of
every image of a batch smaller than the number of classes. The server has the model, and so learns what image is to be
expected for a feature: a linear map (`attacks.features.linear_decoder`) from noise with the spectrum of natural images,
for which it needs nothing, or from public photographs (`photographs`, with `Capability.AUXILIARY_DATA`).

What comes back are colours and the layout of light and dark, as far as a feature holds them: an image that has the
same feature as the batch's is not near it, because many have (docs/leakage.md). So nothing is vouched for. The
features themselves are exact: with candidates for the image, the server compares theirs.

It cannot work on updates without the classifier's gradient, on sums of local steps, and on more images than classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attacks.base import Attack
from attacks.classifier import classifier_gradient, find_classifier
from attacks.features.classifier_features import classifier_features
from attacks.features.linear_decoder import LinearDecoder, learn_decoder
from attacks.features.noise_images import batch_sizes, noise_batches
from attacks.features.photographs import photograph_crops
from attacks.identities import tokenizer_of
from attacks.linear.position_rows import position_gradient
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError

# Seconds of one CPU core for a weight and a token of a forward pass in float32.
SECONDS_FORWARD = 3e-11
# Seconds for a class and the fifth power of the batch's size: a few searches with up to 80 steps each.
SECONDS_SEARCH = 5e-9
TOGETHER = 64  # images in a forward pass
# Model -> what its last decoder is of, and the decoder.
_LAST: WeakKeyDictionary[nn.Module, tuple[Hashable, LinearDecoder]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class FeatureDecoder(Attack):
    """The images that are to be expected for the batch's features.

    Args:
        images: that the decoder is learned from.
        photographs: folder of public photographs to crop them from; noise where it is empty.
        seed: of the noise, or of the crops.
    """

    images: int = 1024
    photographs: str = ""
    seed: int = 0

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})
    reads_every_parameter: ClassVar[bool] = True
    last_resort: ClassVar[bool] = True

    def used(self) -> frozenset[Capability]:
        """See `Attack.used`: auxiliary data with photographs."""
        return self.needs | ({Capability.AUXILIARY_DATA} if self.photographs else frozenset())

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: beside the gradients that closed forms use, a feature adds little to the pixels."""
        target = observations[-1]
        if classifier_gradient(target) is None:
            return "the update holds no gradient of a classifier's weight and bias"
        tokenizer = tokenizer_of(target)
        if tokenizer is None:
            return ""
        if tokenizer.weight in target.gradients and position_gradient(target, tokenizer) is not None:
            if target.num_examples > 1:
                return "the update holds what attacks on pixels use; run it by name for the features of the batch"
            return "the update holds the gradients of positions and patch projection: patch_embedding uses them"
        return ""

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: forward passes of the decoder's images, and a search for a batch."""
        target = observations[-1]
        tokenizer = tokenizer_of(target)
        tokens = target.image_shape[1] if tokenizer is None else tokenizer.num_patches + 1  # of a CNN: rows of pixels
        passes = self.images * tokens * sum(p.numel() for p in target.model.parameters())
        gradient = classifier_gradient(target)
        classes = 0 if gradient is None else len(gradient)
        return SECONDS_FORWARD * passes + SECONDS_SEARCH * classes * target.num_examples**5

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds what images that were held out gained (dB), and the starts."""
        target = observations[-1]
        if classifier_gradient(target) is None:
            raise UsageError("the update holds no gradient of a classifier's weight and bias")
        return decoded(target, self._decoder(target))

    def _decoder(self, observation: Observation) -> LinearDecoder:
        """For the weights that were sent: the clients of a round share it, so the last one of each model is kept."""
        sums = tuple(float(tensor.double().sum()) for tensor in observation.model.state_dict().values())
        key = (self, observation.image_shape, sums)
        last = _LAST.get(observation.model)
        if last is None or last[0] != key:
            last = (key, learn_decoder(encoder(observation), self._examples(observation.image_shape)))
            _LAST[observation.model] = last
        return last[1]

    def _examples(self, image_shape: tuple[int, int, int]) -> Iterator[Tensor]:
        if self.photographs:
            return photograph_crops(self.photographs, batch_sizes(self.images, TOGETHER), image_shape, self.seed)
        return noise_batches(self.images, TOGETHER, image_shape, self.seed)


def decoded(observation: Observation, decoder: LinearDecoder) -> Reconstruction:
    """What a decoder makes of an update's features, with a diagnosis: the features are known, and not the pixels."""
    features = classifier_features(observation, decoder.examples)
    images, count = decoder(features.values, features.error), len(features.values)
    of = f"{count} images" if count > 1 else "1 image"
    return Reconstruction(
        images=images,
        known=torch.zeros_like(images[:, :1], dtype=torch.bool),
        labels=features.labels,
        diagnosis=(
            f"the classifier's input of {of} is known to {features.error:.0e} of its length; the pixels are only those "
            "to be expected for it"
        ),
        details={"held_out_gain": decoder.gain, "starts": features.starts},
    )


def encoder(observation: Observation) -> Callable[[Tensor], Tensor]:
    """Images (B, C, H, W) in [0, 1] -> inputs of the model's classifier (B, D), float64, in evaluation mode."""
    model = copy.deepcopy(observation.model).eval()  # so that no statistics of a batch norm change
    classifier = model.get_submodule(find_classifier(observation))
    like = next(model.parameters())
    mean, std = (torch.tensor(v).to(like).view(1, -1, 1, 1) for v in (observation.mean, observation.std))

    def encode(images: Tensor) -> Tensor:
        """The features of images."""
        kept: list[Tensor] = []

        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            """Keep the classifier's input."""
            kept.append(inputs[0])

        handle = classifier.register_forward_pre_hook(keep)
        try:
            model((images.to(like) - mean) / std)
        finally:
            handle.remove()
        return kept[-1].double()

    return encode
