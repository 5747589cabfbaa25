"""Gradients of several sparse rounds against loops over clients that are simulated entry by entry."""

from __future__ import annotations

import math

import pytest
import torch

from attacks.linear.sparse_sums import RoundsOfEntries

N, ROUNDS = 400, 24


def rounds_of(
    *, memory: bool, random: bool, share: float = 0.2, drift: float = 0.0
) -> tuple[RoundsOfEntries, torch.Tensor]:
    """What a client sends in `ROUNDS` rounds, and its mean gradient, one entry after the other."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(N, generator=generator, dtype=torch.float64).exp() * torch.randn(N, generator=generator).sign()
    gradients = [
        base * (1 + drift * t * torch.randn(N, generator=generator, dtype=torch.float64)) for t in range(ROUNDS)
    ]
    kept, sent, limits = [0.0] * N, [], []
    for gradient in gradients:
        whole = [float(g) + (m if memory else 0.0) for g, m in zip(gradient, kept, strict=True)]
        order = sorted(range(N), key=lambda i: -abs(whole[i]))
        order = torch.randperm(N, generator=generator).tolist() if random else order
        chosen = set(order[: round(share * N)])
        sent.append([whole[i] if i in chosen else 0.0 for i in range(N)])
        kept = [0.0 if i in chosen else whole[i] for i in range(N)]
        limits.append(math.inf if random else min(abs(whole[i]) for i in chosen))
    entries = torch.tensor(sent, dtype=torch.float64)
    found = RoundsOfEntries(entries, torch.tensor(limits, dtype=torch.float64), torch.zeros_like(entries))
    return found, torch.stack(gradients).mean(dim=0)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("memory", [False, True])
def test_both_kinds_of_clients_are_told_apart_and_constant_gradients_found(memory: bool, random: bool) -> None:
    rounds, truth = rounds_of(memory=memory, random=random)
    assert rounds.has_memory() == memory or (not memory and not random)  # all waits are equal there
    changes = rounds.disagreement(memory=memory)
    assert changes == pytest.approx(0, abs=1e-9)
    mean, bounds = rounds.mean(changes, memory=memory)
    sent = rounds.on.any(dim=0)
    torch.testing.assert_close(mean[sent], truth[sent], rtol=1e-9, atol=1e-12)
    assert bool((bounds[sent] < 1e-8).all())
    if not random:
        assert bool(((mean - truth).abs() <= bounds + 1e-12).all())
    if memory or random:
        assert float(sent.double().mean()) > 0.75
    else:
        assert float(sent.double().mean()) == pytest.approx(0.2)


@pytest.mark.parametrize("random", [False, True])
def test_most_gradients_that_change_are_within_their_bounds(random: bool) -> None:
    rounds, truth = rounds_of(memory=True, random=random, drift=3e-3)
    assert rounds.has_memory()
    changes = rounds.disagreement(memory=True)
    assert 0.003 < changes < 0.2
    mean, bounds = rounds.mean(changes, memory=True)
    sent = rounds.on.any(dim=0)
    error = (mean - truth).abs()
    assert float((error <= bounds + 1e-12)[sent].double().mean()) > 0.8
    assert float(error[sent].square().sum()) < 2.5 * float(bounds[sent].square().sum()) / 3
    plain = (rounds.sent.sum(dim=0) / ROUNDS - truth).abs()
    assert float(error[sent].square().sum()) < 0.1 * float(plain[sent].square().sum())


def test_few_rounds_show_nothing_of_how_gradients_change() -> None:
    rounds, _ = rounds_of(memory=True, random=False)
    first = RoundsOfEntries(rounds.sent[:1], rounds.limits[:1], rounds.errors[:1])
    assert math.isnan(first.disagreement(memory=True))
    assert first.has_memory()
    mean, bounds = first.mean(1.0, memory=True)
    torch.testing.assert_close(mean, rounds.sent[0])
    assert bool((bounds[mean == 0] == float(rounds.limits[0])).all())
