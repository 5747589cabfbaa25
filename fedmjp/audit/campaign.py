"""Attack the updates of many clients that hold one image each, or a few, and write every score to disk immediately.

The steps are: image -> defence on the input -> gradients of the attacked layers, a batch of clients in one pass ->
Observations -> attack, one batched solve -> scores -> rows. Rows that exist already are not computed again. An image
that cannot be decoded is left out with a warning. A batch that does not fit into memory is halved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attacks import Attack, UsageError
from attacks.base import OUT_OF_MEMORY
from fedmjp.audit.guesses import without_copies
from fedmjp.audit.harness import Scored, ScoreImages, score_found
from fedmjp.audit.victims import Setting, Subject, Victims, by_input
from fedmjp.metrics import MEAN_IMAGE
from fedmjp.records.image_digests import ImageDigests
from fedmjp.records.rows import BASELINES, RowLog
from fedmjp.workers import HERE, Lost, WorkerConfig, in_order

Cases = Mapping[tuple[Setting, str], dict[str, Any]]


def run_attacks(
    victims: Victims,
    subject: Subject,
    settings: Sequence[Setting],
    clients: list[int],
    originals: Tensor,
    attacks: Mapping[str, Attack],
    score_images: ScoreImages,
    skip: Collection[str] = (),
) -> dict[tuple[Setting, str], list[tuple[float, Scored]]]:
    """Run each attack on each client's update and score the reconstructions.

    Args:
        victims: compute the updates.
        subject: the attacked model.
        settings: settings with the same model input (see `by_input`).
        clients: the clients' numbers.
        originals: the clients' images (clients x group, C, H, W) in [0, 1], on the device and in the subject's
            precision.
        attacks: by name; together they determine which layers' gradients are computed and enter the reported norm.
        score_images: see `harness.scorer`.
        skip: names of attacks that are not run.

    Returns:
        (setting, attack) -> for each client the norm of those gradients, and the scored reconstruction.
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


@dataclass(frozen=True)
class _Batch:
    """Clients that are attacked together.

    Attributes:
        clients: their numbers.
        lacking: (setting, attack, client) of each of their rows that is missing.
    """

    clients: list[int]
    lacking: frozenset[tuple[Setting, str, int]]


@dataclass(frozen=True)
class _Found:
    """What a batch of clients gave.

    Attributes:
        rows: the rows that were missing.
        psnr: each attack's PSNR in them (dB).
        warnings: lines for the user.
        batch_size: clients that fit into memory at once.
    """

    rows: list[dict[str, Any]]
    psnr: dict[str, list[float]]
    warnings: list[str]
    batch_size: int


