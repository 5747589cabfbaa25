"""What every submission runs: images, models, threat tiers, budgets, and the federations that follow from them.

A tier is a threat model of the literature, as a set of capabilities (`attacks.observation.Capability`) and a number of
updates. An attack belongs to the tiers that grant what it needs. Tiers for which this protocol has no attack are listed
with the reason, so that a reader sees what was not tested. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from attacks import Capability, UsageError
from fedmjp.budgets import AUTO
from fedmjp.config import AuditConfig, DataConfig, ModelConfig, RunConfig
from fedmjp.federation_options import FederationConfig

SEARCH = "inverting_gradients"  # the one search that every submission gets, beside the suite
SLOW = ("unmix", "unmix_rounds")  # seconds an update
IMAGES = "photos-in-order"
PLAIN = (Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT)
NOT_RUN = "no attack in this protocol yet"


@dataclass(frozen=True)
class Tier:
    """A threat model under which every defence is attacked.

    Attributes:
        name: in files.
        title: in tables.
        grants: capabilities of the server.
        several: whether the attacked update is the last of several of the same image.
        searched: whether `SEARCH` runs beside the suite.
        meaning: one sentence.
        published: the nearest threat model of Carletti et al. (USENIX Security 2025).
        why_not: why this protocol runs nothing under it; "" where it does.
    """

    name: str
    title: str
    grants: tuple[Capability, ...]
    meaning: str
    published: str = "none"
    several: bool = False
    searched: bool = False
    why_not: str = ""


TIERS = (
    Tier(
        "passive_one",
        "passive, one update",
        PLAIN,
        "an honest-but-curious server that has one update of a client and knows the model that it sent",
        "B, informed eavesdropper",
        searched=True,
    ),
    Tier(
        "passive_several",
        "passive, several updates",
        (*PLAIN, Capability.SEVERAL_ROUNDS),
        "the same server, which keeps a client's updates over the rounds; the client uses its image in every round",
        "B, over several rounds",
        several=True,
    ),
    Tier(
        "passive_auxiliary",
        "passive with auxiliary data",
        (*PLAIN, Capability.SEVERAL_ROUNDS, Capability.AUXILIARY_DATA),
        "the same server, which also has public photographs to fit priors and predictors to",
        "D, data-enhanced eavesdropper",
        several=True,
    ),
    Tier(
        "active_parameters",
        "active on parameters",
        (*PLAIN, Capability.ACTIVE_PARAMETERS),
        "a malicious server that chooses the weights it sends",
        "F, active manipulator",
        why_not=NOT_RUN,
    ),
    Tier(
        "active_architecture",
        "active on architecture",
        (*PLAIN, Capability.MODIFIED_MODEL),
        "a malicious server that chooses the architecture it sends",
        "F, active manipulator",
        why_not=NOT_RUN,
    ),
    Tier(
        "aggregate_only",
        "aggregate only",
        (*PLAIN, Capability.AGGREGATE_ONLY),
        "a server that sees the sum of many clients' updates and none of them alone",
        why_not=NOT_RUN,
    ),
)
RUN_TIERS = tuple(tier for tier in TIERS if not tier.why_not)


@dataclass(frozen=True)
class Track:
    """How much is run; submissions of one track are compared with each other.

    Attributes:
        name: in files.
        meaning: one line, with its measured cost.
        images: clients under attack; each holds one image.
        models: the models of which one update is attacked, with shipped weights.
        joined: the models of which several updates are attacked.
        rounds: updates of an image where a tier has several.
        budget: seconds of one CPU core that the suite may plan for an update, as `--budget` takes it.
        search_steps: steps (forward and backward passes) of `SEARCH` on an update.
        search_updates: updates that `SEARCH` gets in a federation.
        slow_updates: updates that each attack of `SLOW` gets in a federation.
        tuned_model: model of the fine-tuning that gives accuracy and cost.
        tuning_rounds: its rounds.
        tuning_clients: its clients, each with as many images in a batch as it holds.
        timed: updates that are timed.
        candidates: images among which a reconstruction's original is looked for.
    """

    name: str
    meaning: str
    images: int
    models: tuple[str, ...] = ("vit_mini_32", "vit_mini_64")
    joined: tuple[str, ...] = ("vit_mini_64",)
    rounds: int = 6
    budget: str = "10s"
    search_steps: int = 100
    search_updates: int = 1
    slow_updates: int = 4
    tuned_model: str = "vit_mini_64"
    tuning_rounds: int = 15
    tuning_clients: int = 12
    timed: int = 15
    candidates: int = 1000


TRACKS = {
    track.name: track
    for track in (
        Track("small", "8 photographs; took 1.2 minutes of a CPU core without a defence, 3.5 under quantise", 8),
        Track(
            "full",
            "32 photographs on more federations with longer searches; not timed",
            32,
            joined=("vit_mini_32", "vit_mini_64"),
            search_steps=960,
            search_updates=4,
            slow_updates=32,
        ),
        Track(
            "trial",
            "2 photographs, to see whether a defence runs; took 15 seconds of a CPU core, not comparable",
            2,
            models=("vit_mini_32",),
            joined=("vit_mini_32",),
            rounds=2,
            budget="2s",
            search_steps=2,
            search_updates=1,
            tuned_model="vit_mini_32",
            tuning_rounds=1,
            timed=2,
            candidates=40,
        ),
    )
}
COMPARED = ("small", "full")  # tracks of the table
SEED = 0
TUNING_RATE = 0.05
TUNING_BATCH = 8
TUNING_DATA = "photos"


@dataclass(frozen=True)
class Part:
    """One federation of a submission.

    Attributes:
        tier: under which its updates are attacked.
        model: name of the attacked model.
        config: the run.
    """

    tier: Tier
    model: str
    config: RunConfig


def slug(entry: str) -> str:
    """File name of a submission: "mjp:gamma=0.5+noise" is "mjp-gamma_0.5+noise"."""
    return re.sub(r"[^\w.+-]", "_", entry.replace(":", "-").replace(",", "-"))


def track_of(name: str) -> Track:
    """The track called `name`.

    Raises:
        UsageError: there is none.
    """
    if name not in TRACKS:
        raise UsageError(f"unknown track {name!r}; choose from: {', '.join(TRACKS)}")
    return TRACKS[name]


def parts(entry: str, track: Track, out: Path, data: str = IMAGES) -> Iterator[Part]:
    """The federations whose updates are attacked, one for each tier and model.

    Args:
        entry: the defence, as --defense takes it.
        out: a folder for the federations' own.
        data: the images, as --data takes them.
    """
    for tier in RUN_TIERS:
        rounds = track.rounds if tier.several else 1
        for model in track.joined if tier.several else track.models:
            config = RunConfig(
                defense=(entry,),
                federation=FederationConfig(clients=track.images, rounds=rounds, evaluate_every=rounds),
                model=ModelConfig(model=model),
                data=DataConfig(data=data, train_limit=track.images, test_limit=40),
                audit=_audit(tier, track, rounds),
                threads=1,
                seed=SEED,
                out=out / f"{tier.name}-{model}",
                resume=True,  # whether it is the same run is decided by its folder
            )
            yield Part(tier, model, config)


def _audit(tier: Tier, track: Track, rounds: int) -> AuditConfig:
    """The suite within the budget on every client's last update, its slow attacks and one search on some."""
    searched, limits = tier.searched, dict.fromkeys(SLOW, track.slow_updates)
    limits |= {SEARCH: track.search_updates} if searched else {}
    return AuditConfig(
        attacks=(AUTO, SEARCH) if searched else (AUTO,),
        budget=track.budget,
        audit_clients=tuple(range(track.images)),
        audit_rounds=(rounds,),
        at_most=tuple(f"{name}={count}" for name, count in limits.items()),
        steps=(f"{SEARCH}={track.search_steps}",) if searched else (),
        grants=tuple(sorted(grant.value for grant in tier.grants)),
    )


