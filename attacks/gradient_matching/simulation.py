"""Which engine simulates the clients of an attack, on which parameters, against what."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attacks.gradient_matching.differences import Differenced
from attacks.gradient_matching.gradients import Target
from attacks.gradient_matching.reading import Reading
from attacks.gradient_matching.unrolled import Simulation, Unrolled, math_attention
from attacks.observation import Observation

# Relative difference of the two engines' derivatives that round-off and the finite step explain.
AGREE = 0.02


def simulate(
    observation: Observation, readings: Sequence[Reading], restarts: int, *, exact: bool = False
) -> tuple[Simulation, Target]:
    """Simulated clients for victims of one model, and what they are held against.

    Args:
        observation: one of the victims' (they share model, batch size and local steps).
        readings: one a victim.
        restarts: lanes a victim.
        exact: derivatives to round-off, and in the labels too; else `Differenced`, about twice as fast, where the
            clients take one step and the model allows it.
    """
    masks = _masks(observation, readings)
    masks = None if masks is None else masks.repeat_interleave(restarts, dim=0)
    unrolled = Unrolled(observation, masks)
    images, labels = _probe(observation, unrolled)
    with math_attention(), torch.enable_grad():
        reached = unrolled.reached(images, labels)
        sent = set.intersection(*(set(reading.gradients) for reading in readings))
        names = unrolled.names = tuple(name for name in reached if name in sent)
        unrolled.head = _head(unrolled, images[0].detach())
        values = {n: torch.stack([r.gradients[n] for r in readings]).repeat_interleave(restarts, dim=0) for n in names}
        target = Target.of(values)
        if exact or observation.local_steps > 1:
            return unrolled, target
        quick = Differenced(unrolled)
        return (quick if _agree(quick, unrolled, images, labels) else unrolled), target


def _masks(observation: Observation, readings: Sequence[Reading]) -> Tensor | None:
    """(V, N) bool, or None where nobody hides anything."""
    known = [reading.mask for reading in readings if reading.mask is not None]
    if not known:
        return None
    return torch.stack([torch.zeros_like(known[0]) if r.mask is None else r.mask for r in readings])


def _probe(observation: Observation, simulation: Simulation) -> tuple[Tensor, Tensor]:
    """Noise and labels for one lane: (1, B, C, H, W) and (1, B)."""
    generator = torch.Generator().manual_seed(0)
    like = next(iter(simulation.weights.values()))
    images = torch.randn(1, simulation.images, *observation.image_shape, generator=generator).to(like)
    return images.requires_grad_(), torch.zeros(1, simulation.images, dtype=torch.int64, device=like.device)


def _head(simulation: Simulation, images: Tensor) -> str:
    """Name of the linear layer whose output are the logits of images (B, C, H, W), or ""."""
    seen: dict[str, Tensor] = {}
    layers = {name: layer for name, layer in simulation.model.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [
        layer.register_forward_hook(lambda _, __, output, name=name: seen.__setitem__(name, output))
        for name, layer in layers.items()
    ]
    try:
        logits = simulation.logits(simulation.weights, images, None)
    finally:
        for hook in hooks:
            hook.remove()
    return next((n for n, y in reversed(seen.items()) if y.shape == logits.shape and y.equal(logits)), "")


def _agree(quick: Differenced, oracle: Unrolled, images: Tensor, labels: Tensor) -> bool:
    """Whether both engines give two lanes, which are alike, the same derivative of their gradients' length."""
    held = oracle.masks
    quick.masks = oracle.masks = None if held is None else held[:1].expand(2, -1)
    slopes = []
    try:
        for engine in (quick, oracle):
            found = engine.gradients(images.expand(2, *images.shape[1:]), labels.expand(2, -1))
            slopes.append(torch.autograd.grad(sum(g.square().sum() for g in found.values()), images)[0])
    except RuntimeError:  # an operation of the model that cannot be mapped over lanes
        return False
    finally:
        quick.masks = oracle.masks = held
    return bool((slopes[0] - slopes[1]).norm() < AGREE * slopes[1].norm())
