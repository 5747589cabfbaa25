"""A learned predictor of places: which piece of a photograph lies where, and which pieces are neighbours.

The encoder is that of DropPos (Wang et al., NeurIPS 2023) at masking ratio 0: it sees all pieces; those in known places
have their position, the others share one embedding (`mask_pos`), and a head scores each piece against each place. With
h_i the encoder's output for piece i, and q the encoding of a place's coordinates,

    place_ij = (W h_i + b) q(u_j),      right_ij = r(h_i) l(h_j),      below_ij = b(h_i) a(h_j).

Departs from DropPos. A place is given to the head by the sines of its coordinates in [0, 1], so that one network serves
every grid. Two more heads score pairs of pieces as neighbours, as an attacker has to place all pieces and not one: they
are trained together with the first. Pieces of every size are resized to SIDE x SIDE pixels. There is no decoder, no
class token, no smoothing of the targets. It is trained on pieces with Gaussian noise of many levels
(`attacks.mjp.piece_training`), because recovered pieces are not exact.

It needs public photographs (`Capability.AUXILIARY_DATA`). The file that ships is described beside it
(piece_predictor.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attacks.linear.learned_file import read_learned, write_learned

SHIPPED = Path(__file__).with_name("piece_predictor.safetensors")
SIDE, CHANNELS = 8, 3
WAVES = 8  # frequencies of the encoding of a coordinate
HEAD_WIDTH = 16
UNKNOWN = -1  # instead of the place of a piece whose place is not known


@dataclass(frozen=True)
class PieceScores:
    """Logits, higher is likelier; rows and columns in the order in which the pieces were given.

    Attributes:
        place: (B, N, N), piece i at place j.
        right: (B, N, N), piece j to the right of piece i.
        below: (B, N, N), piece j below piece i.
    """

    place: Tensor
    right: Tensor
    below: Tensor


class PiecePredictor(nn.Module):
    """The network.

    Args:
        width: channels, a multiple of `HEAD_WIDTH`.
        depth: number of blocks.
    """

    def __init__(self, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.piece = _perceptron(CHANNELS * SIDE**2, 2 * width, width)
        self.known = _perceptron(4 * WAVES + 2, width, width)
        self.unknown = nn.Parameter(torch.zeros(width))
        block = nn.TransformerEncoderLayer(
            width, width // HEAD_WIDTH, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.place_of_piece, self.place = nn.Linear(width, width), _perceptron(4 * WAVES + 2, width, width)
        self.sides = nn.Linear(width, 4 * width)

    def forward(self, pieces: Tensor, grid: tuple[int, int], places: Tensor) -> PieceScores:
        """Score pieces against places and each other.

        Args:
            pieces: (B, N, 3, p, p) in [0, 1] (noise may exceed it).
            grid: (rows, columns), N of them.
            places: (B, N) int64, where each piece lies, or `UNKNOWN`.
        """
        features = place_features(grid).to(pieces)  # (N, F)
        tokens = self.piece(to_side(pieces).flatten(2) - 0.5)  # (B, N, D)
        shown = self.known(features)[places.clamp(min=0)]
        tokens = tokens + torch.where((places == UNKNOWN)[..., None], self.unknown, shown)
        h = self.blocks(tokens)  # (B, N, D)
        scale = h.shape[-1] ** -0.5
        right, left, below, above = self.sides(h).chunk(4, dim=-1)
        return PieceScores(
            place=scale * self.place_of_piece(h) @ self.place(features).T,
            right=scale * right @ left.mT,
            below=scale * below @ above.mT,
        )

    def save(self, path: Path) -> None:
        """Write as safetensors, in half precision."""
        write_learned(self.state_dict(), path)

    @classmethod
    def load(cls, path: Path) -> PiecePredictor:
        """Read what `save` wrote.

        Raises:
            UsageError: no such file, or one that holds something else.
        """

        def build(found: dict[str, Tensor]) -> PiecePredictor:
            """Of the width and depth that the file has."""
            predictor = cls(len(found["unknown"]), sum(name.endswith("norm1.weight") for name in found))
            predictor.load_state_dict(found)
            return predictor.eval()

        return read_learned(path, build, "predictor of places", "train one with benchmarks/piece_predictor.py")


@lru_cache(maxsize=4)
def read_predictor(path: str) -> PiecePredictor:
    """The predictor in a file, or the shipped one for ""; see `PiecePredictor.load`."""
    return PiecePredictor.load(Path(path) if path else SHIPPED)


def to_side(pieces: Tensor) -> Tensor:
    """Pieces (B, N, C, p, p) resized to (B, N, C, SIDE, SIDE): averaged where they are larger."""
    if pieces.shape[-1] == SIDE:
        return pieces
    flat = F.interpolate(pieces.flatten(0, 1), (SIDE, SIDE), mode="bilinear", antialias=True)
    return flat.unflatten(0, pieces.shape[:2])


def place_features(grid: tuple[int, int]) -> Tensor:
    """(N, 4 WAVES + 2): sines and cosines of a place's coordinates in [0, 1], and the size of a place."""
    rows, columns = grid
    centres = torch.cartesian_prod((torch.arange(rows) + 0.5) / rows, (torch.arange(columns) + 0.5) / columns)
    angles = (torch.pi * centres[:, :, None] * torch.arange(1, WAVES + 1)).flatten(1)  # (N, 2 WAVES)
    size = torch.tensor([1 / rows, 1 / columns]).expand(len(centres), 2)
    return torch.cat([angles.sin(), angles.cos(), size], dim=1)


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))
