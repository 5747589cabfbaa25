"""Audit a running Flower app that is not ours: only updates are seen, and the answer is pictures and diagnoses.

    watcher = Watcher(model, image_shape=(3, 224, 224), mean=mean, std=std, learning_rate=0.01, out="leaks")
    FedAvg().start(TapGrid(grid, watcher), initial_arrays, num_rounds=1)

For a training step in plain PyTorch, where the originals are at hand: `fedmjp.audit.user_model.audit_gradient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from attacks import Attack, Observation, Reconstruction, UsageError, check_tokenizer, find_tokenizer
from fedmjp.audit.observe import model_as_sent
from fedmjp.budgets import named_attacks


class Watcher:
    """Observer for `TapGrid`: attacks each training reply of any Flower app that answers with the model's arrays.

    Replies with gradients and replies with weights (FedAvg) are both understood; arrays are matched to parameters by
    name, which is what `ArrayRecord(model.state_dict())` gives.

    Args:
        model: the architecture that the app trains.
        image_shape: (C, H, W) of an input.
        mean, std: the clients' normalisation.
        sends: "weights" or "gradient".
        learning_rate: of the clients' SGD, to turn weights back into a gradient.
        batch_size, local_steps: as the clients train; they decide what the closed forms can promise.
        attacks: names, or instances with settings of their own (`MJPSubspace(prior=VectorialVariation(strength=20))`).
        out: folder for the reconstructions, as PNG files.

    Raises:
        UsageError: the model has no tokenizer that the attacks know, or an unknown attack.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        image_shape: tuple[int, int, int],
        mean: Sequence[float],
        std: Sequence[float],
        sends: str = "weights",
        learning_rate: float = 1.0,
        batch_size: int = 1,
        local_steps: int = 1,
        attacks: Sequence[str | Attack] = ("patch_embedding", "april"),
        out: str | Path = "leaks",
    ) -> None:
        check_tokenizer(model, find_tokenizer(model, image_shape), image_shape)
        self.model, self.shape, self.mean, self.std = model, image_shape, tuple(mean), tuple(std)
        self.sends, self.learning_rate = sends, learning_rate
        self.batch_size, self.local_steps = batch_size, local_steps
        self.attacks, self.out = named_attacks(attacks), Path(out)
        self.found: list[tuple[int, str, Reconstruction]] = []

    def __call__(self, sent: Mapping, received: Mapping, node: int) -> None:
        """Attack one reply; `found` gains (node, attack, reconstruction) and `out` a picture for each attack."""
        names = [n for n, _ in self.model.named_parameters()]
        before, after = (_arrays(record, names) for record in (sent, received))
        if set(after) != set(names):
            raise UsageError(f"node {node}'s reply holds {len(after)} of the model's {len(names)} parameters by name")
        gradients = after
        if self.sends == "weights":
            gradients = {n: (before[n] - after[n]) / self.learning_rate for n in names}
        observation = Observation(
            gradients,
            model_as_sent(self.model, before),
            self.batch_size,
            self.shape,
            self.mean,
            self.std,
            kind="weights" if self.sends == "weights" else "gradient",
            local_steps=self.local_steps,
            learning_rate=self.learning_rate,
            client=node,
        )
        for name, attack in self.attacks:
            result = attack([observation])
            self.found.append((node, name, result))
            if result.images is not None:
                self._save(result.images[0], f"{len(self.found):04d}_{name}.png")

    def _save(self, image: Tensor, name: str) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        pixels = (image * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        Image.fromarray(pixels).save(self.out / name)


def _arrays(record: Mapping, names: Sequence[str]) -> dict[str, Tensor]:
    """Arrays of a message that bear parameter names, whatever the records are called."""
    wanted, found = set(names), {}
    for part in record.values():
        for name, array in part.items():
            if name in wanted and hasattr(array, "numpy"):
                found[name] = torch.from_numpy(array.numpy().copy())
    return found
