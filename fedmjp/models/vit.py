"""timm's Vision Transformer with the MJP input layer.

Equations 5-7 of "Masked Jigsaw Puzzle" (Liu, Ren et al.): masked positions get one shared, learnable *unknown* position
embedding in place of their own. The paper's ablation IDX instead adds, from a second table, an embedding of the place
that a moved patch came from. timm does everything else. `AprilBlock` is the first block of the analytic attack's
papers.

Departs from the released code: the unknown embedding is a parameter of its own instead of one more row of the position
table, so that checkpoints of plain ViTs load unchanged. The paper says of IDX
only that more embeddings tell the patches' global indexes: here every patch keeps the position embedding of the place
where it is shown, and adds the second table's row of its origin.
"""

from __future__ import annotations

from typing import Literal

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedmjp.models.localisation import DenseAbsoluteLocalisation

# Parameters added to the tokens of patches: the gradient of each holds rows of dL/dz, token by token.
POSITION_TABLES = ("pos_embed", "unk_embed", "idx_embed")


class ViT(VisionTransformer):
    """A Vision Transformer whose position embeddings can be hidden patch by patch.

    Args:
        unknown_position: give the model the shared embedding E_unk (equation 6).
        origin_table: give the model a second table of embeddings, one row a patch of the ordered image (IDX).
        dal: the map of the dense absolute localisation loss ("pca", "linear", "nonlinear"), or "none".
        **kwargs: as for timm's `VisionTransformer`.
    """

    def __init__(
        self, *, unknown_position: bool = False, origin_table: bool = False, dal: str = "none", **kwargs
    ) -> None:
        super().__init__(**kwargs)
        # Made after the rest, so that the same seed gives the plain and the MJP model the same other weights.
        self.unk_embed = self._table(1) if unknown_position else None
        self.idx_embed = self._table(self.patch_embed.num_patches) if origin_table else None
        self.dal = DenseAbsoluteLocalisation(self.embed_dim, dal) if dal != "none" else None

    def _table(self, rows: int) -> nn.Parameter:
        table = nn.Parameter(torch.empty(1, rows, self.embed_dim))
        nn.init.trunc_normal_(table, std=0.02)
        return table

    def forward(self, images: Tensor, position_mask: Tensor | None = None, origins: Tensor | None = None) -> Tensor:
        """Logits (B, classes) of normalised images (B, C, H, W).

        Args:
            position_mask: (B, N) bool, True where the patch's position is hidden behind the unknown embedding.
            origins: (B, N) int64, the place in the ordered image of the patch shown at each place; None where each
                stands at its own.

        Raises:
            ValueError: a mask is given to a model without an unknown embedding, or origins to one without their table.
        """
        return self.forward_head(self.forward_features(images, position_mask, origins))

    def forward_features(
        self, images: Tensor, position_mask: Tensor | None = None, origins: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, prefix + N, D) after the last block's norm."""
        tokens = self._add_origins(self.patch_embed(images), origins)
        tokens = self._pos_embed(tokens) if position_mask is None else self._masked_pos_embed(tokens, position_mask)
        return self.norm(self.blocks(self.norm_pre(tokens)))

    def _add_origins(self, patches: Tensor, origins: Tensor | None) -> Tensor:
        if self.idx_embed is None:
            if origins is not None:
                raise ValueError("this model has no table of origins; build the _idx variant of it")
            return patches
        return patches + (self.idx_embed if origins is None else self.idx_embed[0, origins])

    def _masked_pos_embed(self, patches: Tensor, mask: Tensor) -> Tensor:
        if self.unk_embed is None:
            raise ValueError("this model has no unknown position embedding; build the _mjp variant of it")
        prefix, positions = self.pos_embed.split([self.num_prefix_tokens, patches.shape[1]], dim=1)
        patches = patches + torch.where(mask[..., None], self.unk_embed, positions)  # equation 6
        return self.pos_drop(torch.cat([(self.cls_token + prefix).expand(len(patches), -1, -1), patches], dim=1))

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay should leave alone: timm's, and those of this class."""
        return super().no_weight_decay() | set(POSITION_TABLES)

    def patch_positions(self) -> Tensor | None:
        """Position embeddings of the patches, (N, D), or None."""
        return None if self.pos_embed is None else self.pos_embed[0, self.num_prefix_tokens :]


class AprilBlock(nn.Module):
    """A block without the first norm and without residuals, for which APRIL's closed form is exact (Lu et al., equation
    5).

    The same architecture as the `breaching` package's, so that both attack the same gradient.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn, self.norm2, self.mlp = block.attn, block.norm2, block.mlp

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.mlp(self.norm2(self.attn(tokens)))


BlockKind = Literal["standard", "april"]
