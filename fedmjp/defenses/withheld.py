"""Withheld parameters: a client leaves some as they are, and its update holds nothing of them.

Common practice: the patch projection is frozen at its random start (Chen, Xie and He 2021, "An Empirical Study of
Training Self-Supervised Vision Transformers", section 4.3), only the last layers are fine-tuned, or only the biases
(BitFit: Zaken, Goldberg and Ravfogel 2022, arXiv:2106.10199; `train_only` = biases and head). The server knows the
weights that it sent, so what is withheld has to be enough that the rest does not determine the image:

- Positions and patch projection are not needed, nor is one of them: `token_span` solves with the first attention, and
  `token_inverse` with the first MLP as well where that leaves too few equations.
- Nor are positions and the first attention's queries, keys and values: `unmix` takes the tokens from the first MLP.
- Without the first block, `patch_embedding` solves with positions and projection.
- Nor are positions and the first block: `later_block` takes the tokens from the MLP of the first block that is sent.
- Biases and norms hold sums over the tokens alone: dL/db = sum_t g_t, and of a norm's weight sum_t g_t * n_t, entry by
  entry, D numbers each. Attacks that match gradients match what is sent.
- The head's gradient gives the feature of every image of a batch smaller than the number of classes, exactly
  (`attacks.features.classifier_features`); `feature_decoder` makes of it the image that is to be expected.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from attacks.registry import UsageError
from fedmjp.defenses.base import Defense
from fedmjp.defenses.parameter_groups import belongs, check_entries

if TYPE_CHECKING:
    from torch import nn

MLP = ("mlp.fc1", "mlp.fc2")


def _layers(block: int, *names: str) -> tuple[str, ...]:
    """Weights and biases of layers of a block."""
    return tuple(f"blocks.{block}.{name}.{kind}" for name in names for kind in ("weight", "bias"))


# What attacks solve with, by a ViT's names; of several ways one has to be sent, and all of it.
SOLVES_WITH: dict[str, tuple[tuple[str, ...], ...]] = {
    "patch_embedding": (("pos_embed", "patch_embed.proj.weight"),),
    "token_span": (("blocks.0.attn.qkv.weight",),),
    "unmix": (("patch_embed.proj.weight", "patch_embed.proj.bias", *_layers(0, "attn.proj", *MLP)),),
    "token_inverse": (_layers(0, "attn.qkv", "attn.proj", *MLP),),
    "inverting_gradients": (("head.bias",),),
    "dlg": ((),),
    # From the fifth block on no image of those tried came back (docs/leakage.md).
    "later_block": tuple(_layers(block, *MLP) for block in range(4)),
}


@dataclass(frozen=True)
class Withheld(Defense):
    """Options of --defense withheld."""

    withhold: tuple[str, ...] = ("patch_projection",)
    """Parameters that are neither trained nor sent: positions, patch_projection, first_attention (query, key and
    value), first_block, biases, norms, head, all_but_GROUP, or patterns of names (blocks.?.mlp.*)."""
    train_only: tuple[str, ...] = ()
    """Instead of --withhold: the only parameters that are trained and sent, named in the same way (BitFit: biases
    head)."""

    @property
    def hides_positions(self) -> bool:
        """Whether the position embedding is withheld."""
        return self.freezes("pos_embed")

    @property
    def known_by(self) -> tuple[str, ...]:
        """The attacks that solve with what is still sent."""
        sent = {name: any(not any(map(self.freezes, way)) for way in ways) for name, ways in SOLVES_WITH.items()}
        return tuple(name for name, is_sent in sent.items() if is_sent)

    @property
    def adapts(self) -> bool:
        """No: `adapt` only checks."""
        return False

    def parameters(self) -> dict[str, Any]:
        """The option that decides, as rows hold it."""
        return {"train_only": self.train_only} if self.train_only else {"withhold": self.withhold}

    def validate(self) -> None:
        """Raise `UsageError` for options that contradict each other, or that withhold nothing."""
        usual = next(option.default for option in fields(self) if option.name == "withhold")
        if self.train_only and self.withhold != usual:
            raise UsageError("--withhold and --train-only both say what is sent; pass one of them")
        if not (self.withhold or self.train_only):
            raise UsageError("--defense withheld needs --withhold or --train-only with at least one entry")

    def adapt(self, module: nn.Module) -> None:
        """Check that the options name parameters of this model; nothing is changed.

        Raises:
            UsageError: an entry that stands for none, or no parameter is left to train.
        """
        names = [name for name, _ in module.named_parameters()]
        option, entries = ("--train-only", self.train_only) if self.train_only else ("--withhold", self.withhold)
        check_entries(entries, names, option)
        if all(map(self.freezes, names)):
            raise UsageError(f"{option} {' '.join(entries)} leaves no parameter to train")

    def freezes(self, name: str) -> bool:
        """Whether the parameter is withheld."""
        if self.train_only:
            return not belongs(name, self.train_only)
        return belongs(name, self.withhold)
