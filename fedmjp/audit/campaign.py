"""Attack the updates of many clients with one image each, and put every score on disk at once.

The way of a datum: image -> defence on the input -> gradients of the attacked layers, a batch of clients in one pass ->
Observations -> attack, one batched solve -> scores -> rows. Rows that are there already are not computed again, a
picture that cannot be decoded is left out and told, and a batch that does not fit the memory is halved.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from attacks import ATTACKS, Attack, Observation, ThreatModel, UsageError
from fedmjp.audit.harness import BASELINES, Scored, ScoreImages, score_found
from fedmjp.audit.victims import attacked_gradients, observe_each
from fedmjp.data import Gallery
from fedmjp.defenses import ClientInput, Defense
from fedmjp.models import BuiltModel
from fedmjp.report import RowLog

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
NO_MODEL = "(no gradient)"


@dataclass(frozen=True)
class Setting:
    """What the model sees, and what the reconstruction is held against.

    Attributes:
        name: short, for a column.
        defended: the defence acts on the input.
        hidden: where it does, the model's unknown position embedding is used (models that have one).
        against: "seen" (the model's input) or "original".
    """

    name: str
    defended: bool
    hidden: bool
    against: Literal["seen", "original"]


@dataclass(frozen=True)
class Subject:
    """A model under attack and the adversary's means.

    Attributes:
        precision: type of weights, images and gradients.
    """

    built: BuiltModel
    threat_model: ThreatModel = field(default_factory=ThreatModel)
    precision: Literal["float32", "float64"] = "float32"


def grant_token_gradient(built: BuiltModel) -> BuiltModel:
    """The same function of the image, with a position embedding that is zero and whose gradient is sent.

    What an attack on positions needs of a model without any: the gradient at each token's embedding. No message of such
    a model holds it; this is the server that is given it nevertheless.
    """
    module = deepcopy(built.module)
    tokens = module.num_prefix_tokens + module.patch_embed.num_patches
    module.pos_embed = nn.Parameter(torch.zeros(1, tokens, module.embed_dim, dtype=module.cls_token.dtype))
    return replace(built, module=module)


class Campaign:
    """All attacks on all images of a gallery, subject by subject.

    Args:
        gallery: one client an image.
        defense: its name and options; it acts on the input in the settings that ask for it.
        attacks: names in `ATTACKS`.
        rows: where every score goes.
        columns: what every row says of its run (`run_id` and `provenance.columns`).
        score_images: see `harness.scorer`.
        batch_size: clients a pass; halved, for good, whenever memory runs out.
        seed: with an image's id it fixes what the defence draws for that image.
        on_batch: told after each batch how many images are dealt with, and each attack's PSNR on them (dB).
        warn: told in a line what was left out or halved.
    """

    def __init__(
        self,
        gallery: Gallery,
        *,
        defense: tuple[str, Defense],
        attacks: Sequence[str],
        rows: RowLog,
        columns: Mapping[str, Any],
        score_images: ScoreImages,
        batch_size: int,
        seed: int,
        device: torch.device,
        on_batch: Callable[[int, Mapping[str, list[float]]], None],
        warn: Callable[[str], None],
    ) -> None:
        self.gallery, (self.defense_name, self.defense) = gallery, defense
        self.attacks: dict[str, Attack] = {name: ATTACKS.get(name)() for name in attacks}
        self.rows, self.columns, self.score_images = rows, columns, score_images
        self.batch_size, self.seed, self.device = batch_size, seed, device
        self.on_batch, self.warn = on_batch, warn
        self._unreadable: set[int] = set()

    def attack(self, subject: Subject, settings: Sequence[Setting]) -> None:
        """Write the rows of one subject, in every setting and under every attack, that are not there yet.

        Raises:
            UsageError: one image alone does not fit the memory.
        """
        subject.built.module.to(self.device, getattr(torch, subject.precision)).eval()
        for alike in _by_input(settings):
            cases = {
                (setting, name): self._case(subject, setting.name, name, attack.parameters())
                for setting in alike
                for name, attack in self.attacks.items()
            }
            for clients in self._batches(list(cases.values())):
                self._attack_or_halve(subject, clients, cases)

    def baselines(self, setting: str) -> None:
        """Write the rows of the two guesses that need no gradient, scored against the original images."""
        cases = {name: self._case(None, setting, name, {}) for name in BASELINES}
        mean: Tensor | None = None
        for clients in self._batches(list(cases.values())):
            mean = self._mean_image() if mean is None else mean
            clients, originals = self._decode(clients)
            guesses = (mean.expand_as(originals), self._decode([self._another(c) for c in clients])[1])
            for name, guess in zip(BASELINES, guesses, strict=True):
                for client, record in zip(clients, self.score_images(guess, originals), strict=True):
                    self._write(cases[name], client, {**record, "gradient_norm": float("nan")}, 0.0)

    def seen(self, built: BuiltModel, setting: Setting, client: int, image: Tensor) -> ClientInput:
        """What the model sees of one image (C, H, W): the same on every device and in every batch."""
        if not setting.defended:
            return ClientInput(image[None])
        key = zlib.crc32(self.gallery.images.ids[client].encode())
        entropy = np.random.SeedSequence([self.seed, 4, key]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(entropy[0] >> np.uint64(1)))
        seen = self.defense.on_input(image[None], built, generator, 1)
        return seen if setting.hidden else ClientInput(seen.images)

    def _batches(self, cases: list[dict[str, Any]]) -> Iterator[list[int]]:
        """Clients without a row in some of `cases`, as many at a time as the memory takes."""
        every = range(len(self.gallery.images))
        missing = [c for c in every if not all(self.rows.done(case | {"client": c}) for case in cases)]
        self.on_batch(len(every) - len(missing), {})
        while missing:
            batch = missing[: self.batch_size]
            yield batch
            missing = missing[len(batch) :]

    def _attack_or_halve(self, subject: Subject, clients: list[int], cases: Mapping) -> None:
        try:
            self._attack(subject, clients, cases)
            return
        except OUT_OF_MEMORY as error:
            if len(clients) == 1:
                raise UsageError(
                    f"{subject.built.name} does not fit the memory with a single image; use a smaller model or a CPU"
                ) from error
        # Outside the handler: the exception's traceback held the failed pass's tensors.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.batch_size = len(clients) // 2
        self.warn(f"out of memory with {len(clients)} images a batch; going on with {self.batch_size}")
        for start in range(0, len(clients), self.batch_size):
            self._attack_or_halve(subject, clients[start : start + self.batch_size], cases)

    def _attack(self, subject: Subject, clients: list[int], cases: Mapping[tuple[Setting, str], dict]) -> None:
        asked = len(clients)
        clients, originals = self._decode(clients, getattr(torch, subject.precision))
        settings = list(dict.fromkeys(setting for setting, _ in cases))
        unfinished = self._unfinished(cases, clients)
        answers = self.answers(subject, settings, clients, originals, unfinished) if clients else {}
        # Only now: a batch that runs out of memory half-way is computed again.
        psnr: dict[str, list[float]] = {name: [] for name in unfinished}
        for (setting, name), lines in answers.items():
            for client, (norm, one) in zip(clients, lines, strict=True):
                record = {**one.records[0], "gradient_norm": norm}
                self._write(
                    cases[setting, name], client, record, one.seconds, one.diagnosis, one.reconstruction.details
                )
                psnr[name].append(one.records[0]["psnr"])
        self.on_batch(asked, psnr)

    def answers(
        self, subject: Subject, settings: Sequence[Setting], clients: list[int], originals: Tensor, attacks: list[str]
    ) -> dict[tuple[Setting, str], list[tuple[float, Scored]]]:
        """What each attack makes of each client's update.

        Args:
            settings: that agree in what the model sees.
            originals: the clients' images (B, C, H, W) in [0, 1], on the device and of the subject's precision.

        Returns:
            (setting, attack) -> for each client the norm of the gradient that was attacked, and the scored answer.
        """
        seen, observations = self._observe(subject, settings[0], clients, originals)
        norms = [o.gradient_norm() for o in observations]
        answers = {}
        for name in attacks:
            attack = self.attacks[name]
            found = attack.attack_many([[o] for o in observations])
            for setting in settings:
                targets = seen if setting.against == "seen" else originals
                scored = score_found(attack, name, found, list(targets.float()[:, None]), self.score_images)
                answers[setting, name] = list(zip(norms, scored, strict=True))
        return answers

    def _observe(
        self, subject: Subject, setting: Setting, clients: list[int], originals: Tensor
    ) -> tuple[Tensor, list[Observation]]:
        """(what the model sees, (B, C, H, W); the adversary's view of each client's update)."""
        built = subject.built
        inputs = [self.seen(built, setting, client, image) for client, image in zip(clients, originals, strict=True)]
        seen = torch.cat([i.images for i in inputs])
        mask = None if inputs[0].position_mask is None else torch.cat([i.position_mask for i in inputs])
        return seen, observe_each(built, attacked_gradients(built, seen, self._labels(built, clients), mask))

    def _unfinished(self, cases: Mapping[tuple[Setting, str], dict], clients: list[int]) -> list[str]:
        """Attacks that lack a row of one of these clients."""
        lacking = (n for (_, n), case in cases.items() for c in clients if not self.rows.done(case | {"client": c}))
        return list(dict.fromkeys(lacking))

    def _another(self, client: int) -> int:
        """The next image of the gallery that can be read."""
        count = len(self.gallery.images)
        return next(o for k in range(1, count + 1) if (o := (client + k) % count) not in self._unreadable)

    def _decode(self, clients: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[list[int], Tensor]:
        """(clients whose image can be read, their images (B, C, H, W) on the device); the others are told once."""
        found = {}
        for client in clients:
            if client in self._unreadable:
                continue
            try:
                found[client] = self.gallery.images.images([client])
            except UsageError as error:
                self._unreadable.add(client)
                self.warn(f"left out: {error}")
        images = torch.cat(list(found.values())) if found else torch.empty(0, 3, 1, 1)
        return list(found), images.to(self.device, dtype)

    def _mean_image(self) -> Tensor:
        """Mean of the gallery, (1, C, H, W)."""
        total, count = 0, 0
        for start in range(0, len(self.gallery.images), self.batch_size):
            clients, images = self._decode(range(start, min(start + self.batch_size, len(self.gallery.images))))
            if clients:
                total, count = total + images.double().sum(dim=0, keepdim=True), count + len(clients)
        return (total / count).float()

    def _labels(self, built: BuiltModel, clients: list[int]) -> Tensor:
        """Labels of the clients' images; where the head knows fewer classes than the gallery they wrap around."""
        classes = built.module.num_classes
        return (self.gallery.images.labels[clients] % classes).to(self.device)

    def _case(self, subject: Subject | None, setting: str, attack: str, parameters: Mapping[str, Any]) -> dict:
        """What tells rows apart (`report.rows.CASE`), but for the client."""
        built = subject.built if subject else None
        return {
            "dataset": self.gallery.name,
            "model": built.name if built else NO_MODEL,
            "weights": built.provenance if built else "",
            "block": built.block if built else "",
            "defense": self.defense_name,
            "defense_parameters": dict(vars(self.defense)),
            "setting": setting,
            "precision": subject.precision if subject else "",
            "update": "gradient",
            "batch_size": 1,
            "local_steps": 1,
            "seed": self.seed,
            "threat_model": sorted(c.value for c in subject.threat_model.grants) if subject else [],
            "attack": attack,
            "attack_parameters": dict(parameters),
            "round": 1,
        }

    def _write(
        self, case: Mapping, client: int, record: Mapping, seconds: float, diagnosis: str = "", details: Mapping = {}
    ) -> None:
        place = {"client": client, "image": 0, "image_id": self.gallery.images.ids[client]}
        answer = {"seconds": seconds, "diagnosis": diagnosis, "details": dict(details)}
        self.rows.append({**self.columns, **case, **place, **record, **answer})


def _by_input(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Settings grouped by what the model sees: each group needs its gradients once."""
    groups: dict[tuple[bool, bool], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.defended, setting.defended and setting.hidden), []).append(setting)
    return list(groups.values())
