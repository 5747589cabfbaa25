"""The parts of MST put together: its heads, and the loss of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedmjp.data import ImageSet
from fedmjp.models import BuiltModel
from fedmjp.models.attention import recorded_attention
from fedmjp.objectives.crop_encoder import encode_crops, grid_of
from fedmjp.objectives.distillation import (
    ProjectionHead,
    Teacher,
    distillation_loss,
    teacher_targets,
    update_centre,
)
from fedmjp.objectives.restoration import ImageDecoder, restoration_loss
from fedmjp.objectives.token_masks import candidate_count, candidates, class_attention, draw_mask, replace_patches

if TYPE_CHECKING:
    from fedmjp.defenses import ClientInput
    from fedmjp.objectives.base import TrainingBatch
    from fedmjp.objectives.mst import MST

GLOBAL = 2  # global crops of an image
BATCH = 64  # of evaluation


class MSTHeads(nn.Module):
    """What the student trains beside its encoder, each None where the options leave it without a gradient.

    Attributes:
        projection: DINO's head.
        centre: (K,), a buffer, and therefore averaged over clients like a batch norm's statistics (DINO averages it
            over devices).
        decoder: tokens to pixels.
        mask_token: (D,).
    """

    def __init__(self, module: nn.Module, options: MST) -> None:
        super().__init__()
        width, embed = module.embed_dim, module.patch_embed
        self.projection = self.decoder = self.mask_token = None
        if options.lambda_1:
            self.projection = ProjectionHead(width, options.hidden, options.bottleneck, options.outputs)
            self.register_buffer("centre", torch.zeros(options.outputs))
        if options.lambda_2:
            channels = embed.proj.in_channels
            self.decoder = ImageDecoder(width, embed.patch_size, channels, options.decoder_norm)
        if options.masking != "none":
            self.mask_token = nn.Parameter(torch.empty(width))
            nn.init.trunc_normal_(self.mask_token, std=0.02)


@dataclass(frozen=True)
class Taught:
    """The teacher's answer to a global view.

    Attributes:
        outputs: (B, K), or None without distillation.
        attention: (B, N) of the class token in the last block, mean over heads, or None where it is of no use.
    """

    outputs: Tensor | None
    attention: Tensor | None


def mst_loss(options: MST, model: BuiltModel, batch: TrainingBatch, teacher: Teacher | None) -> Tensor:
    """lambda_1 times the distillation plus lambda_2 times the restoration, a scalar.

    In training mode the centre is moved after it was used.
    """
    module, draw = model.module, batch.generator
    views = [replace(seen, images=model.normalise(seen.images)) for seen in batch.views]
    both, small = views[:GLOBAL], views[GLOBAL:]
    taught = [teach(options, teacher, view) for view in both]
    masks = [hidden_patches(options, module, view, one.attention, draw) for view, one in zip(both, taught, strict=True)]
    tokens = [
        encode_crops(module, view.images, view.position_mask, _replacing(options, module, mask, draw))
        for view, mask in zip(both, masks, strict=True)
    ]
    terms = []
    if options.lambda_1:
        outputs = [one.outputs for one in taught]
        terms.append(options.lambda_1 * _distil(options, module, tokens, small, outputs, batch.progress))
    if options.lambda_2:
        losses = [_restore(options, module, *each) for each in zip(tokens, both, masks, strict=True)]
        terms.append(options.lambda_2 * torch.stack(losses).mean())
    return torch.stack(terms).sum()


@torch.no_grad()
def teach(options: MST, teacher: Teacher | None, view: ClientInput) -> Taught:
    """Show the teacher a global view, normalised."""
    if teacher is None:
        return Taught(None, None)
    network, attention = teacher.network, None
    if options.attends:
        with recorded_attention(network) as kept:
            tokens = encode_crops(network, view.images, view.position_mask)
        attention = class_attention(kept[0], network.num_prefix_tokens)
    else:
        tokens = encode_crops(network, view.images, view.position_mask)
    return Taught(network.pretext(tokens[:, 0]) if options.lambda_1 else None, attention)


def hidden_patches(
    options: MST, module: nn.Module, view: ClientInput, attention: Tensor | None, generator: torch.Generator
) -> Tensor | None:
    """Draw the patches of a global view that the student does not see, (B, N) bool; None if it sees all."""
    if options.masking == "none":
        return None
    rows, columns = grid_of(module, view.images)
    if options.masking == "random":
        allowed = torch.ones(len(view.images), rows * columns, dtype=torch.bool, device=view.images.device)
    else:
        count = candidate_count(options.share, rows * columns)
        allowed = candidates(attention, count, most=options.masking == "attended")
    return draw_mask(allowed, options.p, generator)


def _replacing(options: MST, module: nn.Module, mask: Tensor | None, generator: torch.Generator):
    """For `encode_crops`."""
    if mask is None:
        return None
    token = module.pretext.mask_token
    return partial(replace_patches, mask=mask, token=token, style=options.replacement, generator=generator)


def _distil(
    options: MST,
    module: nn.Module,
    tokens: Sequence[Tensor],
    small: Sequence[ClientInput],
    outputs: Sequence[Tensor],
    progress: float,
) -> Tensor:
    """The distillation of all crops; local ones have no hidden positions (`MST.check`) and are encoded together."""
    heads = module.pretext
    features = [view[:, 0] for view in tokens]
    if small:
        together = encode_crops(module, torch.cat([view.images for view in small]))[:, 0]
        features += together.chunk(len(small))
    student = [heads.projection(one, frozen=progress < options.frozen) for one in features]
    targets = [teacher_targets(one, heads.centre, options.teacher_temperature) for one in outputs]
    loss = distillation_loss(student, targets, options.student_temperature)
    if module.training:
        update_centre(heads.centre, outputs, options.centre_momentum)
    return loss


def _restore(options: MST, module: nn.Module, tokens: Tensor, view: ClientInput, mask: Tensor | None) -> Tensor:
    """Restore one global view; its images alone make the statistics of the batch norm."""
    restored = module.pretext.decoder(tokens[:, module.num_prefix_tokens :], grid_of(module, view.images))
    counted = mask if options.restored == "masked" else None
    return restoration_loss(restored, view.images, counted, module.patch_embed.patch_size, options.l1)


@torch.no_grad()
def restoration_error(model: BuiltModel, images: ImageSet, device: torch.device) -> float:
    """Mean absolute error of restored pixels, normalised, of whole images of which nothing is hidden.

    The model is left in evaluation mode. NaN if it has no decoder.
    """
    module, total = model.module.eval(), 0.0
    if module.pretext.decoder is None:
        return float("nan")
    for start in range(0, len(images), BATCH):
        seen = model.normalise(images.images(range(start, min(start + BATCH, len(images)))).to(device))
        tokens = encode_crops(module, seen)[:, module.num_prefix_tokens :]
        restored = module.pretext.decoder(tokens, grid_of(module, seen))
        total += len(seen) * float((restored - seen).abs().mean())
    return total / len(images)
