"""What clients send after training locally: weights after steps of PyTorch's own optimisers, batches under MJP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attacks import Observation
from attacks.adaptive_steps import undo_first_step
from experiments.batches.protocol import affine_plane
from experiments.local_steps import one_by_one, returned
from fedmjp.audit.per_image import observe_groups
from fedmjp.audit.victims import drifted
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.models import BuiltModel

POSITIONS = "pos_embed"


@dataclass(frozen=True)
class Client:
    """Four images, the attacked one first, and the models.

    Attributes:
        plain, masked: the model, and its variant under MJP.
        images: (4, C, H, W) in [0, 1].
        labels: (4,) int64.
        drift: see `Options.drift`.
        seed: of masks and drift.
    """

    plain: BuiltModel
    masked: BuiltModel | None
    images: Tensor
    labels: Tensor
    drift: float
    seed: int

    def updates(self) -> Iterator[tuple[int, list[int]]]:
        """Six pairs of the four images, each image in three of them; number and pair, the attacked one last."""
        lines = affine_plane(2)
        return enumerate(sorted(lines, key=lambda line: line == [0, 1]))


@dataclass(frozen=True)
class Situation:
    """How a client trains, and what attacks its update.

    Attributes:
        name: in words.
        attack: its name.
        send: what the server has, oldest update first.
        masked: the client is one under MJP.
    """

    name: str
    attack: str
    send: Callable[[Client], list[Observation]]
    masked: bool = False


def on_one_image(client: Client, *, steps: int, rate: float, withheld: bool = False) -> list[Observation]:
    """SGD on the attacked image alone."""
    batches = one_by_one(client.images[:1].expand(steps, -1, -1, -1), client.labels[:1].expand(steps))
    sent = returned(client.plain, batches, torch.optim.SGD, rate)
    if withheld:
        sent = replace(sent, gradients={n: g for n, g in sent.gradients.items() if n != POSITIONS})
    return [sent]


def on_two_images(client: Client, *, rate: float, alone: bool) -> list[Observation]:
    """SGD, a step on each image of a pair; six updates, or the last one alone."""
    found = []
    for number, pair in client.updates():
        built = drifted(client.plain, client.drift, client.seed, number) if number else client.plain
        sent = returned(built, one_by_one(client.images[pair], client.labels[pair]), torch.optim.SGD, rate)
        found.append(replace(sent, round=number))
    return found[-1:] if alone else found


def by_adam(client: Client, *, epsilon: float, rate: float, undone: bool = False, steps: int = 1) -> list[Observation]:
    """The last step of AdamW without weight decay, on another image each, the attacked one last."""
    make = partial(torch.optim.AdamW, eps=epsilon, weight_decay=0.0)
    order = [*range(1, steps), 0]
    sent = returned(client.plain, one_by_one(client.images[order], client.labels[order]), make, rate, summed=1)
    return [undo_first_step(sent, epsilon) if undone else sent]


def one_batch(client: Client) -> list[Observation]:
    """The gradient of a batch of two."""
    seen = ClientInput(client.images[:2])
    return observe_groups(client.plain, seen, client.labels[:2], 2)


def under_mjp(client: Client, *, gamma: float) -> list[Observation]:
    """Gradients of batches of two under MJP, every step jigsawed, with the localisation loss."""
    defense, found = DEFENSES.get("mjp")(gamma=gamma), []
    for number, pair in client.updates():
        built = drifted(client.masked, client.drift, client.seed, number) if number else client.masked
        generator = torch.Generator().manual_seed(1000 * client.seed + number)
        seen = defense.on_input(client.images[pair], built, generator, number + 1)
        (view,) = observe_groups(built, seen, client.labels[pair], len(pair), defense.loss_weights())
        found.append(replace(view, round=number))
    return found


def situations() -> list[Situation]:
    """All of them, in the order of the table."""
    found = []
    for rate in (0.1, 0.01):
        for steps in (1, 2, 8):
            name = f"SGD, {steps} step{'s' * (steps > 1)} on one image, rate {rate:g}"
            found.append(Situation(name, "patch_embedding", partial(on_one_image, steps=steps, rate=rate)))
            withheld = partial(on_one_image, steps=steps, rate=rate, withheld=True)
            found.append(Situation(f"{name}, positions withheld", "token_span", withheld))
    for attack, alone in (("patch_embedding", True), ("batch_rounds", False)):
        send = partial(on_two_images, rate=0.1, alone=alone)
        found.append(Situation("SGD, 2 steps on two images, rate 0.1", attack, send))
    for epsilon, rate in ((1e-8, 1e-3), (1e-8, 1e-4), (1e-6, 1e-3)):
        name = f"AdamW, first step, ε {epsilon:.0e}, rate {rate:g}".replace("e-0", "e-")
        for undone in (False, True):
            send = partial(by_adam, epsilon=epsilon, rate=rate, undone=undone)
            found.append(Situation(f"{name}, {'undone' if undone else 'as sent'}", "patch_embedding", send))
    third = partial(by_adam, epsilon=1e-8, rate=1e-3, steps=3)
    found.append(Situation("AdamW, third step, moments kept, rate 0.001, as sent", "patch_embedding", third))
    found.append(Situation("gradient of a batch of two, one update", "batch_tokens", one_batch))
    for gamma in (0.1, 0.3):
        name = f"MJP, γ {gamma:g}, batches of two, six updates"
        found.append(Situation(name, "batch_rounds", partial(under_mjp, gamma=gamma), masked=True))
    return found
