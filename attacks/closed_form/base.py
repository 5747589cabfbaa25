"""What the closed forms on one image share: from an update to a linear system, from its solution to an image.

A closed form is an equation G^T X = S whose left factors G are the rows of the position gradient. Attacks differ in
where S comes from and in how rows become patches; that is an `Equation`, made once a model. Updates of one model are
solved together, as one batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.base import Attack
from attacks.linear.least_squares import RowSolution, solve_rows
from attacks.linear.position_rows import missing_positions, position_gradient, unmet_assumptions
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer


@dataclass(frozen=True)
class Equation:
    """One model's linear system, for any update of it.

    Attributes:
        first: first row of the position gradient that takes part (0, or the first patch).
        products: gradients by name -> S, (D, P).
        patches: rows X, (R, P) float64 -> normalised patches, (N, P) float64.
        rcond: cut-off of small singular values; None weighs them by the update's own noise.
        caveats: why the equation does not hold on this model, in words; empty where it does.
    """

    first: int
    products: Callable[[Mapping[str, Tensor]], Tensor]
    patches: Callable[[Tensor], Tensor]
    rcond: float | None = None
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClosedForm(Attack):
    """An attack that solves one `Equation` an update."""

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT})

    @abstractmethod
    def equation(self, model: nn.Module, tokenizer: Tokenizer) -> Equation:
        """The model's system.

        Raises:
            UsageError: the model lacks a part that the equation needs.
        """

    def settle(
        self, solution: RowSolution, tokenizer: Tokenizer, observation: Observation, reasons: list[str]
    ) -> Tensor:
        """Rows (R, P) of the solution; an attack may choose among those that the system leaves open.

        Args:
            reasons: why the answer is not to be trusted, so far; may be added to.
        """
        return solution.rows

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds rank, condition, residual, free directions and masked rows."""
        return self.reconstruct_many([observations])[0]

    def reconstruct_many(self, cases: Sequence[Sequence[Observation]]) -> list[Reconstruction]:
        """See `Attack.reconstruct_many`: one solve for all updates of the same model."""
        groups = defaultdict(list)
        for index, case in enumerate(cases):
            groups[id(case[-1].model), case[-1].image_shape].append(index)
        found: dict[int, Reconstruction] = {}
        for members in groups.values():
            found |= zip(members, self._of_one_model([cases[i][-1] for i in members]), strict=True)
        return [found[i] for i in range(len(cases))]

    def _of_one_model(self, observations: list[Observation]) -> list[Reconstruction]:
        try:
            tokenizer = find_tokenizer(observations[0].model, observations[0].image_shape)
            gradients = [position_gradient(o, tokenizer) for o in observations]
            usable = [i for i, rows in enumerate(gradients) if rows is not None]
            found = [Reconstruction(images=None, diagnosis=missing_positions(tokenizer))] * len(observations)
            if not usable:
                return found
            equation = self.equation(observations[0].model, tokenizer)
        except UsageError as error:
            return [Reconstruction(images=None, diagnosis=str(error))] * len(observations)
        factors = torch.stack([gradients[i][equation.first :] for i in usable])  # (B, R, D)
        products = torch.stack([equation.products(observations[i].gradients) for i in usable])  # (B, D, P)
        for i, solution in zip(usable, solve_rows(factors, products, rcond=equation.rcond), strict=True):
            masked = gradients[i][tokenizer.prefix :].abs().amax(dim=1) == 0  # (N,)
            found[i] = self._finish(observations[i], tokenizer, equation, solution, masked)
        return found

    def _finish(
        self, observation: Observation, tokenizer: Tokenizer, equation: Equation, solution: RowSolution, masked: Tensor
    ) -> Reconstruction:
        reasons = unmet_assumptions(observation.num_examples, observation.local_steps)
        if masked.any():
            reasons.append(
                f"{int(masked.sum())} of {len(masked)} position rows are exactly zero: those patches hide behind a "
                "shared position embedding (MJP) and spoil the solve of the others"
            )
        reasons += equation.caveats
        patches = equation.patches(self.settle(solution, tokenizer, observation, reasons))
        images = observation.to_pixels(tokenizer.unpatchify(patches[None])).float()
        known = torch.full_like(images[:, :1], not reasons, dtype=torch.bool)
        hidden = int(masked.sum())
        details = {
            "rank": solution.rank,
            "condition": solution.condition,
            "residual": solution.residual,
            "free": solution.free - hidden,
            "masked": hidden,
        }
        batch = (observation.num_examples, -1, -1, -1)
        return Reconstruction(
            images.expand(batch),
            known.expand(batch),
            diagnosis="; ".join(reasons),
            details=details,
            flags=("zero_rows_ignored",) if hidden else (),
        )
