"""The mean gradient of several rounds of which only some entries were sent each time.

*With error feedback* the client adds what it did not send, its memory m, to the next update. After T rounds the sum of
what was sent is that of the gradients without the last memory,

    sum_t sent_t = sum_t g_t - m_T,

and an entry's memory is zero in the rounds in which it is sent. An entry that was sent last in round tau is therefore
known without error up to then, and if its gradient hardly changes, its memory is (T - tau) times its mean so far. Of an
entry that was never sent, and of any memory, top-k tells that it is no larger than the smallest entry that was sent.

*Without* it, every entry that was sent is that round's own gradient, and their mean is taken.

How much gradients change from round to round is measured on the entries that were sent twice or more: by the two ways
of reading them, which also tells the two kinds of clients apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Fewest entries that were sent twice from which their agreement is measured.
LEAST_PAIRS = 16
# Deviation of a median difference of two normal numbers, in units of that median.
OF_MEDIAN = 1.48


@dataclass(frozen=True)
class RoundsOfEntries:
    """What several rounds say of a tensor's entries.

    Attributes:
        sent: (T, n) float64, zeros where an entry was not sent.
        limits: (T,) no entry that was left out of a round, memory included, is larger; infinite where nothing is known.
        errors: (T, n), largest error of what was sent.
    """

    sent: Tensor
    limits: Tensor
    errors: Tensor

    @property
    def on(self) -> Tensor:
        """(T, n) bool, which entries were sent."""
        return self.sent != 0

    def _times(self, count: int) -> list[Tensor]:
        """The last rounds, from 1 on, in which each entry was sent, latest first: `count` tensors (n,), 0 for never."""
        numbers = torch.arange(1, len(self.sent) + 1).to(self.sent)[:, None]
        found = [(self.on * numbers).amax(dim=0)]
        for _ in range(count - 1):
            found.append((self.on * numbers * (numbers < found[-1])).amax(dim=0))
        return found

    def has_memory(self) -> bool:
        """Whether the client has error feedback: an entry that waited twice as long is twice as large.

        Entries whose last two waits differ show it; where there are few, feedback is assumed.
        """
        last, before, earlier = self._times(3)
        shows = (before > 0) & (last - before != before - earlier)
        if int(shows.sum()) < LEAST_PAIRS:
            return True
        last, before, earlier = last[shows], before[shows], earlier[shows]
        late, early = (_at(self.sent[:, shows], place) for place in (last, before))
        waited = _difference(late / (last - before), early / (before - earlier))
        return not _difference(late, early) < waited

    def disagreement(self, *, memory: bool) -> float:
        """Median relative difference of the gradients that an entry had before its last two transmissions.

        Args:
            memory: whether there is error feedback.

        Returns:
            The difference, or NaN where fewer than `LEAST_PAIRS` entries were sent twice.
        """
        last, before = self._times(2)
        twice = before > 0
        if int(twice.sum()) < LEAST_PAIRS:
            return float("nan")
        last, before, sent = last[twice], before[twice], self.sent[:, twice]
        if not memory:
            return _difference(_at(sent, last), _at(sent, before))
        sums = sent.cumsum(dim=0)
        early = _at(sums, before)
        return _difference(early / before, (sums[-1] - early) / (last - before))

    def mean(self, disagreement: float, *, memory: bool) -> tuple[Tensor, Tensor]:
        """The mean gradient of the rounds, (n,), and the largest error of each entry.

        Args:
            disagreement: relative change of gradients; 1 where it is not known.
            memory: whether there is error feedback.
        """
        rounds, (last,) = len(self.sent), self._times(1)
        total, known = self.sent.sum(dim=0), last > 0
        spread = min(3**0.5 * OF_MEDIAN * disagreement, 1.0)
        errors = self.errors.square().sum(dim=0).sqrt()
        if memory:
            limit = float(self.limits[-1])
            rate, waiting = total / last.clamp(min=1), rounds - last
            guess = torch.where(known, (waiting * rate).clamp(-limit, limit), 0.0)
            unsure = (waiting * rate.abs() * spread).clamp(max=limit)
            mean, bounds = (total + guess) / rounds, (unsure + errors) / rounds
            least = limit / rounds
        else:
            times = self.on.sum(dim=0).clamp(min=1)
            mean = total / times
            bounds = torch.where(self.on.all(dim=0), 0.0, mean.abs() * spread) + errors / times
            least = float(self.limits.mean())
        size = (3 * mean[known].square().mean()).sqrt() if known.any() else mean.new_tensor(1.0)
        return mean, torch.where(known, bounds, min(least, float(size)) if least < torch.inf else float(size))


def _at(tensor: Tensor, rounds: Tensor) -> Tensor:
    """Each column of (T, n) at its round, from 1 on: (n,)."""
    return tensor.gather(0, rounds.long()[None] - 1)[0]


def _difference(first: Tensor, second: Tensor) -> float:
    """Median relative difference."""
    return float((2 * (second - first).abs() / (first.abs() + second.abs())).median())
