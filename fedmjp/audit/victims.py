"""Clients that hold one image each, or a few: the model's input, the updates they send, and the model's accuracy."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from attacks import Attack, Observation, ThreatModel, UsageError, find_tokenizer
from fedmjp.audit.guesses import SINGLE, guesses_beside, without_copies
from fedmjp.audit.per_image import NO_TERMS, attacked_gradients, observe_each, observe_groups
from fedmjp.data import Gallery
from fedmjp.defenses import ClientInput, Defense
from fedmjp.metrics import MEAN_IMAGE, OTHER_IMAGE
from fedmjp.models import BuiltModel, ViT

NO_MODEL = "(no gradient)"


@dataclass(frozen=True)
class Setting:
    """What the model receives, and which image the reconstruction is compared with.

    Attributes:
        name: a short name for a table's column.
        defended: whether the defence acts, on the input and on the update.
        hidden: if it does, whether the model's unknown position embedding is used (in models that have one).
        against: the image for the scores, "seen" (the model's input) or "original".
    """

    name: str
    defended: bool
    hidden: bool
    against: Literal["seen", "original"]


@dataclass(frozen=True)
class Subject:
    """A model under attack and the adversary's capabilities.

    Attributes:
        built: the model.
        threat_model: the capabilities.
        precision: type of weights, images and gradients.
    """

    built: BuiltModel
    threat_model: ThreatModel = field(default_factory=ThreatModel)
    precision: Literal["float32", "float64"] = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """`precision` as a torch type."""
        return getattr(torch, self.precision)


def grant_token_gradient(built: BuiltModel) -> BuiltModel:
    """The same function of the image, with an added position embedding of zeros whose gradient is sent.

    An attack on position gradients needs the gradient at each token's embedding. No update of a model without position
    embedding contains it; this model describes a server that obtains it nevertheless.
    """
    module = deepcopy(built.module)
    tokens = module.num_prefix_tokens + module.patch_embed.num_patches
    module.pos_embed = nn.Parameter(torch.zeros(1, tokens, module.embed_dim))
    return replace(built, module=module)


def drifted(built: BuiltModel, drift: float, seed: int, number: int) -> BuiltModel:
    """A copy of the model for its `number`-th update, with Gaussian noise added to every weight.

    This imitates the change of the weights between two updates: an attack over several rounds must not rely on constant
    weights.

    Args:
        built: the model.
        drift: standard deviation of the noise, in units of the root mean square of the weight's tensor.
        seed, number: determine the noise.
    """
    generator = torch.Generator().manual_seed(1000 * seed + number)
    module = deepcopy(built.module)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter += drift * parameter.square().mean().sqrt() * noise
    return replace(built, module=module)


def lacks_positions(built: BuiltModel) -> bool:
    """Whether the model is a plain ViT that was built without a position embedding."""
    return isinstance(built.module, ViT) and built.module.pos_embed is None


def by_input(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Group settings by the model's input: the gradients are computed once for each group."""
    groups: dict[tuple[bool, bool], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.defended, setting.defended and setting.hidden), []).append(setting)
    return list(groups.values())


