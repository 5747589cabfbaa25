"""Recorded and replayed steps give what steps computed anew give; the recording itself needs a GPU (`test_devices`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from small_vit import small_vit, view
from torch import Tensor

from attacks.gradient_matching import engine
from attacks.gradient_matching.differences import STEPS, FiniteDifferences
from attacks.gradient_matching.engine import LoopSettings, minimise
from attacks.gradient_matching.evaluation import Candidates, Evaluation, Replay, _anew
from attacks.gradient_matching.gradvit import GradViT
from attacks.gradient_matching.inverting_gradients import InvertingGradients
from attacks.gradient_matching.matched_update import extract_matched_update
from attacks.gradient_matching.optimisers import LBFGS, Adam
from attacks.gradient_matching.simulation import build_simulation
from tests.conftest import observe, photographs

STEPS_TAKEN = 12


class Tape:
    """Records as a CUDA graph does: the results of every replay are in the tensors of the recording."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, function: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        self.recordings += 1
        held = tuple(t.detach().clone() for t in function())
        for t in held:
            t.fill_(torch.nan)  # a graph computes nothing while it is recorded
        again, held = _anew(function, held)

        def replay() -> None:
            self.replays += 1
            again()

        return replay, held


def bowl(candidates: Candidates, share: float) -> Tensor:
    """Losses (V, R) with their least value at 1, and after half of the run at 2."""
    goal = 1.0 if share < 0.5 else 2.0
    losses = (candidates.images - goal).square().flatten(2).mean(dim=2)
    return losses if candidates.labels is None else losses + candidates.labels.square().flatten(2).sum(dim=2)


@pytest.mark.parametrize("optimiser", [Adam(0.1), Adam(0.1, signed=True, langevin=0.1), LBFGS()], ids=str)
@pytest.mark.parametrize("labels", [False, True])
def test_replayed_steps_are_those_computed_anew(optimiser, labels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    start = Candidates(
        torch.randn(2, 3, 1, 3, 4, 4, generator=generator),
        torch.randn(2, 3, 1, 5, generator=generator) if labels else None,
    )
    settings = LoopSettings(STEPS_TAKEN, patience=0, gain=0.0, seed=0, changes=(0.0, 0.5))
    expected = minimise(bowl, start, optimiser, settings)
    tape = Tape()
    monkeypatch.setattr(engine, "Evaluation", lambda f, x: Replay(f, x, settings.changes, tape))
    found = minimise(bowl, start, optimiser, settings)
    assert (tape.recordings, tape.replays) == (2, STEPS_TAKEN + 1)
    for name in ("loss", "start", "limit", "last", "trace"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for ours, theirs in zip(found.best.tensors(), expected.best.tensors(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("steps", [4, 5, 6, 7, 10])
@pytest.mark.parametrize("change", [0.5, 0.3, 1.0])
def test_no_loss_from_before_a_change_of_the_objective_is_kept(steps: int, change: float) -> None:
    """Before the change the losses are far below those after it."""

    def raised(candidates: Candidates, share: float) -> Tensor:
        losses = candidates.images.square().flatten(2).mean(dim=2)
        return losses + (100.0 if share >= change else 0.0)

    settings = LoopSettings(steps, patience=0, gain=0.0, seed=0, changes=(0.0, change))
    found = minimise(raised, Candidates(torch.ones(1, 1, 1, 3, 4, 4)), Adam(0.01), settings)
    assert float(found.loss) == float(found.last) > (100.0 if change < 1 else 0.0)


@pytest.mark.parametrize("attack", [InvertingGradients(steps=6), GradViT(steps=6)], ids=lambda a: type(a).__name__)
def test_an_attack_replays_its_steps(attack, monkeypatch: pytest.MonkeyPatch) -> None:
    observation, _ = view(small_vit())
    expected = attack([observation]).images
    tape, made = Tape(), []

    def replay(objective, candidates: Candidates) -> Evaluation:
        made.append(Replay(objective, candidates, engine_changes(attack, observation), tape))
        return made[-1]

    monkeypatch.setattr(engine, "Evaluation", replay)
    assert torch.equal(attack([observation]).images, expected)
    assert len(made) == 1
    assert tape.replays == attack.steps + 1
    assert tape.recordings == 1 + len([c for c in engine_changes(attack, observation) if c > 0])


def engine_changes(attack, observation) -> set[float]:
    return {prior.active_from for prior in attack.recipe(observation).priors}


def test_the_step_of_the_difference_fits_the_model() -> None:
    def chosen(sharpness: float) -> object:
        model = small_vit()
        for block in model.module.blocks:
            block.mlp.fc1.weight.data.mul_(sharpness)
            block.attn.qkv.weight.data.mul_(sharpness)
        observation = observe(model, photographs(16, 1))
        return build_simulation(observation, [extract_matched_update(observation)], 1)[0]

    assert chosen(1.0).step == STEPS[0]
    curved = [chosen(sharpness) for sharpness in (4.0, 6.0, 14.0)]
    assert any(isinstance(engine, FiniteDifferences) and engine.step in STEPS[1:] for engine in curved)
