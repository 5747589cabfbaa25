"""What the confidence of completed patches depends on, beside whether they are right, and the curves through it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

from attacks import ATTACKS, Observation, UsageError
from attacks.linear.confidence import CURVES, RIGHT_DB, covariates
from attacks.memory import remember
from attacks.mjp.joined_updates import join_updates
from attacks.mjp.rounds import MJPRounds
from experiments.confidence.options import Options
from experiments.session import prepare_torch
from fedmjp.audit.victims import Setting, Victims, drifted
from fedmjp.data import Gallery, load_gallery
from fedmjp.data.imageset import choose
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of

COLUMNS = ("several", "shown", "right", "side", "deviation", "shared", "surroundings")
# Newton steps of the regression; it converges in fewer than ten.
STEPS = 30


def run(options: Options, console: Console) -> None:
    """Attack, note, fit over all files of the folder, print."""
    device = prepare_torch(options)
    options.out.mkdir(parents=True, exist_ok=True)
    noted = []
    for gamma in options.gammas:
        noted += _note(options, gamma, device, console)
        console.print(f"gamma {gamma:g}: done", highlight=False)
    if not noted:
        raise UsageError("no attacked update left a direction open: there is nothing to fit")
    name = "_".join([options.model, *map("{:g}".format, options.gammas), *map(str, options.updates)])
    np.savez(options.out / f"{name}.npz", patches=np.concatenate(noted), model=options.model)
    curves = fit_folder(options.out)
    curves.to_csv(options.out / "curves.csv", index=False)
    console.print(curves.round(3).to_string(index=False), highlight=False)


def fit_folder(folder: Path) -> pd.DataFrame:
    """One line a state of knowledge: its coefficients, the number of patches, and the share that is right.

    Every model has the same total weight, however many patches it has.
    """
    by_model: dict[str, list[np.ndarray]] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            by_model.setdefault(str(file["model"]), []).append(file["patches"])
    joined = [np.concatenate(parts) for parts in by_model.values()]
    weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in joined])
    patches, lines = np.concatenate(joined), []
    for several, shown in CURVES:
        own = (patches[:, 0] == several) & (patches[:, 1] == shown)
        if own.any():
            right, design = patches[own, 2], patches[own, 3:]
            found = logistic_regression(*(torch.from_numpy(x) for x in (design, right, weights[own])))
            line = {"several": several, "shown": shown, "patches": int(own.sum()), "right": right.mean()}
            lines.append(line | dict(zip(("constant", *COLUMNS[3:]), found.tolist(), strict=True)))
    return pd.DataFrame(lines)


def logistic_regression(design: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """(1 + C,) constant and coefficients of greatest weighted likelihood, by Newton's method.

    Coefficients that the data do not determine (a covariate that never changes) come out as 0.

    Args:
        design: (n, C) float64. right: (n,) 0 or 1. weights: (n,) positive.
    """
    x = torch.cat([torch.ones_like(design[:, :1]), design], dim=1)
    weights, found = weights / weights.sum(), x.new_zeros(x.shape[1])
    for _ in range(STEPS):
        expected = torch.sigmoid(x @ found)
        gradient = x.T @ (weights * (right - expected))
        hessian = (x * (weights * expected * (1 - expected))[:, None]).T @ x
        found = found + torch.linalg.pinv(hessian, rtol=1e-12, hermitian=True) @ gradient
    return found


def _note(options: Options, gamma: float, device: torch.device, console: Console) -> list[np.ndarray]:
    """Arrays (patches, len(COLUMNS)) of every attacked update of one masking ratio."""
    defense = DEFENSES.get("mjp")(gamma=gamma)
    model = defense.model_name(options.model)
    classes = classes_of(model, options.weights) or IMAGENET_CLASSES
    built = build_model(model, num_classes=classes, weights=options.weights, dal=defense.dal, seed=options.seed)
    built.module.to(device).eval()
    gallery = reserved(options, built.image_size)
    victims = Victims(gallery, defense, seed=options.seed, device=device, warn=console.print)
    setting = Setting("original", defended=True, hidden=True, against="original")
    attack, noted = ATTACKS.get("mjp_rounds")(), []
    histories: list[list[Observation]] = [[] for _ in range(len(victims))]
    for number in range(1, max(options.updates) + 1):
        built = drifted(built, options.drift, options.seed, number) if number > 1 else built
        for client, history in enumerate(histories):
            clients, originals = victims.decode([client])
            if clients:
                seen = victims.seen(built, setting, clients, originals, update=number - 1)
                history += victims.observe(built, seen, clients, [attack], defense.loss_weights())
                noted += _patches(attack, history, originals) if number in options.updates else []
                history[-1] = remember(history[-1])
    return noted


def reserved(options: Options, size: int) -> Gallery:
    """The last photographs of the random order in which `load_gallery` takes the first.

    Raises:
        UsageError: fewer pictures than twice the number set aside.
    """
    everything = load_gallery(options.images, size=size)
    count = len(everything.images)
    if count < 2 * options.reserved:
        raise UsageError(f"--images {options.images} holds {count} pictures, too few to set {options.reserved} aside")
    taken = set(choose(count, count - options.reserved, options.seed).tolist())
    kept = [i for i in np.random.default_rng(options.seed).permutation(count).tolist() if i not in taken]
    return Gallery(everything.images.subset(kept[: options.num_images]), everything.name, everything.provenance)


def _patches(attack: MJPRounds, history: list[Observation], originals: Tensor) -> Iterator[np.ndarray]:
    """(N, len(COLUMNS)) of the last update; nothing where the equations leave no direction open."""
    joined, target = join_updates(history), history[-1]
    settled = attack.prior.settle(joined.estimate(), joined.tokenizer, target.std)
    if settled.open:
        tokenizer = joined.tokenizer
        images = target.to_pixels(tokenizer.unpatchify(settled.patches[None])).to(originals)
        squares = tokenizer.patchify((images - originals).square())[0].mean(dim=1)  # (N,)
        right = squares < 10 ** (-RIGHT_DB / 10)
        several = torch.full_like(right, joined.equations.updates > 1)
        state = torch.stack([several, joined.shown, right], dim=1).double()
        yield torch.cat([state, covariates(settled, joined.shown, tokenizer)], dim=1).cpu().numpy()
