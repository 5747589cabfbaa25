"""Audit a model that is not ours: one training step in plain PyTorch, scored against the images it was made from.

For a running Flower app, where only updates are seen: `fedmjp.audit.watcher.Watcher`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from torch import Tensor, nn

from attacks import Attack, Observation, check_tokenizer, find_tokenizer
from fedmjp.audit.harness import run_attack, scorer
from fedmjp.budgets import named_attacks


def audit_gradient(
    model: nn.Module,
    images: Tensor,
    gradients: Mapping[str, Tensor],
    *,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    std: Sequence[float] = (1.0, 1.0, 1.0),
    attacks: Sequence[str | Attack] = ("patch_embedding", "april"),
) -> pd.DataFrame:
    """Attack one step's gradient and score the answer against the images it was made from.

    Args:
        model: timm, torchvision or Hugging Face ViT, with the weights at which the gradient was taken.
        images: (B, C, H, W) originals in [0, 1].
        gradients: by parameter name, of the loss on the normalised images.
        mean, std: the normalisation.
        attacks: names, or instances with settings of their own (`MJPSubspace(prior=VectorialVariation(strength=20))`).

    Returns:
        One line an attack and image: attack, image, the metrics, diagnosis, attack_parameters (the attack's settings).

    Raises:
        UsageError: the model has no tokenizer that the attacks know, or an unknown attack.
    """
    shape = tuple(images.shape[1:])
    tokenizer = find_tokenizer(model, shape)
    check_tokenizer(model, tokenizer, shape)
    observation = Observation(dict(gradients), model, len(images), shape, tuple(mean), tuple(std))
    score_images = scorer(tokenizer.patch_size, None)
    lines = []
    for name, attack in named_attacks(attacks):
        scored = run_attack(attack, name, [observation], images, score_images)
        said = {"diagnosis": scored.diagnosis, "attack_parameters": scored.parameters}
        lines += [{"attack": name, "image": index, **record, **said} for index, record in enumerate(scored.records)]
    return pd.DataFrame(lines)
