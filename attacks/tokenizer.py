"""The parameters of a ViT that attacks use, by name: patch projection, position embedding, and what MJP adds to them.

Works on timm, torchvision and Hugging Face ViTs by looking for the structure, not for a class: a convolution whose
stride is its kernel, and a parameter of positions with one row a patch (plus prefix rows) and as many columns as the
projection has channels. `check_tokenizer` proves on made-up input that z = E x + b + e holds, which names alone cannot
show.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.registry import UsageError

MAX_PREFIX_TOKENS = 8
# Names of what has no structure to be found by: timm's class and register tokens, and the parts of an MJP model.
PREFIX_TOKENS = ("cls_token", "reg_token")
LOCALISATION = "dal"
MASK_ARGUMENT = "position_mask"


class SecondTable(UsageError):
    """The model adds a second table of embeddings to its tokens, so that they are not projection + position."""


@dataclass(frozen=True)
class Tokenizer:
    """The linear map z_i = E x_i + b + e_i of a ViT, by parameter name.

    Attributes:
        weight, bias: names of E, (D, C, p, p), and b, (D,); `bias` is None where the projection has none.
        positions: name of the learnable position embedding, (1, N + prefix, D) or (N + prefix, D), or None.
        prefix: position rows that come before the patches' (class and register tokens).
        patch_size: p in pixels.
        grid: patches (rows, columns); N = rows * columns.
        channels: C, colour channels of a patch.
        width: D, channels of a token.
        prefix_tokens: names of the parameters that are tokens themselves (class and register tokens), in their order.
        shared_position: name of the embedding that all masked positions share under MJP, (1, 1, D), or None.
        localisation: name of the submodule of MJP's localisation loss, called with (positions, grid, mask), or None.
        mask_argument: name of the keyword argument of `forward` that takes the mask of positions (B, N), or None.
    """

    weight: str
    bias: str | None
    positions: str | None
    prefix: int
    patch_size: int
    grid: tuple[int, int]
    channels: int
    width: int
    prefix_tokens: tuple[str, ...] = ()
    shared_position: str | None = None
    localisation: str | None = None
    mask_argument: str | None = None

    @property
    def num_patches(self) -> int:
        """N."""
        return self.grid[0] * self.grid[1]

    @property
    def patch_dim(self) -> int:
        """P = C p^2."""
        return self.channels * self.patch_size**2

    def patchify(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, C p p), each patch flattened in the projection's order (channel, row, column).

        Any number of channels will do, so that maps of weights are cut as images are.
        """
        (rows, columns), p = self.grid, self.patch_size
        cut = images.reshape(len(images), -1, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5)
        return cut.reshape(len(images), rows * columns, -1)

    def unpatchify(self, patches: Tensor) -> Tensor:
        """(B, N, C p p) -> (B, C, H, W), the inverse of `patchify`."""
        (rows, columns), p = self.grid, self.patch_size
        laid = patches.reshape(len(patches), rows, columns, -1, p, p).permute(0, 3, 1, 4, 2, 5)
        return laid.reshape(len(patches), -1, rows * p, columns * p)


