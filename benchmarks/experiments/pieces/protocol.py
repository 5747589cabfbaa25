"""Patches up to their order from one update; the protocol stands in `options.Options`."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from rich.console import Console
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks import Tokenizer, find_tokenizer
from experiments.pieces.options import Options
from experiments.pieces.render import PIECES, SCHEMA
from experiments.session import Session, TableRun
from fedmjp.audit.per_image import observe_groups
from fedmjp.audit.victims import Setting, Victims
from fedmjp.budgets import build_attack
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import RowLog

POSITIONS = "position embedding"
RIGHT = 25.0  # dB, above which a patch counts as recovered
CLOSEST = 1e-12  # smallest squared error that PSNR resolves (120 dB)
MASKED = Setting("masked", defended=True, hidden=True, against="original")
PLAIN = Setting("plain", defended=False, hidden=False, against="original")


def run(options: Options, console: Console) -> None:
    """Attack, then write the table."""
    Run(options, console)()


class Run(TableRun):
    """One call of the benchmark."""

    program, rendering, one_seed = "pieces", PIECES, True

    def start(self, options: Options, console: Console) -> Session:
        """See `TableRun.start`: rows of pieces."""
        return Session(options, console, SCHEMA)

    def attack(self, rows: RowLog) -> str:
        """See `TableRun.attack`."""
        o, images = self.options, ""
        for solver in o.solvers:
            if o.without_positions:
                images = self.place(f"{o.model}_nope", DEFENSES.get("none")(), "patch_set", solver, rows)
            for gamma in o.gammas:
                defense = replace(DEFENSES.get("mjp")(), gamma=gamma)
                images = self.place(defense.model_name(o.model), defense, "unmix", solver, rows)
        return images

    def place(self, model: str, defense: Defense, name: str, solver: str, rows: RowLog) -> str:
        """Attack one client for each image, its pieces placed by `solver`; returns the images' provenance."""
        o, gamma = self.options, getattr(defense, "gamma", 0.0)
        classes = classes_of(model, o.weights) or IMAGENET_CLASSES
        dal = getattr(defense, "dal", "none")
        built = build_model(
            model, num_classes=classes, weights=o.weights, dal=dal, seed=o.seed, image_size=o.image_size
        )
        title = built.name if o.image_size is None else built.sized_name
        built.module.to(self.session.device).eval()
        gallery = self.session.gallery(o.images, size=built.image_size, limit=o.num_images, path=o.data_path)
        victims = Victims(gallery, defense, seed=o.seed, device=self.session.device, warn=self.session.say)
        tokenizer = find_tokenizer(built.module, (3, built.image_size, built.image_size))
        case = {"dataset": gallery.name, "model": title, "weights": built.provenance, "attack": name}
        case |= {"solver": solver, "gamma": gamma, "seed": o.seed}
        withheld = o.withhold_positions and bool(gamma)
        case |= {"withheld": POSITIONS} if withheld else {}
        attack = build_attack(name, {"placement.solver": solver})
        with self.session.bar() as bar:
            task = bar.add_task(f"{title}, gamma {gamma:g}, {solver}", total=len(victims))
            for batch in victims.batches(1):
                if not all(rows.done(case, victims.ids(client)) for client in batch):
                    clients, originals = victims.decode(batch)
                    setting = MASKED if gamma else PLAIN
                    seen = victims.seen(built, setting, clients, originals)
                    terms = defense.loss_weights() if gamma else {}
                    labels = victims.labels(built, clients)
                    views = observe_groups(built, seen, labels, 1, terms)
                    for client, view in zip(clients, views, strict=True):
                        hidden = hidden_places(view, tokenizer)
                        if withheld:
                            sent = {n: g for n, g in view.gradients.items() if n != tokenizer.positions}
                            view = replace(view, gradients=sent)
                        started = time.process_time()
                        found = attack([view])
                        seconds = time.process_time() - started
                        scores = score(found.images, originals[:1], hidden, tokenizer)
                        answer = {"seconds": seconds, "hidden": int(hidden.sum()), "diagnosis": found.diagnosis}
                        columns = {"tokens_found": found.details.get("found"), "image_id": victims.ids(client)[0]}
                        rows.append({**self.session.columns, **case, **columns, **answer, **scores})
                bar.advance(task, len(batch))
        return gallery.provenance


def hidden_places(observation, tokenizer: Tokenizer) -> Tensor:
    """(N,) bool: places whose position row is exactly zero, or all where there are no positions."""
    rows = tokenizer.position_rows(observation.gradients)
    if rows is None:
        return torch.ones(tokenizer.num_patches, dtype=torch.bool)
    return (rows[tokenizer.prefix :] == 0).all(dim=1).cpu()


def score(answer: Tensor | None, original: Tensor, hidden: Tensor, tokenizer: Tokenizer) -> dict[str, float]:
    """Scores of one answer (1, C, H, W) in [0, 1]; NaN without an answer.

    Args:
        original: (1, C, H, W) in [0, 1].
        hidden: (N,) bool, places whose patches are assigned in the best way for the scores up to order.

    Returns:
        Share of patches above 25 dB (right) and PSNR of the whole (psnr_unordered), both up to the order of the
        hidden patches; PSNR as placed.
    """
    if answer is None:
        return dict.fromkeys(("right", "psnr_unordered", "psnr"), float("nan"))
    ours, theirs = (tokenizer.patchify(image.cpu().double())[0] for image in (answer, original))  # (N, P)
    placed = (ours - theirs).square().mean(dim=1)  # (N,)
    unordered, places = placed.clone(), hidden.nonzero().flatten()
    if len(places):
        errors = (ours[places][:, None] - theirs[places]).square().mean(dim=2)  # (M, M)
        # What a patch is off by beyond recognition does not matter to the assignment.
        left, right = linear_sum_assignment(errors.clamp(max=10 ** (-RIGHT / 10) * 16).numpy())
        unordered[places[right]] = errors[left, right]
    decibel = -10 * unordered.clamp(min=CLOSEST).log10()
    return {
        "right": float((decibel > RIGHT).double().mean()),
        "psnr_unordered": float(-10 * unordered.mean().clamp(min=CLOSEST).log10()),
        "psnr": float(-10 * placed.mean().clamp(min=CLOSEST).log10()),
    }
