"""Stored updates: sufficient for the closed forms, small, and the same after a restart."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from attacks import Observation
from attacks.memory import remember
from attacks.observation import Drawn
from attacks.tokenizer import find_tokenizer
from fedmjp.audit.memory import Memory
from fedmjp.models import build_model
from tests.attacks.models import hugging_face_deit, hugging_face_vit, torchvision_vit
from tests.conftest import observe, photographs


def view(seed: int, number: int, client: int = 0):
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="nonlinear", seed=seed)
    return observe(model, photographs(64, 1), round=number, client=client)


def size_of(observation) -> int:
    parameters = sum(p.numel() for p in observation.model.parameters())
    return parameters + sum(g.numel() for g in observation.gradients.values())


def test_keeps_the_gradients_of_the_token_embedding_only() -> None:
    whole = view(0, 1)
    message = torch.cat([g.flatten() for g in whole.gradients.values()])  # received gradients are views of one array
    parts = message.split([g.numel() for g in whole.gradients.values()])
    views = {n: part.view_as(g) for (n, g), part in zip(whole.gradients.items(), parts, strict=True)}
    kept = remember(replace(whole, gradients=views))
    assert set(kept.gradients) == {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed", "unk_embed"}
    assert find_tokenizer(kept.model, kept.image_shape) == find_tokenizer(whole.model, whole.image_shape)
    positions = kept.model.pos_embed[0, 1:]
    assert torch.equal(kept.model.dal(positions, (8, 8)), whole.model.dal(positions, (8, 8)))
    assert size_of(kept) < 0.1 * size_of(whole)
    assert all(g.untyped_storage().nbytes() == g.nbytes for g in kept.gradients.values())
    assert "blocks" in dict(whole.model.named_children())  # the observed model itself is unchanged


@pytest.mark.parametrize("make", [torchvision_vit, hugging_face_vit, hugging_face_deit])
def test_of_other_libraries_models_no_block_is_kept(make) -> None:
    model = make()
    gradients = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    whole = Observation(gradients, model, 1, (3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    kept, tokenizer = remember(whole), find_tokenizer(model, whole.image_shape)
    assert find_tokenizer(kept.model, whole.image_shape) == tokenizer
    weights = [p for p in kept.model.parameters() if p.dim() > 1 and p.shape[0] > 1]
    assert weights == [kept.model.get_parameter(tokenizer.weight)]  # besides tokens and positions, (1, N, D)
    assert kept.model.get_parameter(tokenizer.positions) is model.get_parameter(tokenizer.positions)


def test_returns_earlier_updates_of_the_same_client_oldest_first(tmp_path) -> None:
    memory = Memory(tmp_path)
    for number in (2, 1, 3):
        memory.add(view(number, number))
        memory.add(view(number, number, client=1))
    assert [o.round for o in memory.before(view(3, 3))] == [1, 2]
    assert [o.client for o in memory.before(view(9, 9, client=1))] == [1, 1, 1]
    assert memory.before(view(1, 1)) == []


def test_updates_are_the_same_after_a_restart(tmp_path) -> None:
    before = Memory(tmp_path)
    for number in (1, 2):
        before.add(view(number, number))
    present = view(3, 3)
    for kept, again in zip(before.before(present), Memory(tmp_path).before(present), strict=True):
        for name in {field.name for field in fields(Observation) if field.init} - {"gradients", "model", "bounds"}:
            assert getattr(again, name) == getattr(kept, name)
        for name, gradient in kept.gradients.items():
            assert torch.equal(again.gradients[name], gradient)
        for name, tensor in kept.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], tensor)


def test_each_update_keeps_how_it_was_sent_and_nothing_that_was_granted(tmp_path) -> None:
    """A later update may show another rate, or be the first step of Adam, of which the gradient was recovered."""
    before, label = Memory(tmp_path), torch.tensor([1])
    granted = {"labels": label, "later_labels": label, "drawn": Drawn(more=True)}
    before.add(replace(view(1, 1), kind="weights", learning_rate=0.1, **granted))
    before.add(replace(view(2, 2), kind="weights", learning_rate=0.3, **granted))
    present = replace(view(3, 3), **granted)
    for found in (before.before(present), Memory(tmp_path).before(present)):
        assert [(one.kind, one.learning_rate) for one in found] == [("weights", 0.1), ("weights", 0.3)]
        assert all(one.labels is one.later_labels is one.drawn is None for one in found)


def test_errors_of_entries_are_those_of_their_own_update(tmp_path) -> None:
    """As of AdamW's first step, whose errors are not read from the entries (`Observation.bounds`)."""

    def bounded(number: int):
        whole = view(number, number)
        return replace(whole, bounds={n: torch.full_like(g, float(number)) for n, g in whole.gradients.items()})

    before = Memory(tmp_path)
    for number in (1, 2):
        before.add(bounded(number))
    for kept, again in zip(before.before(bounded(3)), Memory(tmp_path).before(bounded(3)), strict=True):
        assert set(kept.bounds) == set(again.bounds) == set(kept.gradients)
        assert all((bound == kept.round).all() for found in (kept, again) for bound in found.bounds.values())
