"""Inverses of a block a patch against dense inverses."""

import pytest
import torch

from attacks.linear import block_inverses
from attacks.linear.block_inverses import invert_blocks

N, K = 5, 12


def draw(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales (N,), a Hessian of rank K - 2, precisions (K,) of very different sizes, x (N, K), M (K, K)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(K - 2, K, generator=generator, dtype=torch.float64)
    scales = torch.logspace(0, 3, N, dtype=torch.float64)
    x = torch.randn(N, K, generator=generator, dtype=torch.float64)
    m = torch.randn(K, K, generator=generator, dtype=torch.float64)
    return scales, rows.T @ rows, torch.logspace(-4, 8, K, dtype=torch.float64), x, m @ m.T


def spread(precision: torch.Tensor, how: str) -> torch.Tensor:
    """(N, K) precisions: equal in all blocks, multiples of one row, or different."""
    weights = torch.linspace(0.5, 2, N, dtype=torch.float64)[:, None]
    if how == "equal":
        return precision.expand(N, K)
    return weights * precision if how == "multiples" else precision ** (1 + weights / 10)


@pytest.mark.parametrize(
    ("how", "kind"), [("equal", "_Shared"), ("multiples", "_Shared"), ("different", "_Factored"), ("one", "_Shared")]
)
def test_blocks_are_inverted_as_dense_matrices_are(how: str, kind: str) -> None:
    scales, hessian, precision, x, m = draw()
    own = spread(precision, "equal" if how == "one" else how)
    blocks = invert_blocks(scales, hessian, precision if how == "one" else own)
    assert type(blocks).__name__ == kind
    for i in range(N):
        inverse = torch.linalg.inv(scales[i] * hessian + torch.diag(own[i]))
        torch.testing.assert_close(blocks.solve(x)[i], inverse @ x[i], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(blocks.traces(m)[i], (inverse @ m).trace(), rtol=1e-6, atol=0)


def test_directions_of_which_nothing_is_known() -> None:
    scales, hessian, _, x, _ = draw()
    hessian = hessian + torch.eye(K).double()
    blocks = invert_blocks(scales, hessian, torch.zeros(K).double())
    torch.testing.assert_close(blocks.solve(x), torch.linalg.solve(hessian, x.T).T / scales[:, None])


def test_large_blocks_of_their_own_keep_their_diagonals(monkeypatch) -> None:
    monkeypatch.setattr(block_inverses, "LARGE", K - 1)
    scales, hessian, precision, x, m = draw()
    own = spread(precision, "different")
    diagonals = scales[:, None] * hessian.diagonal() + own
    blocks = invert_blocks(scales, hessian, own)
    torch.testing.assert_close(blocks.solve(x), x / diagonals)
    torch.testing.assert_close(blocks.traces(m), (m.diagonal() / diagonals).sum(dim=1))
