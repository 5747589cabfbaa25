"""L-BFGS with line search for losses that are no gradient matching: features and tokens, computed forward.

Unlike the one of `attacks.gradient_matching.optimisers`, which steps without a line search, as `breaching` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Share of evaluations that the line search may take beyond one a step.
LINE_SEARCH = 1.25


def descend(variables: Sequence[Tensor], loss: Callable[[], Tensor | None], steps: int, history: int) -> None:
    """Change `variables` in place so that the loss falls.

    Args:
        variables: without gradients before and after.
        loss: of the variables as they are; None where the search is to end.
        steps: at most.
        history: pairs of differences that are kept.
    """
    optimiser = torch.optim.LBFGS(
        list(variables),
        max_iter=steps,
        max_eval=int(LINE_SEARCH * steps),
        history_size=history,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )

    def evaluate() -> Tensor:
        """The loss and its gradient; 0 without a gradient at the search's end, where L-BFGS stops."""
        optimiser.zero_grad()
        value = loss()
        if value is None:
            return torch.zeros(())
        value.backward()
        return value

    for variable in variables:
        variable.requires_grad_(True)
    try:
        with torch.enable_grad():
            optimiser.step(evaluate)
    finally:
        for variable in variables:
            variable.requires_grad_(False)
