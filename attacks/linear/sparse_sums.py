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

    def _numbers(self) -> Tensor:
        return torch.arange(1, len(self.sent) + 1).to(self.sent)[:, None]

    def disagreement(self, *, memory: bool, apart: int = 1) -> float:
        """Median relative difference of the gradients that an entry had before its last two transmissions.

        Args:
            memory: whether there is error feedback.
            apart: least rounds between the two; from 2 on, clients with and without memory differ.

        Returns:
            The difference, or NaN where fewer than `LEAST_PAIRS` entries were sent twice.
        """
        last = (self.on * self._numbers()).amax(dim=0)  # (n,) tau, 0 for never
        before = (self.on * self._numbers() * (self._numbers() < last)).amax(dim=0)
        twice = (before > 0) & (last - before >= apart)
        if int(twice.sum()) < LEAST_PAIRS:
            return float("nan")
        last, before = last[twice], before[twice]
        sent = self.sent[:, twice]
        if memory:
            sums = sent.cumsum(dim=0)
            early = sums.gather(0, before.long()[None] - 1)[0]
            first, second = early / before, (sums[-1] - early) / (last - before)
        else:
            first, second = (sent.gather(0, place.long()[None] - 1)[0] for place in (before, last))
        return float(((second - first).abs() / (first.abs() + second.abs())).median() * 2)

    def mean(self, disagreement: float, *, memory: bool) -> tuple[Tensor, Tensor]:
        """The mean gradient of the rounds, (n,), and the largest error of each entry.

        Args:
            disagreement: relative change of gradients; 1 where it is not known.
            memory: whether there is error feedback.
        """
        rounds = len(self.sent)
        last = (self.on * self._numbers()).amax(dim=0)
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
