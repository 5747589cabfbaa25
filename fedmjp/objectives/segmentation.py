"""Semantic segmentation: the mean cross-entropy of the pixels' classes, by UPerNet (`fedmjp.models.upernet`).

The MJP supplement (section 4, Table 3) fine-tunes Swin-Tiny with UPerNet on ADE20K, from weights that were pre-trained
with and without MJP, and gives no more of how. That is `--weights FILE` of either with `--defense none` here.

Under `--defense mjp` the jigsaw acts while segmentation itself is trained, as a client would need it. A patch then
takes its pixels' labels along (`ClientInput.rearrange`): a class belongs to a pixel's content, and with the position
hidden nothing in the input would tell where it was. The decoder, a convolution over neighbours, sees borders between
patches that no test image has. Test images are not jigsawed.

The recipe's defaults are those of mmsegmentation for UPerNet on Swin-Tiny and ADE20K (AdamW, 6e-5 at a batch of 16,
160,000 steps), with this project's cosine in place of a linear decay; crops of a quarter to all of an image stand for
its rescaling by 0.5 to 2 before a crop of 512 pixels, and there is no photometric distortion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from attacks.registry import UsageError
from fedmjp.objectives.base import Objective, TrainingBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data import DataBundle
    from fedmjp.defenses import ClientInput
    from fedmjp.models import BuiltModel


@dataclass(frozen=True)
class Segmentation(Objective):
    """Options of --objective segmentation."""

    needs_labels: ClassVar[bool] = True
    per_pixel: ClassVar[bool] = True
    score: ClassVar[str] = "mean IoU"
    accuracy_of: ClassVar[str] = "pixels"
    recipe: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "epochs": 127,
            "batch_size": 16,
            "learning_rate": 6e-5 * 512 / 16,
            "weight_decay": 0.01,
            "warmup_epochs": 1.2,
            "label_smoothing": 0.0,
            "clip_gradient": 0.0,
            "repeats": 1,
            "rand_augment": "none",
            "smallest_crop": 0.25,
            "mixup": 0.0,
            "cutmix": 0.0,
            "erasing": 0.0,
        }
    )

    width: int = 64
    """Channels of the decoder (mmsegmentation: 512)."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if self.width < 1:
            raise UsageError(f"width of objective 'segmentation' must be at least 1, not {self.width}")

    def attach(self, module: nn.Module) -> None:
        """UPerNet's decoder instead of the classifier, for as many classes.

        Raises:
            MissingExtra: the extra `segmentation` is not installed.
        """
        from fedmjp.models.upernet import UPerNetHead

        classes = module.num_classes
        module.reset_classifier(0)
        module.pretext = UPerNetHead(module, classes, self.width)

    def loss(self, model: BuiltModel, batch: TrainingBatch, local: nn.Module | None) -> Tensor:
        """Mean cross-entropy of the pixels that are not ignored; the labels move as the defence moves pixels."""
        from fedmjp.evaluation.segmentation import pixel_loss
        from fedmjp.models.upernet import pixel_logits

        (seen,) = batch.views
        logits = pixel_logits(model.module, model.normalise(seen.images), **seen.forward_kwargs())
        return pixel_loss(logits, moved_labels(batch.labels, seen))

    def evaluate(
        self, model: BuiltModel, local: nn.Module | None, data: DataBundle, device: torch.device
    ) -> tuple[float, float]:
        """Mean cross-entropy and mean IoU on the test images."""
        from fedmjp.evaluation.segmentation import segmentation_scores

        found = segmentation_scores(model, data.test, device)
        return found.loss, found.miou


def moved_labels(labels: Tensor, seen: ClientInput) -> Tensor:
    """Label maps (B, H, W) int64 rearranged as the images of `seen` were."""
    if seen.rearrange is None:
        return labels
    return seen.rearrange(labels[:, None].float())[:, 0].round().long()
