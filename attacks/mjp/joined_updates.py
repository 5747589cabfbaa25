"""Which updates of a client show the image of the last one, and their equations added up.

dL/dE = G^T X has the image's patches for a row space, whatever the weights, and jigsawing only reorders them: an update
of the same image leaves nothing but noise outside the target's row space, an update of another image leaves a part of
that image there. Where patches have no more values than there are patches, the row space is everything and does not
separate images; then the last update is used alone, and the reasons say so.

The weights of the network may change between updates; masked, unmasked and unjigsawed steps mix freely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.linear.masked_update import MaskedUpdate, solve_masked
from attacks.linear.normal_equations import Estimate, NormalEquations
from attacks.linear.position_rows import PositionRows, read_position_rows
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# An update shows the target's image where the share of it outside the target's row space is below this geometric mean
# of the noise (0) and what another photograph leaves there (1).
SAME = 0.5
OTHER_SHARE = 3e-3
LEAST_NOISE = 1e-7  # share of round-off in float32 products


@dataclass(frozen=True)
class JoinedUpdates:
    """What a client's updates give for the last one's image.

    Attributes:
        tokenizer: of the observed model.
        last: the last update, solved.
        equations: of all updates that show its image.
        shown: (N,) bool, patches that at least one of them shows.
        reasons: why not to trust the equations, in words; empty where they hold.
    """

    tokenizer: Tokenizer
    last: MaskedUpdate
    equations: NormalEquations
    shown: Tensor
    reasons: tuple[str, ...]

    def estimate(self) -> Estimate:
        """The solution of all equations."""
        return self.last.estimate() if self.equations.updates == 1 else self.equations.solve()


def join_updates(observations: Sequence[Observation]) -> JoinedUpdates:
    """Add up the updates that show the image of the last observation.

    Raises:
        UsageError: the last update cannot be read at all.
    """
    *earlier, target = _read_all(observations)
    last = solve_masked(target)
    reasons, tokenizer = list(last.reasons), target.tokenizer
    equations = NormalEquations(tokenizer.num_patches, tokenizer.patch_dim, target.rows.device)
    last.add_to(equations)
    shown = ~last.masked
    space = RowSpace.of(target)
    if space is None and len(observations) > 1:
        reasons.append(
            f"patches have {tokenizer.patch_dim} values and there are {tokenizer.num_patches} of them: row spaces do "
            "not show which updates are of the same image (needs values > patches); the last one was used alone"
        )
    if space is not None and not reasons:
        for rows in _same_image(space, earlier, tokenizer):
            update = solve_masked(rows)
            if not update.reasons:
                update.add_to(equations)
                shown = shown | ~update.masked
    return JoinedUpdates(tokenizer, last, equations, shown, tuple(reasons))


def obstacle_to_joining(observations: Sequence[Observation], alone: str) -> str:
    """Why the earlier updates add nothing to the last one, or "".

    Clients with more than one image seldom send the same one twice; then an attack over rounds repeats the answer of
    `alone`, the attack on the last update, at several times its cost.
    """
    if len(observations) == 1:
        return f"only one update of this client was seen: {alone} gives the same answer"
    try:
        rows = updates_of_last_image(observations)
    except UsageError as error:
        return str(error)
    if len(rows) == 1:
        return f"no earlier update of this client shows the image of the last one: {alone} gives the same answer"
    return ""


def updates_of_last_image(observations: Sequence[Observation]) -> list[PositionRows]:
    """The updates that show the image of the last one, which comes last; all where row spaces do not separate images.

    Raises:
        UsageError: the last update cannot be read at all.
    """
    *earlier, target = _read_all(observations)
    space = RowSpace.of(target) if earlier and target.products.isfinite().all() else None
    if space is None:
        return [*(rows for rows in earlier if rows is not None), target]
    return [*_same_image(space, earlier, target.tokenizer), target]


def _same_image(
    space: RowSpace, earlier: Sequence[PositionRows | None], tokenizer: Tokenizer
) -> Iterator[PositionRows]:
    """Those of the earlier updates that were read and show the image of this row space."""
    for rows in earlier:
        if rows is not None and rows.tokenizer == tokenizer and space.holds(rows):
            yield rows


def _read_all(observations: Sequence[Observation]) -> list[PositionRows | None]:
    """Every update, read; None for an earlier one that cannot be read or holds no finite rows."""
    found: list[PositionRows | None] = []
    for observation in observations[:-1]:
        try:
            rows = read_position_rows(observation)
        except UsageError:
            rows = None
        found.append(rows if rows is not None and rows.rows.isfinite().all() else None)
    return [*found, read_position_rows(observations[-1])]


@dataclass(frozen=True)
class RowSpace:
    """The row space of an image's patches, as one update shows it.

    Attributes:
        space: (r, P + 1) orthonormal.
        noise: share of the update's own products outside of it.
    """

    space: Tensor
    noise: float

    @classmethod
    def of(cls, update: PositionRows) -> RowSpace | None:
        """Of one update; None where it could be everything."""
        s, n = update.products, update.tokenizer.num_patches  # (D, P + 1)
        if update.tokenizer.patch_dim <= n:
            return None
        values, vectors = torch.linalg.eigh(s.T @ s)  # ascending
        outside = values[:-n].clamp(min=0).sum() / values.sum()
        return cls(vectors[:, -n:].T, float(outside.sqrt()))

    def share_outside(self, update: PositionRows) -> float:
        """Share of an update's products (by norm) that this row space does not hold."""
        s = update.products
        return float((s - (s @ self.space.T) @ self.space).norm() / s.norm())

    def holds(self, update: PositionRows) -> bool:
        """Whether an update shows the same image."""
        own = max(self.noise, LEAST_NOISE)
        return self.share_outside(update) < own ** (1 - SAME) * OTHER_SHARE**SAME
