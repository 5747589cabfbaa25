"""Threat tiers: a threat model of the literature, as a set of capabilities and a number of updates.

An attack belongs to the tiers that grant what it needs. Where the server chooses what it sends, a client can be sent
what one attack sets alone; such a tier is several federations, one for each attack (`Prepared`), and of a photograph
each attack has the row of the round in which it came nearest to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attacks import Capability, UsageError
from fedmjp.budgets import AUTO

PLAIN = (Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT)
SLOWEST = "batch_tokens"  # up to a minute a sum
LACKING = "not run for this submission; fedmjp-leaderboard add --only-missing runs it"


@dataclass(frozen=True)
class Prepared:
    """A federation whose clients are sent what one attack sets, in every round.

    Attributes:
        attack: its name.
        rounds: of the federation; 0 for one more than a batch has images, so that each may have a round.
        batches: whether a client holds several images in a step.
        grants: what the attack needs beside `PLAIN`.
        defence: the only defence whose clients can be attacked so; "" for all.
    """

    attack: str
    rounds: int = 1
    batches: bool = True
    grants: tuple[Capability, ...] = (Capability.ACTIVE_PARAMETERS,)
    defence: str = ""


@dataclass(frozen=True)
class Tier:
    """A threat model under which every defence is attacked.

    Attributes:
        name: in files.
        title: in tables.
        grants: capabilities of the server.
        several: whether the attacked update is the last of several of the same image.
        searched: whether a search runs beside the suite.
        attacks: what runs, as --attacks takes it, where the server sends what an honest one does.
        prepared: the federations of a server that does not; () for an honest one.
        group: clients of whose updates the server sees the sum alone; 0 where it sees each.
        meaning: one sentence.
        published: the nearest threat model of Carletti et al. (USENIX Security 2025).
    """

    name: str
    title: str
    grants: tuple[Capability, ...]
    meaning: str
    published: str = "none"
    several: bool = False
    searched: bool = False
    attacks: tuple[str, ...] = (AUTO,)
    prepared: tuple[Prepared, ...] = ()
    group: int = 0

    def federations(self, defences: Sequence[str]) -> tuple[Prepared | None, ...]:
        """The federations under a defence: those that a server prepares, or the one of an honest server as None.

        Args:
            defences: names of the defence, several in a chain.
        """
        if not self.prepared:
            return (None,)
        return tuple(one for one in self.prepared if not one.defence or one.defence in defences)

    def prepared_for(self, attack: str) -> Prepared | None:
        """The federation that an attack's rows are of, and the guesses' rows; None where the server is honest."""
        found = [one for one in self.prepared if one.attack == attack]
        return next(iter(found or self.prepared), None)


SEVERAL_AND_ACTIVE = (Capability.SEVERAL_ROUNDS, Capability.ACTIVE_PARAMETERS)
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
        (*PLAIN, *SEVERAL_AND_ACTIVE),
        "a malicious server that chooses the weights it sends, to clients with several images in a batch (those that "
        "train adapters or LoRA: also with one)",
        "F, active manipulator",
        prepared=(
            Prepared("fishing", rounds=0),
            Prepared("feature_fishing", rounds=0, grants=SEVERAL_AND_ACTIVE),
            Prepared("token_bins"),
            Prepared("adapter_trap", batches=False, grants=SEVERAL_AND_ACTIVE, defence="adapters"),
            Prepared("lora_trap", rounds=2, batches=False, grants=SEVERAL_AND_ACTIVE, defence="lora"),
        ),
    ),
    Tier(
        "active_architecture",
        "active on architecture",
        (*PLAIN, Capability.ACTIVE_ARCHITECTURE),
        "a malicious server that adds a layer to the model it sends, to clients with several images in a batch, whose "
        "program trains what it is sent",
        "F, active manipulator",
        # In the second round the server knows in what format the client sends.
        prepared=(Prepared("imprint", rounds=2, grants=(Capability.ACTIVE_ARCHITECTURE,)),),
    ),
    Tier(
        "aggregate_only",
        "aggregate only",
        (*PLAIN, Capability.SEVERAL_ROUNDS, Capability.AGGREGATE_ONLY),
        "a server that sees the sums of two clients' updates over the rounds, and none of them alone",
        attacks=(AUTO, SLOWEST),
        group=2,
    ),
)
PASSIVE = tuple(tier for tier in TIERS if not tier.prepared and not tier.group)  # nested


def tier_called(name: str) -> Tier:
    """The tier of that name.

    Raises:
        UsageError: there is none.
    """
    found = next((tier for tier in TIERS if tier.name == name), None)
    if found is None:
        raise UsageError(f"unknown tier {name!r}; choose from: {', '.join(tier.name for tier in TIERS)}")
    return found