class Victims:
    """One client per image of a gallery, or one per `group` consecutive images.

    Args:
        gallery: the images.
        defense: acts on the input and on the update in the settings with `defended`.
        seed: together with the id of a client's first image it determines the defence's random numbers for that client,
            independent of batch and device.
        device: where images and updates are computed.
        warn: called with a one-line message for each client with an image that cannot be decoded; such clients are left
            out from then on.
        group: images per client, consecutive in the gallery; a remainder at its end is not used.
    """

    def __init__(
        self,
        gallery: Gallery,
        defense: Defense,
        *,
        seed: int,
        device: torch.device,
        warn: Callable[[str], None],
        group: int = 1,
    ) -> None:
        self.gallery, self.defense, self.seed, self.device, self.warn = gallery, defense, seed, device, warn
        self.group = group
        self.unreadable: set[int] = set()
        self.memories: dict[int, dict[str, Tensor]] = {}  # what each client remembers after its last update

    def __len__(self) -> int:
        return len(self.gallery.images) // self.group

    def with_warnings(self, warn: Callable[[str], None]) -> Victims:
        """The same clients, with another receiver of warnings."""
        found = copy(self)
        found.warn = warn
        return found

    def members(self, client: int) -> list[int]:
        """Indices of a client's images in the gallery."""
        return list(range(client * self.group, (client + 1) * self.group))

    def ids(self, client: int) -> list[str]:
        """Ids of a client's images."""
        return [self.gallery.images.ids[place] for place in self.members(client)]

    def decode(self, clients: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[list[int], Tensor]:
        """Decode the images of `clients`.

        Returns:
            The clients whose images can all be decoded, and their images (clients x group, C, H, W) in [0, 1], on the
            device.
        """
        found = {}
        for client in clients:
            if client in self.unreadable:
                continue
            try:
                found[client] = self.gallery.images.images(self.members(client))
            except UsageError as error:
                self.unreadable.add(client)
                self.warn(f"left out: {error}")
        images = torch.cat(list(found.values())) if found else torch.empty(0, 3, *[self.gallery.images.size] * 2)
        return list(found), images.to(self.device, dtype)

    def seen(
        self, built: BuiltModel, setting: Setting, clients: Sequence[int], originals: Tensor, update: int = 0
    ) -> ClientInput:
        """The model's input for the clients' images, after the defence of the setting.

        Args:
            built: the model.
            setting: whether and how the defence acts.
            clients: the clients' numbers.
            originals: (clients x group, C, H, W) in [0, 1].
            update: number, from 0, of the update that a client sends for its images; the defence draws new random
                numbers for each.
        """
        if not setting.defended:
            return ClientInput(originals)
        pairs = zip(clients, originals.split(self.group), strict=True)
        inputs = [
            self.defense.on_input(images, built, self._generator(client, update), update + 1)
            for client, images in pairs
        ]
        images = torch.cat([i.images for i in inputs])
        if not setting.hidden:
            return ClientInput(images)
        if built.tells_origins:
            ordered = torch.arange(built.grid[0] * built.grid[1], device=images.device).expand(self.group, -1)
            return ClientInput(images, None, torch.cat([ordered if i.origins is None else i.origins for i in inputs]))
        if all(i.position_mask is None for i in inputs):
            return ClientInput(images)
        # In a step that the defence's schedule skips, no position is hidden.
        nothing = torch.zeros(self.group, built.grid[0] * built.grid[1], dtype=torch.bool, device=images.device)
        return ClientInput(images, torch.cat([nothing if i.position_mask is None else i.position_mask for i in inputs]))

    def observe(
        self,
        built: BuiltModel,
        seen: ClientInput,
        clients: Sequence[int],
        attacks: Iterable[Attack],
        loss_weights: Mapping[str, float] = NO_TERMS,
        update: int | None = None,
    ) -> list[Observation]:
        """One `Observation` per client, with the gradients that `attacks` need.

        Args:
            built: the model.
            seen: the model's input, from `seen`.
            clients: the clients' numbers.
            attacks: attacks that will receive the observations.
            loss_weights: weights of the terms that the clients add to the cross-entropy, by name.
            update: number of updates that a client has sent of its image before, for the random numbers of a defence
                on updates; None where the clients are undefended.
        """
        attacks, labels = list(attacks), self.labels(built, clients)
        if update is not None and self.defense.acts_on_update:
            return self._defended(built, seen, labels, clients, loss_weights, update)
        if self.group > 1 or any(attack.reads_every_parameter for attack in attacks):
            return observe_groups(built, seen, labels, self.group, loss_weights)
        width = find_tokenizer(built.module, (3, built.image_size, built.image_size)).width
        layers = dict.fromkeys(name for attack in attacks for name in attack.linear_layers(built.module, width))
        gradients = attacked_gradients(
            built,
            seen.images,
            labels,
            seen.position_mask,
            layers=tuple(layers),
            loss_weights=loss_weights,
        )
        return observe_each(built, gradients)

    def sample(self, subject: Subject, setting: Setting) -> list[Observation]:
        """The first client's update, with the gradients of the layers that make the tokens, to choose attacks by.

        Returns:
            A list of one observation, of the first client whose images can be decoded; empty where there is none.
        """
        subject.built.module.to(self.device, subject.dtype).eval()
        for client in range(len(self)):
            clients, originals = self.decode([client], subject.dtype)
            if clients:
                seen = self.seen(subject.built, setting, clients, originals)
                return self.observe(subject.built, seen, clients, (), update=0 if setting.defended else None)
        return []

    def _defended(
        self,
        built: BuiltModel,
        seen: ClientInput,
        labels: Tensor,
        clients: Sequence[int],
        loss_weights: Mapping[str, float],
        update: int,
    ) -> list[Observation]:
        """The updates as the defence lets them out; see `observe`."""
        drawn = [self._generator(client, update, purpose=6) for client in clients]
        views = observe_groups(
            built,
            seen,
            labels,
            self.group,
            loss_weights,
            gradients_of=lambda place, step: self.defense.gradients(step, drawn[place]),
            freezes=self.defense.freezes,
        )
        return [self._message(view, client, update) for client, view in zip(clients, views, strict=True)]

    def _message(self, view: Observation, client: int, update: int) -> Observation:
        """The update as it is sent, without frozen parameters; what the defence remembers stays with the client."""
        memory = self.memories.get(client, {}) if update else {}
        generator = self._generator(client, update, purpose=5)
        sent, self.memories[client] = self.defense.message(dict(view.gradients), generator, memory)
        return replace(view, gradients={n: g for n, g in sent.items() if not self.defense.freezes(n)})

    def labels(self, built: BuiltModel, clients: Sequence[int]) -> Tensor:
        """Labels of the clients' images, (clients x group,) int64, modulo the number of classes of the model's head."""
        places = [place for client in clients for place in self.members(client)]
        return (self.gallery.images.labels[places] % built.module.num_classes).to(self.device)

    def case(
        self,
        subject: Subject | None,
        defense: str,
        setting: str,
        attack: str,
        parameters: Mapping[str, Any],
        round: int = 1,
    ) -> dict[str, Any]:
        """The columns that identify a row (`records.rows.CASE`).

        The column `client` is always 0: clients are identified by their image, because their number may change.

        Args:
            subject: the attacked model, None for a guess that needs no gradient.
            defense: name of the victims' defence.
            setting: name of the setting.
            attack: name of the attack.
            parameters: configuration of the attack.
            round: number of updates that a client has sent for its images.
        """
        built = subject.built if subject else None
        return {
            "dataset": self.gallery.name,
            "model": built.name if built else NO_MODEL,
            "weights": built.provenance if built else "",
            "block": built.block if built else "",
            "defense": defense,
            "defense_parameters": self.defense.parameters(),
            "setting": setting,
            "precision": subject.precision if subject else "",
            "update": "gradient",
            "batch_size": self.group,
            "local_steps": 1,
            "seed": self.seed,
            "threat_model": sorted(c.value for c in subject.threat_model.grants) if subject else [],
            "attack": attack,
            "attack_parameters": dict(parameters),
            "round": round,
            "client": 0,
        }

    def batches(self, size: int) -> list[range]:
        """All clients' numbers in batches of `size`."""
        return [range(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def mean_image(self, batch_size: int) -> Tensor:
        """Mean of the images that can be decoded, (1, C, H, W) in [0, 1]; of a single one, that of other photographs.

        Raises:
            UsageError: see `guesses_beside`.
        """
        if self._single():
            return self._guesses()[MEAN_IMAGE]
        total, count = torch.zeros((), device=self.device), 0
        for batch in self.batches(batch_size):
            images = self.decode(batch, torch.float64)[1]
            total, count = total + images.sum(dim=0, keepdim=True), count + len(images)
        return (total / count).float()

    def another(self, client: int) -> int:
        """The next client whose images can be decoded."""
        return next(o for k in range(1, len(self) + 1) if (o := (client + k) % len(self)) not in self.unreadable)

    def others(self, clients: Sequence[int], originals: Tensor) -> Tensor:
        """For each of the clients' images another image, (clients x group, C, H, W) in [0, 1].

        These are the images of the next client, in their order, the next image of the same batch if there is only
        one client; an embedded photograph if that client has a single image, or where the other image is a copy.

        Args:
            clients: the clients' numbers.
            originals: their images, (clients x group, C, H, W).

        Raises:
            UsageError: see `guesses_beside`.
        """
        if self._single():
            return self._guesses()[OTHER_IMAGE].to(originals)
        if len(self) - len(self.unreadable) == 1:
            return without_copies(originals.roll(1, dims=0), originals)
        return without_copies(self.decode([self.another(client) for client in clients])[1], originals)

    def _single(self) -> bool:
        return self.group == 1 and len(self) - len(self.unreadable) == 1

    def _guesses(self) -> dict[str, Tensor]:
        self.warn(SINGLE)
        (client,) = (c for c in range(len(self)) if c not in self.unreadable)
        return guesses_beside(self.decode([client])[1])

    @torch.no_grad()
    def accuracy(self, subject: Subject, setting: Setting, batch_size: int) -> float:
        """Share of the images that the model classifies correctly in that setting, in [0, 1]; NaN where none opens."""
        module = subject.built.module.to(self.device, subject.dtype).eval()
        right, count = 0, 0
        for batch in self.batches(batch_size):
            clients, originals = self.decode(batch, subject.dtype)
            if not clients:
                continue
            seen = self.seen(subject.built, setting, clients, originals)
            logits = module(subject.built.normalise(seen.images), **seen.forward_kwargs())
            right += int((logits.argmax(dim=1) == self.labels(subject.built, clients)).sum())
            count += len(originals)
        return right / count if count else float("nan")

    def _generator(self, client: int, update: int, purpose: int = 4) -> torch.Generator:
        key = zlib.crc32(self.ids(client)[0].encode())
        sequence = np.random.SeedSequence([self.seed, purpose, key], spawn_key=(update,) if update else ())
        entropy = sequence.generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0] >> np.uint64(1)))
