"""Secure aggregation as a view: of a group of clients the server sees the mean of their updates and nothing else.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning". The protocol itself (masks
that cancel in the sum) is not run: what the server can know is the same, the sum, and with it the mean. To an attack
it is the update of one client whose batch holds the images of all of them.

The clients of a round are grouped in the order of their numbers, so that a group has the same members in every round
in which all clients take part. All of them use the same number of images, so that the mean has no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


def sum_in_words(size: int, alone: bool) -> str:
    """What a setting adds about sums of `size` clients, one of them singled out where `alone`; "" for no sum."""
    return f", sum of {size} clients" * (size > 1) + ", one singled out" * alone


def summed_clients(setting: str) -> int:
    """Clients whose sum the server saw in rows of this setting, as `sum_in_words` says it; 0 for single updates."""
    found = re.search(r", sum of (\d+) clients", setting)
    return int(found[1]) if found else 0


class SingleUpdate(Protocol):
    """One client's update, such as `fedmjp.federation.ServerView`."""

    round: int
    client: int
    sent: Mapping[str, Tensor]
    received: Mapping[str, Tensor]


@dataclass(frozen=True)
class SeenUpdate:
    """What the server sees of one client, or of a group.

    Attributes:
        round: number of the round, from 1.
        client: the client's number, or that of the group in its round, from 0.
        members: the numbers of the clients whose updates it holds.
        sent: weights and buffers that they were sent, by name.
        received: mean of the gradients or weights that they returned, by parameter name.
    """

    round: int
    client: int
    members: tuple[int, ...]
    sent: Mapping[str, Tensor]
    received: Mapping[str, Tensor]


class Aggregation:
    """Adds up the updates of groups of clients as they arrive; no single update is kept.

    Args:
        size: clients of a group; 0 where the server sees every update by itself.
        alone: an active server has sent all of a group but the first weights of zero, so that the sum is the first
            one's update, and is seen as such (`attacks.active.sums`).
    """

    def __init__(self, size: int, alone: bool = False) -> None:
        self.size, self.alone = size, alone
        self._round, self._groups = 0, 0
        self._asked = 0, 0  # round, and how many of its clients `place_of` was called for
        self._members: list[int] = []
        self._sums: dict[str, Tensor] = {}
        self._sent: Mapping[str, Tensor] = {}

    def place_of(self, round: int, client: int) -> tuple[int, int]:
        """`SeenUpdate.client` of the update that a client is going to send, and its place in its group.

        Args:
            round: its number.
            client: the next one, in the order of the clients' numbers; of a round, all are asked for.
        """
        if not self.size:
            return client, 0
        count = self._asked[1] if self._asked[0] == round else 0
        self._asked = round, count + 1
        return divmod(count, self.size)

    def add(self, update: SingleUpdate) -> SeenUpdate | None:
        """The update itself without aggregation; else what the server sees once the group is complete, until then None.

        Args:
            update: the next one, in the order of the clients' numbers within a round.
        """
        if not self.size:
            return SeenUpdate(update.round, update.client, (update.client,), update.sent, update.received)
        if update.round != self._round:
            self._round, self._groups, self._members = update.round, 0, []
        if not self._members:
            self._sums = {name: tensor.clone() for name, tensor in update.received.items()}
            self._sent = update.sent
        else:
            for name, tensor in update.received.items():
                self._sums[name] += tensor
        self._members.append(update.client)
        if len(self._members) < self.size:
            return None
        members = tuple(self._members[:1] if self.alone else self._members)
        mean = {name: total / len(members) for name, total in self._sums.items()}
        seen = SeenUpdate(update.round, self._groups, members, self._sent, mean)
        self._groups, self._members, self._sums = self._groups + 1, [], {}
        return seen
