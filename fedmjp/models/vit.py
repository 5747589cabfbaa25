"""timm's Vision Transformer with the MJP input layer.

Equations 5-7 of "Masked Jigsaw Puzzle" (Liu, Ren et al.): masked positions get one shared, learnable *unknown* position
embedding instead of their own. The paper's ablation IDX instead adds, from a second table, an embedding of the original
place of a moved patch. A model may have 2-D relative position biases instead of a position embedding (Swin's and BEiT's
table by offset, one a block and head, zero at the start as in MP3, section 5). The rest is timm's implementation.
`AprilBlock` is the first block for which the analytic attack of the APRIL paper is exact.

Departs from the released code: the unknown embedding is a separate parameter instead of one more row of the position
table, so that checkpoints of plain ViTs load unchanged. About IDX the paper says only that additional embeddings encode
the patches' global indices. Here every patch keeps the position embedding of the place where it is shown, and the row
of the second table for its original place is added.
"""

from __future__ import annotations

from typing import Literal

import torch
from timm.layers import DropPath, RelPosBias, build_sincos2d_pos_embed, resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from fedmjp.models.localisation import DenseAbsoluteLocalisation
from fedmjp.models.low_rank import merged_weight

# Parameters added to the tokens of patches: their gradients consist of rows dL/dz of single tokens.
POSITION_TABLES = ("pos_embed", "unk_embed", "idx_embed")


