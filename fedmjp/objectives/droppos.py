"""DropPos: "Pre-Training Vision Transformers by Reconstructing Dropped Positions" (Wang et al., NeurIPS 2023).

The encoder sees K = floor((1 - gamma) N) patches of each image. floor((1 - gamma_pos) K) of them have their fixed 2-D
sin-cos position; the others get one shared embedding `mask_pos` instead, which is the model's unknown position
embedding (`unk_embed` of the NAME_mjp variant). A decoder of two blocks without positions predicts the places of the
latter. With o_i their logits, w the smoothed places (`smoothed_places`) and A the attentive weights

    L = - sum_i A_i sum_j w_ij log softmax(o_i)_j / sum_i A_i,   A = softmax_i(cos(class, patch_i) / tau)

over all images of the batch, where class and patch_i are the encoder's features of the whole image with all positions
shown, without gradient. sigma falls linearly to 0 over the training. tau = inf weighs all alike and saves that pass.

The published code (github.com/Haochen-Wang409/DropPos) differs from the paper and from this file. Its smoothing map
lies on a grid 16 wide by default (see `smoothed_places`). Its training accuracy is weighted by A; ours counts. tau is
hard-coded as 0.1. Its scripts say batch 512 and layer decay 0.75 where the paper says 4096 and 0.8. sigma falls by the
epoch there, by the step here. As there, A is normalised over the batch and not by image, so that images whose hidden
patches resemble the class token weigh more. Departs from it: weights start as timm's, not as MAE's (Xavier).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attacks.registry import UsageError
from fedmjp.objectives.base import TrainingBatch
from fedmjp.objectives.counts import count_kept
from fedmjp.objectives.position_prediction import PositionPrediction, require_grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.defenses import Defense
    from fedmjp.models import BuiltModel

HEAD_WIDTH = 32  # channels of a decoder's head: 512 / 16 in the published code


@dataclass(frozen=True)
class DropPos(PositionPrediction):
    """Options of --objective droppos."""

    drops_patches: ClassVar[bool] = True
    recipe: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "epochs": 200,
            "batch_size": 4096,
            "learning_rate": 3e-4,
            "warmup_epochs": 10,
            "label_smoothing": 0.0,
            "clip_gradient": 5.0,
            "mixup": 0.0,
            "cutmix": 0.0,
            "erasing": 0.0,
            "repeats": 1,
            "rand_augment": "none",
            "smallest_crop": 0.2,
        }
    )

    gamma: float = 0.75
    """Share of patches that the encoder does not see, in [0, 1)."""
    gamma_pos: float = 0.75
    """Share of the seen patches whose position is replaced by the shared token, in (0, 1]."""
    sigma: float = 1.0
    """Width of the smoothed targets in patches, at least 0 (0: none)."""
    anneal: bool = True
    """Whether sigma falls linearly to 0 over the training."""
    tau: float = 0.1
    """Temperature of the attentive weights, above 0 (inf: all alike)."""
    positions: Literal["fixed", "learned"] = "fixed"
    """Position embedding of the shown patches: the fixed sin-cos one, or learned and sent (departs from the paper)."""
    decoder_width: int = 512
    """Channels of the decoder, a multiple of 32."""
    decoder_depth: int = 2
    """Blocks of the decoder."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 <= self.gamma < 1:
            raise UsageError(
                f"gamma of objective 'droppos' must lie in [0, 1): at {self.gamma} the encoder sees nothing"
            )
        if not 0 < self.gamma_pos <= 1:
            raise UsageError(
                f"gamma_pos of objective 'droppos' must lie in (0, 1]: at {self.gamma_pos} there is nothing to predict"
            )
        if self.sigma < 0 or not self.tau > 0:
            raise UsageError("sigma of objective 'droppos' must not be negative, and tau must be above 0")
        if self.decoder_width < HEAD_WIDTH or self.decoder_width % HEAD_WIDTH or self.decoder_depth < 0:
            raise UsageError(
                f"decoder_width of objective 'droppos' must be a multiple of {HEAD_WIDTH}, decoder_depth not negative"
            )

    def model_name(self, name: str) -> str:
        """NAME_mjp, whose unknown position embedding is `mask_pos`."""
        return f"{require_grid('droppos', name, ('', '_mjp'))[0]}_mjp"

    def check(self, model: str, defense: Defense) -> None:
        """Refuse ratios that leave nothing, and defences that move patches or withhold positions.

        Raises:
            UsageError: see `Objective.check`.
        """
        _, total = require_grid("droppos", model, ("", "_mjp"))
        seen = count_kept(total, self.gamma, rounds_up=False)
        if seen < 1:
            raise UsageError(f"gamma={self.gamma} of objective 'droppos' leaves none of the {total} patches of {model}")
        if count_kept(seen, self.gamma_pos, rounds_up=False) == seen:
            raise UsageError(f"gamma_pos={self.gamma_pos} of objective 'droppos' hides none of {seen} seen patches")
        if defense.moves_patches:
            raise UsageError(
                "--objective droppos predicts where patches stand, and the defence moves them; it hides positions by "
                "itself: train it with none or noise"
            )
        if defense.hides_positions and self.positions == "fixed":
            raise UsageError(
                "--objective droppos sends no position embedding that the defence could withhold; pass "
                "droppos:positions=learned, or train it with none or noise"
            )

    def attach(self, module: nn.Module) -> None:
        """The decoder instead of the classifier, and fixed positions instead of learned ones."""
        from fedmjp.objectives.decoder import PlaceDecoder
        from fedmjp.objectives.places import sincos_table

        module.reset_classifier(0)
        if self.positions == "fixed":
            grid, prefix = module.patch_embed.grid_size, module.num_prefix_tokens
            del module.pos_embed
            # Not in a checkpoint and not sent: it follows from the architecture.
            module.register_buffer("pos_embed", sincos_table(grid, module.embed_dim, prefix), persistent=False)
        count = module.patch_embed.num_patches
        heads = self.decoder_width // HEAD_WIDTH
        module.pretext = PlaceDecoder(module.embed_dim, self.decoder_width, self.decoder_depth, heads, count)

    def begin_fine_tuning(self, module: nn.Module) -> None:
        """Start a learned position embedding from the fixed one that the encoder knows.

        The published code keeps it fixed unless --fix_pos_emb is given, whose sense is inverted there; here it is
        trained.
        """
        import torch

        from fedmjp.objectives.places import sincos_table

        if self.positions == "fixed" and module.pos_embed is not None:
            table = sincos_table(module.patch_embed.grid_size, module.embed_dim, module.num_prefix_tokens)
            with torch.no_grad():
                module.pos_embed.copy_(table)

    def predict(self, model: BuiltModel, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Logits (B, M, N) of the places of the M patches without position, and those places (B, M)."""
        logits, places, _ = self._predict(model, images, generator)
        return logits, places

    def loss(self, model: BuiltModel, batch: TrainingBatch, local: nn.Module | None) -> Tensor:
        """The loss of the module's head."""
        from fedmjp.objectives.places import attentive_weights, smoothed_places, weighted_cross_entropy

        (seen,) = batch.views
        logits, places, normalised = self._predict(model, seen.images, batch.generator)
        sigma = self.sigma * (1 - batch.progress) if self.anneal else self.sigma
        targets = smoothed_places(model.module.patch_embed.grid_size, sigma).to(logits.device)[places]  # (B, M, N)
        weights = None
        if self.tau != float("inf"):
            weights = attentive_weights(model.module, normalised, self.tau).gather(1, places)
        return weighted_cross_entropy(logits, targets, weights)

    def _predict(self, model: BuiltModel, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """As `predict`, and the normalised images."""
        from fedmjp.objectives.places import random_subsets

        module, device = model.module, images.device
        total = module.patch_embed.num_patches
        seen, hidden = self.counts(total)
        shown = random_subsets(len(images), total, seen, generator, device)  # (B, K)
        slots = random_subsets(len(images), seen, hidden, generator, device)  # (B, M), within the shown ones
        normalised = model.normalise(images)
        return place_logits(module, normalised, shown, slots), shown.gather(1, slots), normalised

    def counts(self, total: int) -> tuple[int, int]:
        """(K, M) for N patches: how many the encoder sees, and how many of those have no position."""
        seen = count_kept(total, self.gamma, rounds_up=False)
        return seen, seen - count_kept(seen, self.gamma_pos, rounds_up=False)


def place_logits(module: nn.Module, images: Tensor, shown: Tensor, slots: Tensor) -> Tensor:
    """Logits (B, M, N) of the places of the patches without position.

    Args:
        module: with the decoder of `DropPos.attach`.
        images: (B, C, H, W), normalised.
        shown: (B, K) int64, the patches that the encoder sees.
        slots: (B, M) int64 in 0..K-1, which of those have no position.
    """
    import torch

    from fedmjp.objectives.places import gather_tokens, members

    patches = gather_tokens(module.patch_embed(images), shown)  # (B, K, D)
    prefix, places = module.pos_embed.split([module.num_prefix_tokens, module.patch_embed.num_patches], dim=1)
    hidden = members(slots, shown.shape[1])[..., None]  # (B, K, 1)
    patches = patches + torch.where(hidden, module.unk_embed, places[0][shown])
    first = (module.cls_token + prefix).expand(len(patches), -1, -1)
    decoded = module.pretext(module.encode(torch.cat([first, patches], dim=1)))  # (B, 1 + K, N)
    return gather_tokens(decoded[:, module.num_prefix_tokens :], slots)