def tuning(entry: str, track: Track, out: Path) -> RunConfig:
    """The fine-tuning federation that gives accuracy and cost: batches of several images, no attack but one."""
    return RunConfig(
        defense=(entry,),
        federation=FederationConfig(
            clients=track.tuning_clients,
            rounds=track.tuning_rounds,
            batch_size=TUNING_BATCH,
            learning_rate=TUNING_RATE,
            evaluate_every=track.tuning_rounds,
        ),
        model=ModelConfig(model=track.tuned_model),
        data=DataConfig(data=TUNING_DATA, test_limit=None),
        # An audit names at least one update; the cheapest attack on the first client's costs milliseconds.
        audit=AuditConfig(attacks=("patch_embedding",), audit_clients=(0,), audit_rounds=(1,)),
        threads=1,
        seed=SEED,
        out=out / "tuning",
        resume=True,
    )


def for_rows(part: Part, clients: tuple[int, ...], attacks: tuple[str, ...], out: Path) -> RunConfig:
    """The run that repeats some rows of a part: only these clients' updates, only these attacks."""
    audit = part.config.audit
    steps = audit.steps if SEARCH in attacks else ()
    audit = replace(audit, attacks=attacks, audit_clients=clients, at_most=(), steps=steps)
    return replace(part.config, audit=audit, out=out / part.config.out.name)