class ViT(VisionTransformer):
    """A Vision Transformer in which the position embedding of each patch can be hidden.

    Args:
        unknown_position: add the shared embedding E_unk (equation 6).
        origin_table: add a second table of embeddings, one row per patch of the ordered image (IDX).
        dal: the map of the dense absolute localisation loss ("pca", "linear", "nonlinear"), or "none".
        relative_positions: add a relative position bias to the attention of each block.
        **kwargs: as for timm's `VisionTransformer`.
    """

    def __init__(
        self,
        *,
        unknown_position: bool = False,
        origin_table: bool = False,
        dal: str = "none",
        relative_positions: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        # Created last, so that with the same seed all other weights are equal in the plain and in the MJP model.
        self.unk_embed = self._table(1) if unknown_position else None
        self.idx_embed = self._table(self.patch_embed.num_patches) if origin_table else None
        self.dal = DenseAbsoluteLocalisation(self.embed_dim, dal) if dal != "none" else None
        self.relative = nn.ModuleList(map(self._bias, self.blocks)) if relative_positions else None

    def _bias(self, block: Block) -> RelPosBias:
        bias = RelPosBias(self.patch_embed.grid_size, block.attn.num_heads, self.num_prefix_tokens)
        nn.init.zeros_(bias.relative_position_bias_table)
        return bias

    def _table(self, rows: int) -> nn.Parameter:
        table = nn.Parameter(torch.empty(1, rows, self.embed_dim))
        nn.init.trunc_normal_(table, std=0.02)
        return table

    def set_input_size(self, *args, **kwargs) -> None:
        """See timm's `VisionTransformer.set_input_size`: the table of origins is resampled with the positions."""
        super().set_input_size(*args, **kwargs)
        if self.idx_embed is not None:
            table = resample_abs_pos_embed(self.idx_embed, list(self.patch_embed.grid_size), num_prefix_tokens=0)
            self.idx_embed = nn.Parameter(table)

    def fix_positions(self) -> None:
        """Replace the learned position embedding by the fixed one of `fixed_positions`; it is in no checkpoint and no
        update, because it follows from the architecture."""
        prefix = self.num_prefix_tokens
        table = functional.pad(fixed_positions(self.patch_embed.grid_size, self.embed_dim), (0, 0, prefix, 0))
        del self.pos_embed
        self.register_buffer("pos_embed", table[None], persistent=False)

    def forward(self, images: Tensor, position_mask: Tensor | None = None, origins: Tensor | None = None) -> Tensor:
        """Logits (B, classes) of normalised images (B, C, H, W).

        Args:
            images: normalised.
            position_mask: (B, N) bool, True where the patch's position embedding is replaced by the unknown one.
            origins: (B, N) int64, for each place the index in the ordered image of the patch shown there; None if no
                patch was moved.

        Raises:
            ValueError: a mask is given to a model without unknown embedding, or origins to one without their table.
        """
        return self.forward_head(self.forward_features(images, position_mask, origins))

    def forward_features(
        self, images: Tensor, position_mask: Tensor | None = None, origins: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, prefix + N, D) after the final norm; arguments and errors as for `forward`."""
        tokens = self._add_origins(self.patch_embed(images), origins)
        tokens = self._pos_embed(tokens) if position_mask is None else self._masked_pos_embed(tokens, position_mask)
        return self.encode(tokens)

    def encode(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """Blocks and final norm: (B, T, D) -> (B, T, D).

        Args:
            tokens: patches with their positions, behind the prefix tokens.
            context: (B, K) int64, the tokens that give keys and values in every block; None for all.

        Raises:
            ValueError: a context is given to a model with relative positions.
        """
        tokens = self.norm_pre(tokens)
        if context is None and self.relative is None:
            return self.norm(self.blocks(tokens))
        if context is not None and self.relative is not None:
            raise ValueError("a model with relative positions attends to all tokens; build another variant of it")
        for number, block in enumerate(self.blocks):
            if context is None:
                tokens = block(tokens, attn_mask=self.relative[number].get_bias())
            else:
                tokens = attend_to_context(block, tokens, context)
        return self.norm(tokens)

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
        """Names of parameters without weight decay: those of timm, and those of this class."""
        biases = {n for n, _ in self.named_parameters() if n.endswith("relative_position_bias_table")}
        return super().no_weight_decay() | set(POSITION_TABLES) | biases

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        """timm's layers for layer decay, with the tables and biases of this class in the layers that they act on."""
        groups = super().group_matcher(coarse)
        blocks = [*groups["blocks"], (r"^relative\.(\d+)", None)]
        return {"stem": f"{groups['stem']}|unk_embed|idx_embed", "blocks": blocks}

    def patch_positions(self) -> Tensor | None:
        """Position embeddings of the patches, (N, D), or None if the model has none."""
        return None if self.pos_embed is None else self.pos_embed[0, self.num_prefix_tokens :]


def fixed_positions(grid: tuple[int, int], width: int) -> Tensor:
    """The fixed sin-cos position embedding, (N, D).

    For one row of patches that of Vaswani et al. (section 3.5): sine and cosine of place / 10000^(2k/D), in turns. For
    more rows timm's, with one half of the channels for the row and the other for the column.

    Args:
        grid: patches (rows, columns).
        width: D, a multiple of 4.
    """
    if grid[0] > 1:
        return build_sincos2d_pos_embed(list(grid), dim=width)
    rates = 10_000 ** (-torch.arange(0, width, 2) / width)  # (D / 2,)
    angles = torch.arange(grid[1])[:, None] * rates  # (N, D / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def skip_blocks(module: ViT, rate: float) -> None:
    """Stochastic depth: in training, skip each half of a block for an image with a probability that rises with depth.

    Args:
        rate: probability in the last block, in [0, 1); it falls linearly to 0 in the first, as in timm.
    """
    for number, block in enumerate(module.blocks):
        share = rate * number / max(len(module.blocks) - 1, 1)
        block.drop_path1, block.drop_path2 = (DropPath(share) if share else nn.Identity() for _ in range(2))


def drop_activations(module: ViT, rate: float) -> None:
    """Dropout in training as in ViT's paper (Dosovitskiy et al. 2021, appendix B.1): on the tokens with their positions
    and after every linear layer of a block but that of queries, keys and values.

    Args:
        rate: probability that an activation is set to zero, in [0, 1).
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Dropout) and (name == "pos_drop" or name.endswith((".proj_drop", ".drop1", ".drop2"))):
            layer.p = rate


def attend_to_context(block: Block, tokens: Tensor, context: Tensor) -> Tensor:
    """A block in which all tokens (B, T, D) attend to those at `context` (B, K) alone (MP3, section 3.2).

    The same as the block under an attention mask, but keys, values and scores are computed for K tokens instead of T.
    """
    layer, normed = block.attn, block.norm1(tokens)
    seen = normed.gather(1, context[..., None].expand(-1, -1, normed.shape[-1]))  # (B, K, D)
    width = layer.qkv.out_features // 3
    bias = (None, None) if layer.qkv.bias is None else layer.qkv.bias.split([width, 2 * width])
    weight = merged_weight(layer.qkv)
    queries = functional.linear(normed, weight[:width], bias[0])
    keys, values = functional.linear(seen, weight[width:], bias[1]).chunk(2, dim=-1)
    queries, keys, values = (
        part.unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2) for part in (queries, keys, values)
    )
    queries, keys = layer.q_norm(queries), layer.k_norm(keys)
    if layer.fused_attn:
        rate = layer.attn_drop.p if layer.training else 0.0
        mixed = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=rate)
    else:
        mixed = layer.attn_drop((queries * layer.scale @ keys.mT).softmax(dim=-1)) @ values
    mixed = layer.proj_drop(layer.proj(layer.norm(mixed.transpose(1, 2).flatten(2))))
    tokens = tokens + block.drop_path1(block.ls1(mixed))
    return tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))


class AprilBlock(nn.Module):
    """A block without the first norm and without residuals, for which APRIL's closed form is exact.

    Lu et al., equation 5. The architecture equals that of the `breaching` package, so that both attack the same
    gradient.

    Args:
        block: a timm block, whose attention, second norm and MLP are used.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn, self.norm2, self.mlp = block.attn, block.norm2, block.mlp

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply attention, norm and MLP: tokens (B, T, D) -> (B, T, D)."""
        return self.mlp(self.norm2(self.attn(tokens)))


BlockKind = Literal["standard", "april"]
