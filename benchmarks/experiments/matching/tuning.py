"""The choice of settings for gradient matching: what is compared, see `tuning_options.TuningOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from rich.console import Console

from attacks import UsageError
from experiments.matching.protocol import PLAIN
from experiments.matching.tuning_options import TuningOptions
from experiments.matching.tuning_table import TUNING
from experiments.session import AttackSession
from fedmjp.audit.campaign import Campaign
from fedmjp.audit.victims import Subject, Victims
from fedmjp.budgets import build_attack
from fedmjp.data import Gallery, load_gallery
from fedmjp.defenses import DEFENSES
from fedmjp.models import MODELS, build_model, split_name
from fedmjp.models.weights import classes_of
from fedmjp.records.rows import RowLog


def run(options: TuningOptions, console: Console) -> None:
    """Compare, then write the table and print what was chosen."""
    session = AttackSession(options, console)
    gallery = other_images(options)
    built = build_model(
        options.model,
        num_classes=classes_of(options.model, options.weights) or len(gallery.images.classes),
        weights=options.weights,
        dal="none",
        seed=options.seed,
    )
    victims = session.victims(gallery, DEFENSES.get("none")(), options.seed)
    with session.rows() as rows, session.bar() as bar:
        chosen = {}
        for name, grid in options.read_grid().items():
            task = bar.add_task(name, total=sum(map(len, grid.values())))

            def mean_psnr(name: str, settings: Mapping[str, str], task=task) -> float:
                """Of the images under this attack."""
                found = psnr_of(options, session, rows, victims, Subject(built), name, settings)
                bar.advance(task)
                return float(np.mean(found))

            chosen[name] = best_settings(name, grid, mean_psnr)
    session.finish("matching_tuning", TUNING)
    parts = [f"{name}.{key}={value}" for name, own in chosen.items() for key, value in own.items()]
    console.print(f"--attack-options {','.join(parts)}", highlight=False, soft_wrap=True)


def best_settings(name: str, grid: Mapping[str, tuple[str, ...]], mean_psnr) -> dict[str, str]:
    """The settings varied one after the other, each left at the value of the highest mean PSNR.

    Args:
        name: of the attack.
        grid: values by setting.
        mean_psnr: of the attack's name and settings.
    """
    best: dict[str, str] = {}
    for setting, values in grid.items():
        reached = [mean_psnr(name, best | {setting: value}) for value in values]
        best[setting] = values[int(np.nanargmax(reached))]
    return best


def other_images(options: TuningOptions) -> Gallery:
    """Images beside those that `gradient_matching.py --num-images` with the number `scored` attacks.

    Raises:
        UsageError: there are too few.
    """
    size = MODELS.get(split_name(options.model)[0]).image_size
    scored, every = (
        load_gallery(options.images, size=size, limit=limit, path=options.data_path)
        for limit in (options.scored, options.scored + options.num_images)
    )
    taken = set(scored.images.ids)
    kept = [index for index, name in enumerate(every.images.ids) if name not in taken]
    if len(kept) < options.num_images:
        raise UsageError(
            f"--images {options.images} holds {len(every.images)} images: too few for {options.scored} that are scored "
            f"and {options.num_images} others"
        )
    return replace(every, images=every.images.subset(kept))


def psnr_of(
    options: TuningOptions,
    session: AttackSession,
    rows: RowLog,
    victims: Victims,
    subject: Subject,
    name: str,
    settings: Mapping[str, str],
) -> list[float]:
    """PSNR (dB) of each image under an attack with these settings, from rows that are there or are computed now."""
    attack = build_attack(name, {"steps": options.steps, "seed": options.seed, **settings})
    campaign = Campaign(
        victims,
        defense="none",
        attacks={name: attack},
        rows=rows,
        columns=session.columns,
        score_images=session.scorer(subject.built.patch_size),
        batch_size=len(victims),
        on_batch=lambda count, psnr: None,
    )
    campaign.attack(subject, (PLAIN,))
    asked = victims.case(subject, "none", PLAIN.name, name, attack.parameters())["attack_parameters"]
    found = [row["psnr"] for row in rows.rows() if row["attack"] == name and row["attack_parameters"] == asked]
    return [float(value) for value in found if value is not None]
