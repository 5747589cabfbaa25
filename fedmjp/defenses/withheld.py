"""Withheld parameters: a client leaves some as they are, and its update holds nothing of them.

Common practice: the patch projection is frozen at its random start (Chen, Xie and He 2021, "An Empirical Study of
Training Self-Supervised Vision Transformers", section 4.3), only the last layers are fine-tuned, or only the biases
(BitFit: Zaken, Goldberg and Ravfogel 2022, arXiv:2106.10199; `train_only` = biases and head). The server knows the
weights that it sent, so what is withheld has to be enough that the rest does not determine the image:

- Positions and patch projection are not needed, nor is one of them: `token_span` solves with the first attention, and
  `token_inverse` with the first MLP as well where that leaves too few equations.
- Nor are positions and the first attention's queries, keys and values: `unmix` takes the tokens from the first MLP.
- Without the first block, `patch_embedding` solves with positions and projection.
- Nor are positions and the first blocks: `later_block` takes the tokens from the MLP of the first block that is sent.
- Biases and norms hold sums over the tokens alone: dL/db = sum_t g_t, and of a norm's weight sum_t g_t * n_t, entry by
  entry, D numbers each. The head's gradient is (p - y) f^T with f the pooled feature, which is known exactly for a
  batch of one: f = dL/dW_c / dL/db_c. Attacks that match gradients match what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from attacks.registry import UsageError
from fedmjp.defenses.base import Defense
from fedmjp.defenses.parameter_groups import belongs, check_entries

if TYPE_CHECKING:
    from torch import nn

# What attacks solve with, by a ViT's names: all of it has to be sent.
SOLVES_WITH = {
    "patch_embedding": ("pos_embed", "patch_embed.proj.weight"),
    "token_span": ("blocks.0.attn.qkv.weight",),
    "unmix": (
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
        *(f"blocks.0.{layer}.{kind}" for layer in ("attn.proj", "mlp.fc1", "mlp.fc2") for kind in ("weight", "bias")),
    ),
    "token_inverse": tuple(
        f"blocks.0.{layer}.{kind}"
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ),
    "inverting_gradients": ("head.bias",),
    "dlg": (),
}
# Any one of these MLPs is what `later_block` solves with; what is sent of later ones alone may not tell the image.
EARLY_MLPS = tuple(
    tuple(f"blocks.{block}.mlp.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias"))
    for block in range(4)
)


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
        found = tuple(name for name, needed in SOLVES_WITH.items() if not any(map(self.freezes, needed)))
        sent = (not any(map(self.freezes, mlp)) for mlp in EARLY_MLPS)
        return (*found, *(("later_block",) if any(sent) else ()))

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
