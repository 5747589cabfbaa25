"""A share of an update's entries is sent, the others stay with the client: pruning, top-k, random masks.

Zhu et al. 2019 ("Deep Leakage from Gradients", section 5.2) prune the small entries as a defence; Lin et al. 2018
("Deep Gradient Compression") and Stich et al. 2018 ("Sparsified SGD with memory") send the largest ones to save
bandwidth and keep what was not sent in a memory, which is added to the next update (error feedback). Random masks are
those of Konecny et al. 2016.

Departs from Deep Gradient Compression: no momentum correction, no masking of momentum and no warm-up of the share; the
memory holds plain updates, as Stich et al. have it. What a random mask sends is not divided by the share: an attack
would undo that, and with a memory such a message is no contraction, which Stich et al. need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING, ClassVar, Literal

from attacks.registry import UsageError
from fedmjp.defenses.base import Defense

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SEED_BITS = 64  # from which the server draws a random mask


@dataclass(frozen=True)
class TopK(Defense):
    """Options of --defense topk."""

    # They take an entry that was not sent for one that is no larger than those that were, or for an unknown one.
    known_by: ClassVar[tuple[str, ...]] = ("patch_embedding", "sparse_rounds", "gauss_newton")

    topk_share: float = 0.1
    """Share of the entries that is sent, in (0, 1] (Zhu et al. prune 0.01 to 0.7; Lin et al. send 0.001)."""
    topk_choice: Literal["largest", "random"] = "largest"
    """Send the entries of largest magnitude, or a random choice of each client and round."""
    topk_over: Literal["tensor", "update"] = "tensor"
    """Take the share of each parameter's entries (at least one of each), or of the whole update's."""
    topk_feedback: bool = False
    """Remember what was not sent and add it to the next update (error feedback)."""

    @property
    def random(self) -> bool:
        """Whether the mask is drawn."""
        return self.topk_choice == "random"

    @property
    def remembers(self) -> bool:
        """Whether there is error feedback."""
        return self.topk_feedback

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 < self.topk_share <= 1:
            raise UsageError(f"--topk-share must lie in (0, 1], not {self.topk_share}: it sends that share of entries")

    def send(
        self, update: dict[str, Tensor], generator: torch.Generator, memory: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The chosen entries, zeros elsewhere, and with error feedback the others for the next time."""
        whole = update
        if self.topk_feedback:
            whole = {n: t + memory[n].to(t) if n in memory else t for n, t in update.items()}
        sent = self.on_update(whole, generator)
        return sent, {n: t - sent[n] for n, t in whole.items()} if self.topk_feedback else {}

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """The chosen entries, zeros elsewhere."""
        import torch

        if self.topk_over == "tensor":
            return {n: self._kept(t.flatten(), generator).view_as(t) for n, t in update.items()}
        kept = self._kept(torch.cat([t.flatten() for t in update.values()]), generator)
        parts = kept.split([t.numel() for t in update.values()])
        return {n: part.view_as(t) for (n, t), part in zip(update.items(), parts, strict=True)}

    def _kept(self, entries: Tensor, generator: torch.Generator) -> Tensor:
        """Entries (n,) with zeros for those that are not sent."""
        import torch

        count = self._count(len(entries))
        if self.topk_choice == "random":
            places = torch.randperm(len(entries), generator=generator, device=generator.device)[:count]
            places = places.to(entries.device)
        else:
            places = entries.abs().topk(count, sorted=False).indices
        return torch.zeros_like(entries).index_copy(0, places, entries[places])

    def _count(self, entries: int) -> int:
        """How many of so many entries are sent."""
        return max(1, round(self.topk_share * entries))

    def bits(self, sent: Mapping[str, Tensor]) -> int:
        """32 bits for each entry that is sent, and their places.

        Of a random mask these are its seed. Of the largest entries, those that are not zero count, with the shorter one
        of a bit for every entry and an index of ceil(log2 n) bits for each that is sent, in each tensor or in the whole
        update.
        """
        own = [tensor for name, tensor in sent.items() if not self.freezes(name)]
        sizes = [tensor.numel() for tensor in own]
        if self.topk_choice == "random":
            sizes = [sum(sizes)] if self.topk_over == "update" else sizes
            return 32 * sum(map(self._count, sizes)) + SEED_BITS
        kept = [int(tensor.count_nonzero()) for tensor in own]
        if self.topk_over == "update":
            sizes, kept = [sum(sizes)], [sum(kept)]
        places = (min(n, k * ceil(log2(max(n, 2)))) for n, k in zip(sizes, kept, strict=True))
        return 32 * sum(kept) + sum(places)