def find_tokenizer(model: nn.Module, image_shape: tuple[int, int, int]) -> Tokenizer:
    """Find the tokenizer of a ViT.

    Args:
        model: any torch module; timm, torchvision and Hugging Face ViTs are known to work.
        image_shape: (C, H, W) of the inputs.

    Raises:
        UsageError: the model has no patch projection, or the image does not divide into its patches.
        SecondTable: see there.
    """
    channels, height, width = image_shape
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.in_channels == channels
    ]
    if not found or not _cuts_patches(found[0][1]):
        raise UsageError(
            f"{type(model).__name__} has no patch projection (a first convolution whose stride equals its kernel): "
            "the attacks on patch embeddings need a Vision Transformer"
        )
    name, conv = found[0]
    p = conv.kernel_size[0]
    if height % p or width % p:
        raise UsageError(f"images of {height} x {width} pixels do not divide into patches of {p}")
    grid = (height // p, width // p)
    positions, prefix = _find_table(model, "pos", grid[0] * grid[1], conv.out_channels)
    second, _ = _find_table(model, "idx", grid[0] * grid[1], conv.out_channels)
    if second is not None:
        raise SecondTable(
            f"{type(model).__name__} adds a second table of embeddings to its tokens ({second}): they are not "
            "projection + position, and no attack here is written for that; it does not make the update any safer"
        )
    bias = f"{name}.bias" if conv.bias is not None else None
    shared = _find_shared_position(model, conv.out_channels)
    return Tokenizer(
        f"{name}.weight",
        bias,
        positions,
        prefix,
        p,
        grid,
        channels,
        conv.out_channels,
        prefix_tokens=tuple(n for n, _ in model.named_parameters() if n in PREFIX_TOKENS),
        shared_position=shared,
        localisation=LOCALISATION if isinstance(getattr(model, LOCALISATION, None), nn.Module) else None,
        mask_argument=MASK_ARGUMENT if shared and _takes(model, MASK_ARGUMENT) else None,
    )


def has_tokenizer(model: nn.Module, image_shape: tuple[int, int, int]) -> bool:
    """Whether `find_tokenizer` finds one."""
    try:
        find_tokenizer(model, image_shape)
    except UsageError:
        return False
    return True


def _cuts_patches(conv: nn.Conv2d) -> bool:
    square = conv.kernel_size[0] == conv.kernel_size[1] > 1
    return square and conv.kernel_size == conv.stride and conv.padding in ((0, 0), "valid") and conv.groups == 1


def _find_shared_position(model: nn.Module, width: int) -> str | None:
    """Name of the one parameter with `width` entries and the word "unk" in its name; None without one, or with two."""
    found = [n for n, p in model.named_parameters() if "unk" in n.lower() and p.numel() == width]
    return found[0] if len(found) == 1 else None


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _find_table(model: nn.Module, word: str, num_patches: int, width: int) -> tuple[str | None, int]:
    """Name of the learnable table with a row a patch and `word` in its name, and the number of its prefix rows; (None,
    0) without one."""
    for name, parameter in model.named_parameters():
        if word not in name.lower() or not parameter.requires_grad or parameter.shape[-1] != width:
            continue
        rows = parameter.numel() // width
        if parameter.dim() in (2, 3) and 0 <= rows - num_patches <= MAX_PREFIX_TOKENS:
            return name, rows - num_patches
    return None, 0


def check_tokenizer(model: nn.Module, tokenizer: Tokenizer, image_shape: tuple[int, int, int]) -> float:
    """Prove on made-up input that dL/dE = G^T X holds, so that the closed forms apply to this model.

    One forward and backward pass in the model's current mode; the model's own gradients are left as they were.

    Returns:
        The relative error of the identity (about 1e-6 in float32 where it holds, near 1 where it does not).

    Raises:
        UsageError: the model has no position embedding, or something stands between projection and position
            embedding (a normalisation, say), so that the identity does not hold.
    """
    if tokenizer.positions is None:
        raise UsageError(f"{type(model).__name__} has no learnable position embedding with one row a patch")
    parameters = dict(model.named_parameters())
    weight, positions = parameters[tokenizer.weight], parameters[tokenizer.positions]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, *image_shape, generator=generator).to(weight)
    with torch.enable_grad():
        output = model(images)
        output = getattr(output, "logits", output)
        output = getattr(output, "last_hidden_state", output)
        grad_weight, rows = torch.autograd.grad(output.square().sum(), [weight, positions])
    rows = rows.reshape(-1, tokenizer.width)[tokenizer.prefix :]  # (N, D)
    expected = grad_weight.flatten(1)  # (D, P)
    error = float((rows.T @ tokenizer.patchify(images)[0] - expected).norm() / expected.norm())
    if not error < 1e-3:
        raise UsageError(
            f"{type(model).__name__}: tokens are not projection + position (dL/dE differs from G^T X by {error:.0%}); "
            "the closed forms do not apply to this model"
        )
    return error
