"""The parts of MST put together: its heads, and the loss of one batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedmjp.data import ImageSet
from fedmjp.models import BuiltModel
from fedmjp.models.attention import candidates, class_attention, recorded_attention
from fedmjp.objectives.crop_encoder import Replace, encode_crops, grid_of
from fedmjp.objectives.distillation import (
    ProjectionHead,
    Teacher,
    distillation_loss,
    teacher_targets,
    update_centre,
)
from fedmjp.objectives.restoration import ImageDecoder, restoration_loss
from fedmjp.objectives.token_masks import candidate_count, draw_mask, replace_patches

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
class Passed:
    """A batch on its way to the loss; every list of views has the global crops first.

    Attributes:
        views: as the student's input layer sees them, normalised.
        masks: of each global crop the hidden patches (B, N) bool, or None if none is.
        targets: of each global crop the teacher's outputs (B, K), before centre and softmax; empty without
            distillation.
        student: of each crop the student's outputs (B, K); empty without distillation.
        restored: of each global crop the restored pixels (B, C, H, W), normalised; empty without decoder.
    """

    views: list[ClientInput]
    masks: list[Tensor | None]
    targets: list[Tensor]
    student: list[Tensor]
    restored: list[Tensor]


def pass_views(options: MST, model: BuiltModel, batch: TrainingBatch, teacher: Teacher | None) -> Passed:
    """Show the global crops to the teacher, and all crops to the student."""
    module, heads, draw = model.module, model.module.pretext, batch.generator
    views = [replace(seen, images=model.normalise(seen.images)) for seen in batch.views]
    both, small = views[:GLOBAL], views[GLOBAL:]
    taught = [teach(options, teacher, view) for view in both]
    masks = [_hide(options, module, view, attention, draw) for view, (_, attention) in zip(both, taught, strict=True)]
    tokens = [
        encode_crops(module, view.images, view.position_mask, _replacing(options, module, mask, draw))
        for view, mask in zip(both, masks, strict=True)
    ]
    student, restored = [], []
    if options.lambda_1:
        features = [view[:, 0] for view in tokens]
        if small:  # without hidden positions (`MST.check`), and encoded together
            features += encode_crops(module, torch.cat([v.images for v in small]))[:, 0].chunk(len(small))
        student = [heads.projection(one, frozen=batch.progress < options.frozen) for one in features]
    if options.lambda_2:  # a view at a time: its images alone make the statistics of the batch norm
        restored = [
            heads.decoder(one[:, module.num_prefix_tokens :], grid_of(module, view.images))
            for one, view in zip(tokens, both, strict=True)
        ]
    return Passed(views, masks, [outputs for outputs, _ in taught if outputs is not None], student, restored)


def mst_loss(options: MST, model: BuiltModel, batch: TrainingBatch, teacher: Teacher | None) -> Tensor:
    """lambda_1 times the distillation plus lambda_2 times the restoration, a scalar.

    In training mode the centre is moved after it was used.
    """
    passed, module, terms = pass_views(options, model, batch, teacher), model.module, []
    if options.lambda_1:
        centre = module.pretext.centre
        targets = [teacher_targets(one, centre, options.teacher_temperature) for one in passed.targets]
        terms.append(options.lambda_1 * distillation_loss(passed.student, targets, options.student_temperature))
        if module.training:
            update_centre(centre, passed.targets, options.centre_momentum)
    if options.lambda_2:
        patch, counted = module.patch_embed.patch_size, options.restored == "masked"
        losses = [
            restoration_loss(restored, view.images, mask if counted else None, patch, options.l1)
            for restored, view, mask in zip(passed.restored, passed.views, passed.masks, strict=False)
        ]
        terms.append(options.lambda_2 * torch.stack(losses).mean())
    return torch.stack(terms).sum()


@torch.no_grad()
def teach(options: MST, teacher: Teacher | None, view: ClientInput) -> tuple[Tensor | None, Tensor | None]:
    """Show the teacher a global crop, normalised.

    Returns:
        Its outputs (B, K), or None without distillation, and the class token's attention (B, N) in the last block,
        mean over heads, or None where it decides nothing.
    """
    if teacher is None:
        return None, None
    network, attention = teacher.network, None
    with recorded_attention(network.blocks[-1]) if options.attends else nullcontext() as kept:
        tokens = encode_crops(network, view.images, view.position_mask)
    if options.attends:
        attention = class_attention(kept[0], network.num_prefix_tokens)
    return network.pretext(tokens[:, 0]) if options.lambda_1 else None, attention


def _hide(
    options: MST, module: nn.Module, view: ClientInput, attention: Tensor | None, generator: torch.Generator
) -> Tensor | None:
    """Draw the patches of a global crop that the student does not see."""
    if options.masking == "none":
        return None
    rows, columns = grid_of(module, view.images)
    if options.masking == "random":
        allowed = torch.ones(len(view.images), rows * columns, dtype=torch.bool, device=view.images.device)
    else:
        count = candidate_count(options.share, rows * columns)
        allowed = candidates(attention, count, most=options.masking == "attended")
    return draw_mask(allowed, options.p, generator)


def _replacing(options: MST, module: nn.Module, mask: Tensor | None, generator: torch.Generator) -> Replace | None:
    if mask is None:
        return None
    token = module.pretext.mask_token
    return partial(replace_patches, mask=mask, token=token, style=options.replacement, generator=generator)


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