@dataclass(frozen=True)
class _Work:
    """Attacks batches of clients. Holds no file and no display, so that another machine can compute it.

    Attributes:
        victims: the clients.
        subject: the attacked model.
        cases: what identifies the rows of each setting and attack.
        attacks: by name.
        columns: columns that are the same in all rows of the run.
        score_images: see `harness.scorer`.
    """

    victims: Victims
    subject: Subject
    cases: Cases
    attacks: Mapping[str, Attack]
    columns: Mapping[str, Any]
    score_images: ScoreImages

    def __call__(self, batch: _Batch) -> _Found:
        """The missing rows of a batch, which is halved as long as it does not fit into memory.

        Raises:
            UsageError: not even one client fits.
        """
        warnings: list[str] = []
        victims = self.victims.with_warnings(warnings.append)
        rows: list[dict[str, Any]] = []
        psnr: dict[str, list[float]] = defaultdict(list)
        clients, size = batch.clients, len(batch.clients)
        while clients:
            some = clients[:size]
            found = self._attack_if_it_fits(victims, some, batch.lacking)
            if found is None:  # outside the handler, because its traceback keeps the tensors of the failed pass alive
                if victims.device.type == "cuda":
                    torch.cuda.empty_cache()
                size = len(some) // 2
                victims.warn(f"out of memory with {len(some)} clients per batch; continuing with {size}")
                continue
            for setting, name, client, one, norm in found:
                rows += _rows_of(victims, self.cases[setting, name], client, one, norm, self.columns)
                psnr[name] += [record["psnr"] for record in one.records]
            clients = clients[size:]
        return _Found(rows, dict(psnr), warnings, size)

    def _attack_if_it_fits(
        self, victims: Victims, batch: list[int], lacking: Collection[tuple[Setting, str, int]]
    ) -> list[tuple[Setting, str, int, Scored, float]] | None:
        """(setting, attack, client, scored answer, gradient norm) of each missing row; None where memory runs out."""
        try:
            return self._attack(victims, batch, lacking)
        except OUT_OF_MEMORY as error:
            if len(batch) == 1:
                raise UsageError(
                    f"{self.subject.built.name} does not fit into memory with a single image; use a smaller model or "
                    "a CPU"
                ) from error
            return None

    def _attack(
        self, victims: Victims, batch: list[int], lacking: Collection[tuple[Setting, str, int]]
    ) -> list[tuple[Setting, str, int, Scored, float]]:
        clients, originals = victims.decode(batch, self.subject.dtype)
        if not clients:
            return []
        settings = list(dict.fromkeys(setting for setting, _ in self.cases))
        done = set(self.attacks) - {name for _, name, client in lacking if client in clients}
        found = run_attacks(
            victims, self.subject, settings, clients, originals, self.attacks, self.score_images, skip=done
        )
        return [
            (setting, name, client, self._with_label_accuracy(victims, client, one), norm)
            for (setting, name), lines in found.items()
            for client, (norm, one) in zip(clients, lines, strict=True)
            if (setting, name, client) in lacking
        ]

    def _with_label_accuracy(self, victims: Victims, client: int, one: Scored) -> Scored:
        """Add the share of the client's labels that the attack inferred correctly, if it inferred any."""
        found = one.reconstruction.labels
        if found is None:
            return one
        true = Counter(victims.labels(self.subject.built, [client]).tolist())
        share = (true & Counter(found.tolist())).total() / true.total()
        details = {**one.reconstruction.details, "label_accuracy": share}
        return replace(one, reconstruction=replace(one.reconstruction, details=details))


