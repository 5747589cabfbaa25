"""DropPos: an encoder that sees some patches only, of which some have a position; which ones, and what comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attacks import Observation, find_tokenizer
from attacks.mjp.joined_updates import join_updates, read_update
from attacks.mjp.rounds import MJPRounds
from attacks.mjp.span_update import ambiguous_places
from attacks.registry import UsageError
from fedmjp.audit.observe import observe_step
from fedmjp.objectives import Draws
from fedmjp.objectives.places import random_subsets, sincos_table
from tests.conftest import learner_under, photographs

DROPPOS = "droppos:tau=inf,decoder_width=64"
N = 64


def updates(objective: str, image: torch.Tensor, rounds: range) -> tuple[list[Observation], list[torch.Tensor]]:
    """Updates of one image with new draws in each round, and the places shown in each, (64,) bool."""
    learner = learner_under(objective, "vit_mini_32")
    seen, hidden = learner.objective.counts(N)
    found, shown = [], []
    for number in rounds:
        observation, _ = observe_step(learner, image, Draws.seeded(number, number))
        found.append(replace(observation, round=number))
        generator = torch.Generator().manual_seed(number)
        places = random_subsets(1, N, seen, generator, torch.device("cpu"))[0]
        slots = random_subsets(1, seen, hidden, generator, torch.device("cpu"))[0]
        flags = torch.zeros(N, dtype=torch.bool)
        flags[places] = True
        flags[places[slots]] = False
        shown.append(flags)
    return found, shown


@pytest.mark.parametrize("positions", ["fixed", "learned"])
def test_an_update_names_the_places_that_were_shown(positions: str) -> None:
    observations, shown = updates(f"{DROPPOS},positions={positions}", photographs(32, 1), range(5))
    named = 0
    for observation, truth in zip(observations, shown, strict=True):
        try:
            update = read_update(observation, spans=True)
        except UsageError:  # every shown place is a corner of a rectangle
            continue
        assert update.seen == 16
        assert not (~update.masked & ~truth).any()
        named += int((~update.masked).sum())
    assert named >= 0.8 * sum(int(truth.sum()) for truth in shown)


def test_the_fourth_corner_of_a_rectangle_is_not_taken_for_shown() -> None:
    """Embeddings that are sums of a row's and a column's: places 0, 2, 16 and the sum of their patches at 18."""
    offsets, rows = sincos_table((8, 8), 192, 0)[0].double(), torch.zeros(N, 48, dtype=torch.float64)
    shown, three = torch.zeros(N, dtype=torch.bool), [0, 2, 16]
    shown[[*three, 18, 37]] = True
    rows[shown] = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).double()
    assert not ambiguous_places(offsets, rows, shown).any()
    rows[18] = rows[2] + rows[16] - rows[0]
    assert ambiguous_places(offsets, rows, shown).nonzero()[:, 0].tolist() == [0, 2, 16, 18]


def test_dropped_patches_come_back_over_rounds() -> None:
    """A patch shown three times is exact: each time 36 or 37 of its 48 directions are known."""
    image = photographs(32, 1)
    observations, shown = updates(f"{DROPPOS},gamma_pos=0.25,positions=learned", image, range(16))
    found = MJPRounds()(observations)
    often = torch.stack(shown).sum(dim=0) >= 3
    tokenizer = find_tokenizer(observations[0].model, (3, 32, 32))
    errors = tokenizer.patchify((found.images - image).square())[0].mean(dim=1)
    known = tokenizer.patchify(found.known.expand(-1, 3, -1, -1).float())[0].mean(dim=1) > 0.5
    assert int(often.sum()) > 30
    assert float(-10 * errors[often].max().log10()) > 40
    assert known[often].all()
    assert float(-10 * errors[known].max().log10()) > 25


def test_updates_of_other_images_are_not_joined() -> None:
    objective = f"{DROPPOS},positions=learned"
    own, _ = updates(objective, photographs(32, 1), range(2))
    others = [updates(objective, photographs(32, 4)[i : i + 1], range(3, 4))[0][0] for i in (1, 2, 3)]
    assert join_updates([*others, *own], spans=True).equations.updates == 2
