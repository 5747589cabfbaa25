"""What every submission runs: images, models, budgets, and the federations that follow from them and from the threat
tiers (`fedmjp.leaderboard.tiers`). Imports torch only to lay out federations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attacks import ATTACKS, Capability, ThreatModel, UsageError
from fedmjp.config import AuditConfig, DataConfig, ModelConfig, RunConfig
from fedmjp.defenses.chain import split_chain
from fedmjp.federation_options import FederationConfig
from fedmjp.leaderboard.tiers import LACKING, PLAIN, SLOWEST, TIERS, Prepared, Tier

SEARCH = "inverting_gradients"  # the one search that every submission gets, beside the suite
BATCH = 8  # images of a client in a step, where the server is active
IMAGES = "photos-in-order"


@dataclass(frozen=True)
class Track:
    """How much is run; submissions of one track are compared with each other.

    Attributes:
        name: in files.
        meaning: one line, with its measured cost.
        images: under attack, one a client but where the server is active.
        models: the models of which updates of single clients are attacked, with shipped weights.
        summed: the models of which sums of updates are attacked.
        rounds: updates of an image where a tier has several, unless an attack that knows the defence wants more.
        most_rounds: that it gets.
        summed_clients: clients whose updates are summed.
        summed_images: images of each of them.
        budget: seconds of one CPU core that the suite may plan for an update, as `--budget` takes it.
        search_steps: steps (forward and backward passes) of `SEARCH` on an update.
        search_updates: updates that `SEARCH` gets in a federation.
        slowest_updates: updates that `SLOWEST` gets in a federation.
        tuned_model: model of the fine-tuning that gives accuracy and cost.
        tuning_rounds: its rounds.
        tuning_clients: its clients, each with as many images in a batch as it holds.
        test_images: on which accuracy is measured, at most, and of which one is a guess without a gradient.
        timed: updates that are timed.
        candidates: images among which a reconstruction's original is looked for.
    """

    name: str
    meaning: str
    images: int
    models: tuple[str, ...] = ("vit_mini_32", "vit_mini_64")
    summed: tuple[str, ...] = ("vit_mini_64",)
    rounds: int = 6
    most_rounds: int = 80
    summed_clients: int = 8
    summed_images: int = 3
    budget: str = "10s"
    search_steps: int = 100
    search_updates: int = 1
    slowest_updates: int = 1
    tuned_model: str = "vit_mini_64"
    tuning_rounds: int = 15
    tuning_clients: int = 12
    test_images: int = 40
    timed: int = 15
    candidates: int = 1000


TRACKS = {
    track.name: track
    for track in (
        Track("small", "8 photographs; 2 to 14 minutes on one of two busy cores for all defences but soteria", 8),
        Track(
            "full",
            "32 photographs on more federations with longer searches; not timed",
            32,
            search_steps=960,
            search_updates=4,
        ),
        Track(
            "trial",
            "2 photographs, to see whether a defence runs; took 15 seconds of a CPU core, not comparable",
            2,
            models=("vit_mini_32",),
            summed=("vit_mini_32",),
            rounds=2,
            most_rounds=2,
            summed_clients=2,
            summed_images=1,
            budget="2s",
            search_steps=2,
            search_updates=1,
            tuned_model="vit_mini_32",
            tuning_rounds=1,
            tuning_clients=4,
            test_images=8,
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
        prepared: what the server prepares; None for an honest one.
    """

    tier: Tier
    model: str
    config: RunConfig
    prepared: Prepared | None = None


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


@dataclass(frozen=True)
class Layout:
    """Who holds what in a federation whose updates are attacked.

    Attributes:
        clients, images: clients, and images of all of them.
        batch: images of a client in a step.
        rounds: of the federation.
        attacked_rounds: those whose updates are attacked.
        updates: updates that the server sees in a round: one a client, or one a group.
    """

    clients: int
    images: int
    batch: int
    rounds: int
    attacked_rounds: tuple[int, ...]
    updates: int


