"""MP3: "Position Prediction as an Effective Pretraining Strategy" (Zhai et al., ICML 2022).

The encoder sees patches without position embedding and predicts each one's place. Every image draws
ceil((1 - eta) N) context patches; in every layer keys and values come from the context only and queries from all
patches (section 3.2). A linear head D -> N reads all patches, and with h_i the encoder's output for patch i

    L = (1 / N) sum_i CE(W h_i + b, i),

context or not. Of words, whose frames are small parts of a sequence, a share of the places is given (`given`, section
4.3: 5 %, without masks): the fixed sinusoids are added to those patches, and only the others are predicted, which the
paper leaves open. For fine-tuning the head is dropped and class token, classifier and positions are new.

Departs from the paper: the class token is left out here, since the paper attaches the classifier to it only when it
fine-tunes. A public re-implementation computes keys and values of every
layer from the *initial* context embeddings and adds two norms to the patch embedding; neither is in the paper or here.
Drop path of 0.1 and RandAugment are the paper's; the published text names no learning rate, so DeiT's stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from attacks.registry import UsageError
from fedmjp.objectives.counts import count_kept
from fedmjp.objectives.position_prediction import PositionPrediction, require_grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.defenses import Defense
    from fedmjp.models import BuiltModel


@dataclass(frozen=True)
class MP3(PositionPrediction):
    """Options of --objective mp3."""

    recipe: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "batch_size": 256,
            "label_smoothing": 0.0,
            "mixup": 0.0,
            "cutmix": 0.0,
            "erasing": 0.0,
            "repeats": 1,
            "drop_path": 0.1,
        }
    )

    eta: float = 0.75
    """Share of patches that are no context, in [0, 1) (paper: 0.5 CIFAR-100, 0.8 Tiny-ImageNet, 0.75 ImageNet)."""
    given: float = 0.0
    """Share of patches whose place is given, in [0, 1) (paper: 0, and 0.05 on Speech Commands)."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 <= self.eta < 1:
            raise UsageError(f"eta of objective 'mp3' must lie in [0, 1): at {self.eta} no patch is context")
        if not 0 <= self.given < 1:
            raise UsageError(
                f"given of objective 'mp3' must lie in [0, 1): at {self.given} no place is to be predicted"
            )

    def model_name(self, name: str) -> str:
        """NAME_nope."""
        return f"{require_grid('mp3', name, ('', '_nope'))[0]}_nope"

    def check(self, model: str, defense: Defense) -> None:
        """Refuse defences that move patches, whose places would be wrong, or that hide positions, which are not there.

        Raises:
            UsageError: see `Objective.check`.
        """
        require_grid("mp3", model, ("", "_nope"))
        if defense.moves_patches or defense.hides_positions:
            what = "moves patches whose places are predicted" if defense.moves_patches else "hides positions only"
            raise UsageError(
                f"--objective mp3 has no position embedding to hide, and the defence {what}; train with none or noise"
            )

    def attach(self, module: nn.Module) -> None:
        """A linear head over places instead of class token and classifier."""
        from torch import nn

        module.cls_token, module.num_prefix_tokens, module.has_class_token = None, 0, False
        module.reset_classifier(0, "avg")
        module.pretext = nn.Linear(module.embed_dim, module.patch_embed.num_patches)
        nn.init.trunc_normal_(module.pretext.weight, std=0.02)
        nn.init.zeros_(module.pretext.bias)

    def predict(self, model: BuiltModel, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Logits (B, M, N) of the places of the M patches whose place is not given, and those places (B, M)."""
        import torch

        from fedmjp.objectives.places import gather_tokens, members, random_subsets

        total, device = model.module.patch_embed.num_patches, images.device
        count = count_kept(total, self.eta, rounds_up=True)
        context = random_subsets(len(images), total, count, generator, device)
        asked = count_kept(total, self.given, rounds_up=False)
        if asked == total:
            logits = place_logits(model.module, model.normalise(images), context)
            return logits, torch.arange(total, device=device).expand(len(images), -1)
        places = random_subsets(len(images), total, asked, generator, device)
        logits = place_logits(model.module, model.normalise(images), context, ~members(places, total))
        return gather_tokens(logits, places), places


def place_logits(module: nn.Module, images: Tensor, context: Tensor, given: Tensor | None = None) -> Tensor:
    """Logits (B, N, N) of every patch's place.

    Args:
        module: with the head of `MP3.attach`.
        images: (B, C, H, W), normalised.
        context: (B, K) int64, the patches that give keys and values, at least one.
        given: (B, N) bool, the patches to which the fixed position embedding is added; None for none.
    """
    from fedmjp.models.vit import fixed_positions

    patches = module.patch_embed(images)
    if given is not None:
        table = fixed_positions(module.patch_embed.grid_size, module.embed_dim).to(patches)
        patches = patches + given[..., None] * table
    return module.pretext(module.encode(patches, context))
