"""Attack the updates of many clients with one image each, or a few, and put every score on disk at once.

The way of a datum: image -> defence on the input -> gradients of the attacked layers, a batch of clients in one pass ->
Observations -> attack, one batched solve -> scores -> rows. Rows that are there already are not computed again, a
picture that cannot be decoded is left out and told, and a batch that does not fit the memory is halved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attacks import Attack, UsageError
from fedmjp.audit.harness import BASELINES, Scored, ScoreImages, score_found
from fedmjp.audit.victims import Setting, Subject, Victims, by_input
from fedmjp.records.rows import RowLog

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
Cases = Mapping[tuple[Setting, str], dict[str, Any]]


def answers(
    victims: Victims,
    subject: Subject,
    settings: Sequence[Setting],
    clients: list[int],
    originals: Tensor,
    attacks: Mapping[str, Attack],
    score_images: ScoreImages,
    skip: Collection[str] = (),
) -> dict[tuple[Setting, str], list[tuple[float, Scored]]]:
    """What each attack makes of each client's update.

    Args:
        settings: that agree in what the model sees.
        originals: the clients' images (clients x group, C, H, W) in [0, 1], on the device and of the subject's
            precision.
        attacks: by name; together they decide which layers' gradients are computed, and whose norm is told.
        skip: names that are not run.

    Returns:
        (setting, attack) -> for each client the norm of those gradients, and the scored answer.
    """
    subject.built.module.to(victims.device, subject.dtype).eval()
    seen = victims.seen(subject.built, settings[0], clients, originals)
    update = 0 if settings[0].defended else None
    observations = victims.observe(subject.built, seen, clients, attacks.values(), update=update)
    norms = [o.gradient_norm() for o in observations]
    found = {}
    for name, attack in attacks.items():
        if name in skip:
            continue
        reconstructions = attack.attack_many([[o] for o in observations])
        for setting in settings:
            targets = (seen.images if setting.against == "seen" else originals).float()
            scored = score_found(attack, name, reconstructions, list(targets.split(victims.group)), score_images)
            found[setting, name] = list(zip(norms, scored, strict=True))
    return found


class Campaign:
    """All attacks on all victims, subject by subject.

    Args:
        defense: name of the victims' defence, for the rows.
        attacks: by name.
        rows: where every score goes.
        columns: what every row says of its run (`run_id` and `provenance.columns`).
        score_images: see `harness.scorer`.
        batch_size: clients a pass; halved, for good, whenever memory runs out.
        on_batch: told after each batch how many images are dealt with, and each attack's PSNR on them (dB).
    """

    def __init__(
        self,
        victims: Victims,
        *,
        defense: str,
        attacks: Mapping[str, Attack],
        rows: RowLog,
        columns: Mapping[str, Any],
        score_images: ScoreImages,
        batch_size: int,
        on_batch: Callable[[int, Mapping[str, list[float]]], None],
    ) -> None:
        self.victims, self.defense, self.rows, self.columns = victims, defense, rows, columns
        self.attacks = dict(attacks)
        self.score_images, self.batch_size, self.on_batch = score_images, batch_size, on_batch

    def attack(self, subject: Subject, settings: Sequence[Setting]) -> None:
        """Write the rows of one subject, in every setting and under every attack, that are not there yet.

        Raises:
            UsageError: one image alone does not fit the memory.
        """
        for alike in by_input(settings):
            cases = {
                (setting, name): self.victims.case(subject, self.defense, setting.name, name, attack.parameters())
                for setting in alike
                for name, attack in self.attacks.items()
            }
            for clients in self._batches(list(cases.values())):
                self._attack_or_halve(subject, clients, cases)

    def baselines(self, setting: str, mean: Tensor | None = None) -> None:
        """Write the rows of the two guesses that need no gradient, scored against the original images.

        Args:
            mean: (1, C, H, W) to take for the mean image; by default that of the victims' images.
        """
        cases = {name: self.victims.case(None, self.defense, setting, name, {}) for name in BASELINES}
        for batch in self._batches(list(cases.values())):
            mean = self.victims.mean_image(self.batch_size) if mean is None else mean
            clients, originals = self.victims.decode(batch)
            if not clients:
                continue
            others = self.victims.others(clients, originals)
            for name, guess in zip(BASELINES, (mean.expand_as(originals), others), strict=True):
                scores = self.score_images(guess, originals)
                for index, client in enumerate(clients):
                    if not self._lacks([cases[name]], client):
                        continue
                    own = scores[index * self.victims.group : (index + 1) * self.victims.group]
                    self._write(cases[name], client, Scored(name, {}, None, own, 0.0, ""), float("nan"))

    def _batches(self, cases: list[dict[str, Any]]) -> Iterator[list[int]]:
        """Clients, as many at a time as the memory takes, but for batches whose rows are all there.

        A batch is never cut down to what is missing: in other company an image's gradient is rounded differently, and
        a resumed campaign is to give the rows of an unbroken one.
        """
        clients = list(range(len(self.victims)))
        while clients:
            batch = clients[: self.batch_size]
            clients = clients[len(batch) :]
            if any(self._lacks(cases, client) for client in batch):
                yield batch
            else:
                self.on_batch(len(batch), {})

    def _lacks(self, cases: Sequence[Mapping[str, Any]], client: int) -> bool:
        return not all(self.rows.done(case, self.victims.ids(client)) for case in cases)

    def _attack_or_halve(self, subject: Subject, clients: list[int], cases: Cases) -> None:
        try:
            self._attack(subject, clients, cases)
            return
        except OUT_OF_MEMORY as error:
            if len(clients) == 1:
                raise UsageError(
                    f"{subject.built.name} does not fit the memory with a single image; use a smaller model or a CPU"
                ) from error
        # Outside the handler: the exception's traceback held the failed pass's tensors.
        if self.victims.device.type == "cuda":
            torch.cuda.empty_cache()
        self.batch_size = len(clients) // 2
        self.victims.warn(f"out of memory with {len(clients)} images a batch; going on with {self.batch_size}")
        while clients:
            size = self.batch_size  # the next part may halve it again
            self._attack_or_halve(subject, clients[:size], cases)
            clients = clients[size:]

    def _attack(self, subject: Subject, batch: list[int], cases: Cases) -> None:
        clients, originals = self.victims.decode(batch, subject.dtype)
        settings = list(dict.fromkeys(setting for setting, _ in cases))
        lacking = {name for (_, name), case in cases.items() if any(self._lacks([case], c) for c in clients)}
        done = set(self.attacks) - lacking
        found = {}
        if clients:
            found = answers(
                self.victims, subject, settings, clients, originals, self.attacks, self.score_images, skip=done
            )
        # Only now: a batch that runs out of memory half-way is computed again.
        psnr: dict[str, list[float]] = {name: [] for name in lacking}
        for (setting, name), lines in found.items():
            for client, (norm, one) in zip(clients, lines, strict=True):
                if not self._lacks([cases[setting, name]], client):
                    continue
                self._write(cases[setting, name], client, self._graded(subject, client, one), norm)
                psnr[name] += [record["psnr"] for record in one.records]
        self.on_batch(len(batch), psnr)

    def _graded(self, subject: Subject, client: int, one: Scored) -> Scored:
        """The answer with the share of the client's labels that the attack inferred rightly, where it inferred any."""
        found = one.reconstruction.labels
        if found is None:
            return one
        true = Counter(self.victims.labels(subject.built, [client]).tolist())
        share = (true & Counter(found.tolist())).total() / true.total()
        details = {**one.reconstruction.details, "label_accuracy": share}
        return replace(one, reconstruction=replace(one.reconstruction, details=details))

    def _write(self, case: Mapping[str, Any], client: int, one: Scored, norm: float) -> None:
        for place, image_id in enumerate(self.victims.ids(client)):
            self.rows.append({**self.columns, **one.row(case, image_id, norm, place)})
