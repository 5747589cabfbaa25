"""The bound of `fedmjp.audit.noise_bound` on the updates of a federation that ran under noise.

Messages depend on the weights and on what clients draw, both of which a simulation repeats: the federation's rounds are
gone through again, and of every update the gradient before clipping and noise is computed at the weights that the
client was sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks import find_tokenizer
from fedmjp.audit.noise_bound import least_error
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.defenses import Defense


@dataclass(frozen=True)
class NoisyUpdate:
    """An update of one image.

    Attributes:
        round: from 1.
        client: from 0.
        rows: (N, D) gradient of the patches' positions, clipped and without noise.
        deviation: of the noise on every entry.
        norm: Euclidean norm of the message.
    """

    round: int
    client: int
    rows: Tensor
    deviation: float
    norm: float


def bounds(config: RunConfig, rounds: Sequence[int]) -> list[dict[str, float | int | str]]:
    """The least errors as PSNR (dB), for each client and each of `rounds`, whose updates so far are used.

    Returns:
        defense, round, client, psnr_unbiased and psnr_normal.
    """
    task = ClientTask(replace(config, defense=("none",)), "none")
    size = task.model.image_size
    tokenizer = find_tokenizer(task.model.module, (3, size, size))
    scale = sum(value**2 for value in task.model.std) / len(task.model.std)
    every, found = list(repeated(config)), []
    for number in rounds:
        for client in range(config.federation.clients):
            own = [update for update in every if update.client == client and update.round <= number]
            patches = tokenizer.patchify(task.model.normalise(task.batch(client, number, 0).images))[0]
            given = [update.rows for update in own], [update.deviation for update in own], patches
            errors = {"psnr_unbiased": math.inf, "psnr_normal": float(patches.var())}
            errors = {name: least_error(*given, variance) * scale for name, variance in errors.items()}
            line = {"defense": config.defense[0], "round": number, "client": client}
            found.append(line | {name: -10 * math.log10(error) for name, error in errors.items()})
    return found


def repeated(config: RunConfig) -> Iterator[NoisyUpdate]:
    """Every update of a federation of clients that send the gradient of one image."""
    noisy, plain = ClientTask(config, config.defense[0]), ClientTask(replace(config, defense=("none",)), "none")
    size = plain.model.image_size
    tokenizer = find_tokenizer(plain.model.module, (3, size, size))
    sent = {name: tensor.detach().clone() for name, tensor in {**noisy.parameters, **noisy.buffers}.items()}
    for number in range(1, config.federation.rounds + 1):
        messages = []
        for client in range(config.federation.clients):
            gradients = plain.update(client, number, sent).tensors
            messages.append(noisy.update(client, number, sent).tensors)
            share = min(1.0, clip_norm(noisy.defense) / norm_of(gradients))
            noise = {name: messages[-1][name] - share * tensor for name, tensor in gradients.items()}
            entries = sum(tensor.numel() for tensor in noise.values())
            rows = share * tokenizer.position_rows(gradients)[tokenizer.prefix :]
            yield NoisyUpdate(number, client, rows, norm_of(noise) / entries**0.5, norm_of(messages[-1]))
        for name in messages[0]:
            mean = torch.stack([message[name] for message in messages]).mean(dim=0)
            sent[name] = sent[name] - config.federation.learning_rate * mean


def clip_norm(defense: Defense) -> float:
    """Largest norm of an image's gradient under `noise` or `dp_sgd`; of a batch of one they clip the same."""
    return defense.dp_clip_norm if hasattr(defense, "dp_clip_norm") else defense.clip_norm


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm of all entries."""
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum().sqrt())