def layout(tier: Tier, track: Track, knowing: Sequence[str], prepared: Prepared | None = None) -> Layout:
    """A federation of a tier.

    Args:
        knowing: attacks that know the defence. A tier of several updates runs as many rounds as they want.
        prepared: what the server prepares, in every round; None for an honest one.
    """
    if prepared is not None:
        batch = min(track.images, BATCH) if prepared.batches else 1
        clients, rounds = track.images // batch, prepared.rounds or batch + 1
        return Layout(clients, track.images, batch, rounds, tuple(range(1, rounds + 1)), clients)
    if tier.group:
        rounds, clients = wanted(track, ("batch_rounds",)), track.summed_clients
        return Layout(clients, clients * track.summed_images, 1, rounds, (rounds,), clients // tier.group)
    rounds = wanted(track, knowing) if tier.several else 1
    return Layout(track.images, track.images, 1, rounds, (rounds,), track.images)


def wanted(track: Track, attacks: Sequence[str]) -> int:
    """Updates of an image for attacks that put several together: the most that one of them wants, within the track."""
    most = max((ATTACKS.get(name).updates_wanted for name in attacks if name in ATTACKS), default=0)
    return min(max(track.rounds, most), track.most_rounds)


def idle(tier: Tier, knowing: Sequence[str]) -> str:
    """Why a tier is not run on a defence that the attacks `knowing` take into account; "" where it is.

    Auxiliary data serve attacks that place patches. Without one, the tier gives what `passive_several` gives.
    """
    if Capability.AUXILIARY_DATA not in tier.grants:
        return ""
    grants = frozenset(tier.grants)
    threat, without = ThreatModel(grants), ThreatModel(grants - {Capability.AUXILIARY_DATA})
    own = [ATTACKS.get(name)() for name in knowing if name in ATTACKS]
    uses = any(attack.granted(threat) != attack.granted(without) for attack in own)
    return "" if uses else "no attack that knows the defence makes use of auxiliary data"


def images_of(track: Track) -> int:
    """Photographs of the list that a submission uses, in all its federations."""
    return max(layout(tier, track, (), next(iter(tier.prepared), None)).images for tier in TIERS)


def parts(entry: str, track: Track, out: Path, data: str = IMAGES) -> Iterator[Part]:
    """The federations whose updates are attacked, one for each tier, model, and attack of a server that prepares.

    Args:
        entry: the defence, as --defense takes it.
        out: a folder for the federations' own.
        data: the images, as --data takes them.

    Raises:
        UsageError: no such defence, or a setting that does not fit.
    """
    knowing = RunConfig().defence(entry).known_by
    for tier, prepared, model in federations(track, knowing, [name for name, _ in split_chain(entry)]):
        own = layout(tier, track, knowing, prepared)
        config = RunConfig(
            defense=(entry,),
            federation=FederationConfig(
                clients=own.clients, rounds=own.rounds, batch_size=own.batch, evaluate_every=own.rounds
            ),
            model=ModelConfig(model=model),
            data=DataConfig(data=data, train_limit=own.images, test_limit=track.test_images),
            audit=_audit(tier, track, own, prepared),
            threads=1,
            seed=SEED,
            out=out / "-".join([tier.name, *([prepared.attack] if prepared else []), model]),
            resume=True,  # whether it is the same run is decided by its folder
        )
        yield Part(tier, model, config, prepared)


def federations(
    track: Track, knowing: Sequence[str], defences: Sequence[str]
) -> Iterator[tuple[Tier, Prepared | None, str]]:
    """Tier, what the server prepares, and model of every federation under attack.

    Args:
        knowing: attacks that know the defence.
        defences: its name, several of a chain.
    """
    for tier in TIERS:
        if not idle(tier, knowing):
            for prepared in tier.federations(defences):
                for model in track.summed if tier.group else track.models:
                    yield tier, prepared, model


def missing(document: Mapping[str, Any]) -> list[tuple[Tier, Prepared | None, str]]:
    """The federations of the protocol that a submission was not run under, from its file alone."""
    lines = {(r["tier"], r["model"]): {line["attack"] for line in r["attacks"]} for r in document["results"]}

    def lacks(tier: Tier, prepared: Prepared | None, model: str) -> bool:
        """Whether there is no row of the federation. An attack that is asked for by name always has one."""
        ran = lines.get((tier.name, model), set())
        return not ran or (prepared is not None and prepared.attack not in ran)

    defences = [defence["name"] for defence in document["defences"]]
    every = federations(track_of(document["track"]), document["known_by"], defences)
    return [one for one in every if lacks(*one)]


def not_covered(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """The tiers that a submission was not, or not wholly, run under: tier, title, reason."""
    found = []
    lacks = missing(document)
    for tier in TIERS:
        reason = idle(tier, document["known_by"])
        lacking = {one.attack if one else "" for own, one, _ in lacks if own is tier}
        models = {model for own, _, model in lacks if own is tier}
        if lacking:
            ran = any(result["tier"] == tier.name for result in document["results"])
            which = sorted(filter(None, lacking)) or sorted(models)
            reason = LACKING + (f" ({', '.join(which)})" if ran else "")
        if reason:
            found.append({"tier": tier.name, "title": tier.title, "reason": reason})
    return found


def _audit(tier: Tier, track: Track, own: Layout, prepared: Prepared | None) -> AuditConfig:
    """The tier's attacks within the budget on every update; a search and the slowest one on some."""
    attacks = (prepared.attack,) if prepared else tier.attacks
    grants = (*PLAIN, *prepared.grants) if prepared else tier.grants
    limits = {SLOWEST: track.slowest_updates} if SLOWEST in attacks else {}
    limits |= {SEARCH: track.search_updates} if tier.searched else {}
    return AuditConfig(
        attacks=(*attacks, SEARCH) if tier.searched else attacks,
        budget=track.budget,
        audit_clients=tuple(range(own.updates)),
        audit_rounds=own.attacked_rounds,
        secure_aggregation=tier.group,
        at_most=tuple(f"{name}={count}" for name, count in limits.items()),
        steps=(f"{SEARCH}={track.search_steps}",) if tier.searched else (),
        grants=tuple(sorted(grant.value for grant in grants if grant is not Capability.AGGREGATE_ONLY)),
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
        data=DataConfig(data=TUNING_DATA, test_limit=track.test_images),
        # An audit names at least one update; the cheapest attack on the first client's costs milliseconds.
        audit=AuditConfig(attacks=("patch_embedding",), audit_clients=(0,), audit_rounds=(1,)),
        threads=1,
        seed=SEED,
        out=out / "tuning",
        resume=True,
    )


def for_rows(
    part: Part, clients: tuple[int, ...], rounds: tuple[int, ...], attacks: tuple[str, ...], out: Path
) -> RunConfig:
    """The run that repeats some rows of a part: only these clients' updates, only these attacks.

    Args:
        attacks: as --attacks takes them. Each gets every one of these updates.
        rounds: those of the rows. The federation stops after the last one, which changes nothing before it.
    """
    audit, federation = part.config.audit, part.config.federation
    steps = audit.steps if SEARCH in attacks else ()
    if part.prepared is None:
        federation = replace(federation, rounds=max(rounds), evaluate_every=max(rounds))
        audit = replace(audit, audit_rounds=rounds)
    audit = replace(audit, attacks=attacks, audit_clients=clients, at_most=(), steps=steps)
    return replace(part.config, federation=federation, audit=audit, out=out / part.config.out.name)
