"""What the clients of a simulation drew, for a server that is granted `client_seed`: the auditor draws it again.

Noise that a local step adds (DP-SGD) is drawn again where clients send the gradient or take one step of SGD. AdamW
divides the noised gradient by its size, and several steps move the weights in between: there it is not undone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks import Observation
from attacks.observation import Drawn
from fedmjp.client import Batch, ClientTask
from fedmjp.defenses import ClientInput
from fedmjp.models import BuiltModel


def drawn_by(task: ClientTask, raw: Observation, observation: Observation, batch: Batch) -> Drawn:
    """Noise and permutation behind an update.

    Args:
        task: of the federation, with what the clients draw from.
        raw: the update as the server has it.
        observation: the same, repaired (`attacks.fingerprints.repair`); the noise is in its units.
        batch: of the first local step, before the defence.
    """
    defense = task.defense
    generator = task.message_generator(observation.client, observation.round)
    # Where the message held weights, the observation is their change by the rate.
    rate = observation.learning_rate if observation.kind == "weights" else 1.0
    sent = {name: rate * gradient for name, gradient in raw.gradients.items() if not defense.freezes(name)}
    noise = defense.known_noise(sent, generator)
    noise = {name: tensor / rate for name, tensor in noise.items()}
    divided = observation.kind == "weights" and task.config.local.optimizer == "adamw"
    if observation.local_steps == 1 and not divided:
        drawn = task.step_generator(observation.client, observation.round, 0)
        of_step = defense.known_noise_of_step(sent, len(batch.images), drawn)
        noise |= {name: tensor + noise.get(name, 0) for name, tensor in of_step.items()}
    noise = {name: tensor * _scale(raw, observation, name) for name, tensor in noise.items()}
    order = None
    if defense.moves_patches:
        seen = task.seen(batch, observation.client, observation.round, 0)
        order = None if seen.rearrange is None else order_of(seen, task.model)
    return Drawn(noise, order, more=defense.random and not noise and order is None)


def _scale(raw: Observation, observation: Observation, name: str) -> float:
    """How much larger a repaired gradient is (least squares)."""
    before, after = (view.gradients[name].double() for view in (raw, observation))
    return float((before * after).sum()) / max(float(before.square().sum()), 1e-300)


def order_of(seen: ClientInput, model: BuiltModel) -> Tensor:
    """(B, N) int64: for each place the patch that was moved there."""
    rows, columns = model.grid
    numbers = torch.arange(rows * columns, dtype=torch.float32).view(1, 1, rows, columns)
    maps = numbers.repeat_interleave(model.patch_size, 2).repeat_interleave(model.patch_size, 3)
    moved = seen.rearrange(maps.expand(len(seen.images), -1, -1, -1).to(seen.images.device))
    return moved[:, 0, :: model.patch_size, :: model.patch_size].flatten(1).long().cpu()
