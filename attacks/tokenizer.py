"""The parameters of a ViT that attacks use, by name: patch projection, position embedding, and what MJP adds to them.

Works on timm, torchvision and Hugging Face ViTs by looking for the structure, not for a class: a convolution whose
stride is its kernel, and a parameter of positions with one row a patch (plus prefix rows) and as many columns as the
projection has channels. `check_tokenizer` proves on made-up input that z = E x + b + e holds, which names alone cannot
show.

Two layouts of MJP are known. Ours has the shared embedding of masked positions as a parameter of its own, and its
`forward` takes a mask (B, N). The authors' released code (github.com/yhlleo/MJP, models/vit_timm.py) has one
`nn.Embedding` of N + 2 rows: class token, patches, shared embedding, whose row number is the model's attribute
`unk_embed_index`; its `forward` takes an integer mask (B, 1 + N) that covers the class token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.registry import UsageError

MAX_PREFIX_TOKENS = 8
# Names of what has no structure to be found by: the prefix tokens of timm, torchvision and Hugging Face, and the parts
# of an MJP model.
PREFIX_TOKENS = ("cls_token", "class_token", "dist_token", "distillation_token", "reg_token", "register_tokens")
LOCALISATION, RELEASED_LOCALISATION = "dal", "dlocr"
PATCH_MASK, TOKEN_MASK = "position_mask", "unk_mask"
SHARED_ROW = "unk_embed_index"
# Where models that return an object keep their logits: Hugging Face, MJP's released code.
LOGITS = ("logits", "sup")


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
        prefix_rows: how many tokens they are, with a position or without.
        shared_position: name of the embedding that all masked positions share under MJP, (1, 1, D), or None.
        shared_row: number of the row of `positions` that all masked positions share, in the released layout, or None.
        localisation: name of the submodule of MJP's localisation loss, or None (`LOCALISATION` is called with the
            patches' positions, the grid and the mask, `RELEASED_LOCALISATION` with all positions and the visible ones).
        mask_argument: name of the keyword argument of `forward` that takes the mask of positions, or None.
        fixed_positions: name of a position embedding that is not trained (a frozen parameter, or a buffer of sines), or
            None; `prefix` counts its rows where `positions` is None.
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
    prefix_rows: int = 0
    shared_position: str | None = None
    shared_row: int | None = None
    localisation: str | None = None
    mask_argument: str | None = None
    fixed_positions: str | None = None

    @property
    def num_patches(self) -> int:
        """N."""
        return self.grid[0] * self.grid[1]

    @property
    def hides_positions(self) -> bool:
        """Whether the model has an embedding that masked positions share."""
        return self.shared_position is not None or self.shared_row is not None

    @property
    def patch_dim(self) -> int:
        """P = C p^2."""
        return self.channels * self.patch_size**2

    def position_rows(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Rows of the position embedding, prefix first, (prefix + N, D); None where `tensors` does not hold it.

        Args:
            tensors: parameters or their gradients, by name.
        """
        table = tensors.get(self.positions) if self.positions else None
        if table is None:
            return None
        rows = table.reshape(-1, self.width)
        return rows if self.shared_row is None else torch.cat([rows[: self.shared_row], rows[self.shared_row + 1 :]])

    def shared_embedding(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The embedding that all masked positions share, (D,), or None; arguments as for `position_rows`."""
        if self.shared_row is not None:
            table = tensors.get(self.positions)
            return None if table is None else table.reshape(-1, self.width)[self.shared_row]
        shared = tensors.get(self.shared_position) if self.shared_position else None
        return None if shared is None else shared.reshape(self.width)

    def sent_positions(self, model: nn.Module) -> Tensor | None:
        """Rows of the position embedding that the model adds, trained or not, (prefix + N, D); None without one."""
        if self.positions is not None:
            return self.position_rows(dict(model.named_parameters()))
        tables = dict((*model.named_parameters(), *model.named_buffers()))
        return None if self.fixed_positions is None else tables[self.fixed_positions].reshape(-1, self.width)

    def replace_patch_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """`table`, the position embedding or its gradient, with the patches' rows (N, D) in place of its own."""
        changed = table.reshape(-1, self.width).clone()
        places = [i for i in range(len(changed)) if i != self.shared_row][self.prefix :]
        changed[places] = rows.to(changed)
        return changed.reshape(table.shape)

    def mask_kwargs(self, masked: Tensor) -> dict[str, Tensor]:
        """Keyword arguments of `forward` that mask positions (B, N) bool; the model must have a `mask_argument`."""
        if self.mask_argument == TOKEN_MASK:
            return {TOKEN_MASK: functional.pad(masked.long(), (self.prefix, 0))}
        return {self.mask_argument: masked}

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
    parameters = list(model.named_parameters())
    trained = [(n, p) for n, p in parameters if p.requires_grad]
    positions, prefix = _find_table(trained, "pos", grid[0] * grid[1], conv.out_channels)
    second, _ = _find_table(trained, "idx", grid[0] * grid[1], conv.out_channels)
    fixed = None
    if positions is None:
        fixed, prefix = _find_table((*parameters, *model.named_buffers()), "pos", grid[0] * grid[1], conv.out_channels)
    if second is not None:
        raise SecondTable(
            f"{type(model).__name__} adds a second table of embeddings to its tokens ({second}): they are not "
            "projection + position, and no attack here is written for that; it does not make the update any safer"
        )
    bias = f"{name}.bias" if conv.bias is not None else None
    shared = _find_shared_position(parameters, conv.out_channels)
    row = getattr(model, SHARED_ROW, None) if positions else None
    hides = shared is not None or row is not None
    own = _prefix_tokens(parameters, name, conv.out_channels)
    return Tokenizer(
        f"{name}.weight",
        bias,
        positions,
        prefix - (row is not None),
        p,
        grid,
        channels,
        conv.out_channels,
        prefix_tokens=tuple(own),
        prefix_rows=sum(own.values()),
        shared_position=shared,
        shared_row=row,
        localisation=_first(n for n in (LOCALISATION, RELEASED_LOCALISATION) if _has_module(model, n)),
        mask_argument=_first(n for n in (PATCH_MASK, TOKEN_MASK) if hides and _takes(model, n)),
        fixed_positions=fixed,
    )


def _prefix_tokens(parameters: Sequence[tuple[str, nn.Parameter]], projection: str, width: int) -> dict[str, int]:
    """Tokens of the modules around the patch projection that are parameters: name -> how many, in their usual order."""
    found = {}
    for last in PREFIX_TOKENS:
        for name, parameter in parameters:
            owner, _, own = name.rpartition(".")
            around = not owner or projection.startswith(f"{owner}.")
            if own == last and around and parameter.shape[-1] == width:
                found[name] = parameter.numel() // width
    return found


def has_tokenizer(model: nn.Module, image_shape: tuple[int, int, int]) -> bool:
    """Whether `find_tokenizer` finds one."""
    try:
        find_tokenizer(model, image_shape)
    except UsageError:
        return False
    return True


def _cuts_patches(conv: nn.Conv2d) -> bool:
    square = conv.kernel_size[0] == conv.kernel_size[1]
    return square and conv.kernel_size == conv.stride and conv.padding in ((0, 0), "valid") and conv.groups == 1


def _find_shared_position(parameters: Sequence[tuple[str, Tensor]], width: int) -> str | None:
    """Name of the one parameter with `width` entries and the word "unk" in its name; None without one, or with two."""
    found = [n for n, p in parameters if "unk" in n.lower() and p.numel() == width]
    return found[0] if len(found) == 1 else None


def _first(names: Iterator[str]) -> str | None:
    return next(names, None)


def _has_module(model: nn.Module, name: str) -> bool:
    return isinstance(getattr(model, name, None), nn.Module)


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _find_table(
    tensors: Iterable[tuple[str, Tensor]], word: str, num_patches: int, width: int
) -> tuple[str | None, int]:
    """Name of the table with a row a patch and `word` in its name, and the number of its prefix rows; (None, 0)
    without one."""
    for name, table in tensors:
        if word not in name.lower() or table.dim() not in (2, 3) or table.shape[-1] != width:
            continue
        if 0 <= table.numel() // width - num_patches <= MAX_PREFIX_TOKENS:
            return name, table.numel() // width - num_patches
    return None, 0


def logits_of(output: Any) -> Tensor:
    """The logits (B, K) in what a classifier's `forward` returns: a tensor, a tuple, or an object of a library."""
    if isinstance(output, (tuple, list)):
        return output[0]
    return next((getattr(output, name) for name in LOGITS if hasattr(output, name)), output)


def check_tokenizer(model: nn.Module, tokenizer: Tokenizer, image_shape: tuple[int, int, int]) -> float:
    """Prove on made-up input that dL/dE = G^T X holds, so that the closed forms apply to this model.

    One forward and backward pass in the model's current mode, from a random projection of the last layer whose output
    is tokens: a classifier initialised with zeros would hide whatever comes before it. The model's own gradients and
    the parameters that it trains are left as they were.

    Returns:
        The relative error of the identity (about 1e-6 in float32 where it holds, near 1 where it does not).

    Raises:
        UsageError: the model cannot be run on images of this shape, has no position embedding, lets nothing through to
            its tokens, or something stands between projection and position embedding (a normalisation, say), so that
            the identity does not hold.
    """
    name = type(model).__name__
    if tokenizer.positions is None:
        raise UsageError(f"{name} has no learnable position embedding with one row a patch")
    parameters = dict(model.named_parameters())
    wanted = [parameters[tokenizer.weight], parameters[tokenizer.positions]]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, *image_shape, generator=generator).to(wanted[0])
    with torch.enable_grad(), _trained(wanted):
        tokens = _last_tokens(model, images, tokenizer)
        weights = torch.randn(tokens.shape, generator=generator).to(tokens)
        gradients = torch.autograd.grad((tokens * weights).sum(), wanted, allow_unused=True)
    if any(gradient is None or not gradient.any() for gradient in gradients):
        raise UsageError(f"{name}: its output does not depend on patch projection and position embedding")
    expected = gradients[0].flatten(1)  # (D, P)
    rows = tokenizer.position_rows({tokenizer.positions: gradients[1]})[tokenizer.prefix :]  # (N, D)
    error = float((rows.T @ tokenizer.patchify(images)[0] - expected).norm() / expected.norm())
    if not error < 1e-3:
        raise UsageError(
            f"{name}: tokens are not projection + position (dL/dE differs from G^T X by {error:.0%}); "
            "the closed forms do not apply to this model"
        )
    return error


@contextmanager
def _trained(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters that require gradients inside the block, frozen ones too."""
    before = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)


def _last_tokens(model: nn.Module, images: Tensor, tokenizer: Tokenizer) -> Tensor:
    """The last output of a layer that holds at least one row of D channels a patch; the logits where there is none.

    Raises:
        UsageError: `forward` fails.
    """
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        """Remember an output that is tokens."""
        shape = tuple(output.shape) if isinstance(output, Tensor) else ()
        if len(shape) == 3 and shape[2] == tokenizer.width and shape[0] * shape[1] >= tokenizer.num_patches:
            found[:] = [output]

    hooks = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        logits = logits_of(model(images))
    except Exception as error:  # a model may be anybody's code
        shape, what = tuple(images.shape[1:]), f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"{type(model).__name__} cannot be run on images of shape {shape} ({what})") from error
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else logits
