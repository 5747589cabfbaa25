"""What the closed forms on one image share: from an update to a linear system, from its solution to an image.

A closed form is an equation G^T X = S whose left factors G are the rows of the position gradient. Attacks differ in
where S comes from and in how rows become patches; that is an `Equation`, made once a model. Updates of one model are
solved together, as one batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.base import Attack
from attacks.linear.completion import render
from attacks.linear.intervals import COARSE, coarseness
from attacks.linear.least_squares import RowSolution, solve_rows
from attacks.linear.position_rows import (
    missing_positions,
    position_gradient,
    remove_localisation,
    rounding_of_balance,
    unbalanced,
    unmet_assumptions,
    unseen_localisation,
)
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer


@dataclass(frozen=True)
class Equation:
    """One model's linear system, for any update of it.

    Attributes:
        first: first row of the position gradient that takes part (0, or the first patch).
        products: update -> S, (D, P); raises UsageError where the update lacks a gradient.
        patches: rows X, (R, P) float64 -> normalised patches, (N, P) float64.
        rcond: cut-off of small singular values; None weighs them by the update's own noise.
        caveats: why the equation does not hold on this model, in words; empty where it does.
        adds_up: the equation holds for the sum of several steps on one image, however the weights move in between.
    """

    first: int
    products: Callable[[Observation], Tensor]
    patches: Callable[[Tensor], Tensor]
    rcond: float | None = None
    caveats: tuple[str, ...] = ()
    adds_up: bool = False


@dataclass(frozen=True)
class System:
    """One update's linear system.

    Attributes:
        factors, products: (R, D) float64 and (D, P), see `solve_rows`.
        sent: type of the gradients.
        masked: (N,) bool, position rows that are exactly zero.
        reasons: why the system does not hold, in words; empty where it does.
    """

    tokenizer: Tokenizer
    equation: Equation
    factors: Tensor
    products: Tensor
    sent: torch.dtype
    masked: Tensor
    reasons: tuple[str, ...]


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
        self, solution: RowSolution, system: System, observation: Observation, reasons: list[str]
    ) -> tuple[Tensor, Tensor | None]:
        """Rows (R, P) of the solution, where an attack may choose among those that the system leaves open, and (N,)
        bool, the patches to vouch for where there are no reasons; None for all of them.

        Args:
            reasons: why the answer is not to be trusted, so far; may be added to.
        """
        return solution.rows, None

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
        found: dict[int, Reconstruction] = {}
        systems: dict[int, System] = {}
        equation = cache(self.equation)
        for i, observation in enumerate(observations):
            try:
                systems[i] = self._system(observation, equation)
            except UsageError as error:
                found[i] = Reconstruction(images=None, diagnosis=str(error))
        if systems:
            factors = torch.stack([system.factors for system in systems.values()])  # (B, R, D)
            products = torch.stack([system.products for system in systems.values()])  # (B, D, P)
            first = next(iter(systems.values()))
            solutions = solve_rows(factors, products, rcond=first.equation.rcond, sent=first.sent)
            for (i, system), solution in zip(systems.items(), solutions, strict=True):
                found[i] = self._finish(observations[i], system, solution)
        return [found[i] for i in range(len(observations))]

    def _system(self, observation: Observation, equation_of: Callable[[nn.Module, Tokenizer], Equation]) -> System:
        """The linear system of one update.

        Args:
            equation_of: `equation`, computed once a model.

        Raises:
            UsageError: model or update lack what the equation needs.
        """
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
        rows = position_gradient(observation, tokenizer)  # (prefix + N, D)
        if rows is None:
            raise UsageError(missing_positions(observation, tokenizer))
        sent, masked = rows.dtype, rows[tokenizer.prefix :].abs().amax(dim=1) == 0  # (N,)
        if masked.any() and not tokenizer.hides_positions and coarseness(observation, (tokenizer.positions,)) > COARSE:
            masked = torch.zeros_like(masked)  # rows too small for the message's precision
        equation = equation_of(observation.model, tokenizer)
        reasons = unmet_assumptions(observation.num_examples, 1 if equation.adds_up else observation.local_steps)
        if masked.any():
            reasons.append(
                f"{int(masked.sum())} of {len(masked)} position rows are exactly zero: those patches hide behind a "
                "shared position embedding (MJP) and spoil the solve of the others"
            )
        elif tokenizer.localisation is not None:
            clean, _, _, imbalance = remove_localisation(observation, tokenizer, rows[tokenizer.prefix :])
            rows = torch.cat([rows[: tokenizer.prefix].to(clean), clean])
            reasons += unbalanced(imbalance, rounding_of_balance(observation, tokenizer))
            reasons += unseen_localisation(observation, tokenizer, clean, masked)
        factors, products = rows[equation.first :].double(), equation.products(observation)
        return System(tokenizer, equation, factors, products, sent, masked, (*reasons, *equation.caveats))

    def _finish(self, observation: Observation, system: System, solution: RowSolution) -> Reconstruction:
        tokenizer, reasons = system.tokenizer, list(system.reasons)
        rows, sure = self.settle(solution, system, observation, reasons)
        patches = system.equation.patches(rows)
        sure = torch.ones_like(patches[:, 0], dtype=torch.bool) if sure is None else sure
        hidden = int(system.masked.sum())
        details = {
            "rank": solution.rank,
            "condition": solution.condition,
            "residual": solution.residual,
            "free": solution.free - hidden,
            "masked": hidden,
        }
        found = render(observation, tokenizer, patches, sure, "; ".join(reasons), details)
        return replace(found, flags=("zero_rows_ignored",) if hidden else ())
