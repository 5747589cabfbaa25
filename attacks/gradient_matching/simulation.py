"""Choose the engine that simulates an attack's clients, the parameters that are matched, and the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.classifier import layer_of_logits
from attacks.gradient_matching.differences import STEPS, FiniteDifferences
from attacks.gradient_matching.gradients import Target
from attacks.gradient_matching.matched_update import MatchedUpdate
from attacks.gradient_matching.random_masks import MaskedClients
from attacks.gradient_matching.unrolled import Simulation, Unrolled, math_attention
from attacks.observation import Observation

# Relative difference between the two engines' derivatives that round-off and the finite step can cause.
MAX_DISAGREEMENT = 0.02


def build_simulation(
    observation: Observation,
    updates: Sequence[MatchedUpdate],
    restarts: int,
    *,
    exact: bool = False,
    mask_draws: int = 0,
    seed: int = 0,
) -> tuple[Simulation, Target]:
    """Simulated clients for the victims of one model, and the gradients they are matched to.

    Args:
        observation: of any one of the victims (they share model, batch size and local steps).
        updates: one per victim.
        restarts: searches per victim that run in parallel.
        exact: derivatives exact to round-off, with respect to labels too. Otherwise `FiniteDifferences`, about twice
            as fast, is used where the clients take one step and the model allows it.
        mask_draws: masks of dropout and stochastic depth over which every gradient is averaged (`MaskedClients`); 0 for
            clients in evaluation mode.
        seed: of these masks.

    Returns:
        The simulation of L = victims x restarts clients, and their target.

    Raises:
        UsageError: masks are asked for, and the model drops nothing.
    """
    masks = _masks(updates)
    masks = None if masks is None else masks.repeat_interleave(restarts, dim=0)
    unrolled = Unrolled(observation, masks)
    images, labels = _probe(observation, unrolled)
    with math_attention(), torch.enable_grad():
        reached = unrolled.reached(images, labels)
        sent = set.intersection(*(set(update.gradients) for update in updates))
        names = unrolled.names = tuple(name for name in reached if name in sent)
        alone = images[0].detach()
        unrolled.head = layer_of_logits(unrolled.model, lambda: unrolled.logits(unrolled.weights, alone, None)) or ""
        stacked = {n: torch.stack([u.gradients[n] for u in updates]).to(unrolled.weights[n].dtype) for n in names}
        values = {n: gradients.repeat_interleave(restarts, dim=0) for n, gradients in stacked.items()}
        target = Target.of(values)
        if mask_draws:
            return MaskedClients(unrolled, mask_draws, seed), target
        if exact or observation.local_steps > 1:
            return unrolled, target
        return _quick(unrolled, images, labels) or unrolled, target


def _masks(updates: Sequence[MatchedUpdate]) -> Tensor | None:
    """(V, N) bool, or None if no victim masks positions."""
    known = [update.mask for update in updates if update.mask is not None]
    if not known:
        return None
    return torch.stack([torch.zeros_like(known[0]) if u.mask is None else u.mask for u in updates])


def _probe(observation: Observation, simulation: Simulation) -> tuple[Tensor, Tensor]:
    """Random images and labels for one simulated client: (1, B, C, H, W) and (1, B)."""
    generator = torch.Generator().manual_seed(0)
    like = next(iter(simulation.weights.values()))
    images = torch.randn(1, simulation.images, *observation.image_shape, generator=generator).to(like)
    return images.requires_grad_(), torch.zeros(1, simulation.images, dtype=torch.int64, device=like.device)


def _quick(oracle: Unrolled, images: Tensor, labels: Tensor) -> FiniteDifferences | None:
    """The engine with the first step at which it gives `oracle`'s derivative of the gradients' squared norm, for two
    identical clients with images (1, B, C, H, W) and labels (1, B); None if it does at none."""
    held = oracle.masks
    oracle.masks = None if held is None else held[:1].expand(2, -1)
    try:
        expected = _slope(oracle, images, labels)
        for step in STEPS:
            quick = FiniteDifferences(oracle, step)
            if (_slope(quick, images, labels) - expected).norm() < MAX_DISAGREEMENT * expected.norm():
                quick.masks = held
                return quick
    except RuntimeError:  # the model uses an operation that torch.func.vmap cannot handle
        pass
    finally:
        oracle.masks = held
    return None


def _slope(engine: Simulation, images: Tensor, labels: Tensor) -> Tensor:
    """Derivative by the images (1, B, C, H, W) of the squared norm of two such clients' gradients."""
    found = engine.gradients(images.expand(2, *images.shape[1:]), labels.expand(2, -1))
    return torch.autograd.grad(sum(g.square().sum() for g in found.values()), images)[0]
