"""Several sparse updates of one image: what one round leaves out, others send.

Clients that send a share of the entries (top-k, random masks) send others in other rounds: by error feedback sooner or
later nearly all of them (Lin et al. 2018, Stich et al. 2018), by random masks as well. `attacks.linear.sparse_sums`
makes one gradient of the rounds, with the largest error of each entry, and `patch_embedding` solves with it. For that
the equation need not be of one step: sum_t dL/dE_t = (sum_t G_t)^T X however the weights move, as long as every round
shows the image.

It assumes that all updates of the client are of one image, as it was fed. Where an entry that was sent twice does not
have about the same gradient both times, they are not, or the weights moved too far, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from attacks.base import Attack
from attacks.closed_form.patch_embedding import PatchEmbedding
from attacks.linear.intervals import Message, error_bounds, read_message
from attacks.linear.sparse_sums import RoundsOfEntries
from attacks.observation import Capability, Observation, Reconstruction
from attacks.tokenizer import Tokenizer, find_tokenizer

# Median relative change of an entry's gradient above which updates are not taken for those of one image. The same
# photograph on weights that drift by 1e-3 and 1e-2 a round has 0.001 to 0.06, another photograph each time 0.5 to 1.7.
# Two that alternate have 0.005 to 0.24: there the equations miss each other.
LARGEST_DISAGREEMENT = 0.5


@dataclass(frozen=True, kw_only=True)
class SparseRounds(Attack):
    """Adds up sparse updates, then solves G^T X = dL/dE with the error of every entry.

    Args:
        solver: of the equation.
    """

    solver: PatchEmbedding = field(default_factory=PatchEmbedding)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.SEVERAL_ROUNDS})
    updates_wanted: ClassVar[int] = 40  # by error feedback: 4 transmissions of an entry of which a tenth is sent

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        if read_message(observations[-1]).chosen == "none":
            return "the update holds every entry of the gradient, and none has to be found in earlier ones"
        if len(observations) == 1:
            return "only one update of this client was seen: patch_embedding gives the same answer"
        return ""

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds the rounds, the disagreement, and 1 for error feedback.

        Of a whole update, or a single one, the answer is that of `solver`.
        """
        target = observations[-1]
        if self.obstacle(observations):
            return self.solver.reconstruct([target])
        tokenizer = find_tokenizer(target.model, target.image_shape)
        names = [n for n in _names(tokenizer) if n in target.gradients]
        updates = [o for o in observations if all(name in o.gradients for name in names)]
        rounds = {name: _rounds(updates, name) for name in names}
        disagreement, memory = _kind(list(rounds.values()))
        changes = disagreement if disagreement == disagreement else 1.0
        means = {name: one.mean(changes, memory=memory) for name, one in rounds.items()}
        shapes = {name: target.gradients[name].shape for name in names}
        whole = replace(
            target,
            gradients=dict(target.gradients) | {n: mean.view(shapes[n]) for n, (mean, _) in means.items()},
            bounds={n: bounds.view(shapes[n]) for n, (_, bounds) in means.items()},
            kind="gradient",
            local_steps=1,
        )
        found = self.solver.reconstruct([whole])
        details = {"rounds": len(updates), "disagreement": disagreement, "memory": float(memory)}
        found = replace(found, details={**found.details, **details})
        if not disagreement > LARGEST_DISAGREEMENT or found.images is None:
            return found
        reason = (
            f"entries that were sent twice differ by {disagreement:.0%}: the updates are not of one image, or the "
            "weights moved too far between them"
        )
        nothing = torch.zeros_like(found.images[:, :1], dtype=torch.bool)
        return replace(found, known=nothing, diagnosis="; ".join(filter(None, (found.diagnosis, reason))))


def _names(tokenizer: Tokenizer) -> list[str]:
    """Of the parameters that the equation reads."""
    return [name for name in (tokenizer.positions, tokenizer.weight, tokenizer.bias) if name]


def _rounds(updates: Sequence[Observation], name: str) -> RoundsOfEntries:
    """The entries of one parameter in all updates."""
    sent = torch.stack([o.gradients[name].detach().double().flatten() for o in updates])  # (T, n)
    errors = torch.stack([error_bounds(o, name).flatten() for o in updates])
    limits = torch.tensor([_limit(o, name) for o in updates], dtype=torch.float64)
    return RoundsOfEntries(sent, limits, torch.where(sent == 0, 0.0, errors))


def _limit(observation: Observation, name: str) -> float:
    """What no entry of the parameter that was left out exceeds."""
    message: Message = read_message(observation)
    if message.chosen != "largest":
        return torch.inf
    own = observation.gradients[name]
    kept = [own] if own.any() else [g for g in observation.gradients.values() if g.any()]
    return min(float(g[g != 0].abs().min()) for g in kept)


def _kind(rounds: Sequence[RoundsOfEntries]) -> tuple[float, bool]:
    """How much entries that were sent twice differ, and whether there is error feedback, by the largest tensor."""
    largest = max(rounds, key=lambda one: one.sent.shape[1])
    memory = largest.has_memory()
    return largest.disagreement(memory=memory), memory