class Campaign:
    """Runs all attacks on all victims of a gallery, for one model after the other.

    Args:
        victims: the clients.
        defense: name of the victims' defence, for the rows.
        attacks: by name.
        rows: log that receives every score.
        columns: columns that are the same in all rows of the run (`run_id` and `provenance.columns`).
        score_images: see `harness.scorer`.
        batch_size: clients per pass; halved permanently whenever memory runs out.
        on_batch: called after each batch with the number of clients processed, and each attack's PSNR on them (dB).
        workers: where batches are computed; the rows are the same, and in the same order, wherever that is. A batch
            that is given up is left out with a warning that names its images (`workers.Lost.lines`).
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
        workers: WorkerConfig = HERE,
    ) -> None:
        self.victims, self.defense, self.rows, self.columns = victims, defense, rows, columns
        self.attacks = dict(attacks)
        self.score_images, self.batch_size, self.on_batch = score_images, batch_size, on_batch
        self.workers = workers
        self._checked: set[int] = set()
        self._lost: set[int] = set()
        self._digests = ImageDigests(rows.path.parent, victims.gallery.name)

    def attack(self, subject: Subject, settings: Sequence[Setting]) -> None:
        """Write the missing rows of one subject, for every setting and attack.

        Raises:
            UsageError: not even one client fits into memory.
        """
        for alike in by_input(settings):
            cases = {
                (setting, name): self.victims.case(subject, self.defense, setting.name, name, attack.parameters())
                for setting in alike
                for name, attack in self.attacks.items()
            }
            work = _Work(
                self.victims.with_warnings(print), subject, cases, self.attacks, self.columns, self.score_images
            )
            for batch, found in in_order(self._batches(cases), work, self.workers):
                self._write_found(batch, found)
            self._require_complete(list(cases.values()))

    def _write_found(self, batch: _Batch, found: _Found | Lost) -> None:
        clients, psnr = batch.clients, {}
        if isinstance(found, Lost):
            self._lost |= set(clients)
            for line in found.lines(name for client in clients for name in self.victims.ids(client)):
                self.victims.warn(line)
        else:
            psnr = found.psnr
            if found.batch_size < len(clients):
                self.batch_size = found.batch_size
            for line in found.warnings:
                self.victims.warn(line)
            for row in found.rows:
                self.rows.append(row)
        self.on_batch(len(clients), psnr)

    def baselines(self, setting: str, mean: Tensor | None = None) -> None:
        """Write the rows of the two guesses that need no gradient, scored against the original images.

        Args:
            setting: name for the rows' column.
            mean: (1, C, H, W) in [0, 1], the mean image; by default that of the victims' images.
        """
        cases = {name: self.victims.case(None, self.defense, setting, name, {}) for name in BASELINES}
        for batch in self._batches({(setting, name): case for name, case in cases.items()}):
            mean = self.victims.mean_image(self.batch_size) if mean is None else mean
            clients, originals = self.victims.decode(batch.clients)
            if not clients:
                continue
            means = without_copies(mean.expand_as(originals), originals, guess=MEAN_IMAGE)
            others = self.victims.others(clients, originals)
            for name, guess in zip(BASELINES, (means, others), strict=True):
                scores = self.score_images(guess, originals)
                for index, client in enumerate(clients):
                    if not self._lacks([cases[name]], client):
                        continue
                    own = scores[index * self.victims.group : (index + 1) * self.victims.group]
                    one = Scored(name, {}, None, own, 0.0, "")
                    for row in _rows_of(self.victims, cases[name], client, one, float("nan"), self.columns):
                        self.rows.append(row)

    def _batches(self, cases: Mapping[tuple[Any, str], dict[str, Any]]) -> Iterator[_Batch]:
        """Batches of clients of the current batch size, without those whose rows are complete.

        A batch with missing rows is always computed as a whole: an image's gradient is rounded differently when the
        batch around it changes, and a resumed campaign must give the same rows as an uninterrupted one.
        """
        clients = list(range(len(self.victims)))
        while clients:
            batch = clients[: self.batch_size]
            clients = clients[len(batch) :]
            self._check_images(batch)
            lacking = [(*key, c) for key, case in cases.items() for c in batch if self._lacks([case], c)]
            if lacking:
                yield _Batch(batch, frozenset(lacking))
            else:
                self.on_batch(len(batch), {})

    def _check_images(self, batch: list[int]) -> None:
        """Refuse pictures that are not those of the rows; once a batch and image size."""
        fresh = [client for client in batch if client not in self._checked]
        clients, images = self.victims.decode(fresh) if fresh else ([], None)
        self._checked |= set(fresh)
        if clients:
            self._digests.check([name for client in clients for name in self.victims.ids(client)], images)

    def _require_complete(self, cases: Sequence[Mapping[str, Any]]) -> None:
        """Every image that can be decoded has a row in every case, but for batches that were left out.

        Raises:
            UsageError: one has not.
        """
        left_out = self._lost | set(self.victims.unreadable)
        present = (client for client in range(len(self.victims)) if client not in left_out)
        lacking = [client for client in present if self._lacks(cases, client)]
        if lacking:
            raise UsageError(
                f"{self.rows.path} lacks rows of {len(lacking)} clients, the first of which holds "
                f"{self.victims.ids(lacking[0])[0]}; go on with --resume"
            )

    def _lacks(self, cases: Sequence[Mapping[str, Any]], client: int) -> bool:
        return not all(self.rows.done(case, self.victims.ids(client)) for case in cases)


def _rows_of(
    victims: Victims, case: Mapping[str, Any], client: int, one: Scored, norm: float, columns: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One row for each of the client's images."""
    ids = victims.ids(client)
    return [{**columns, **one.row(case, image_id, norm, place)} for place, image_id in enumerate(ids)]
