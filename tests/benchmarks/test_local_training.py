"""The benchmark of clients that train locally: what they send, and mistakes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import local_training
import pytest
import torch
from experiments.local_training.clients import Client, by_adam, on_one_image, on_two_images, situations

from fedmjp.models import build_model
from tests.conftest import observe, photographs


@pytest.fixture(scope="module")
def client() -> Client:
    model = build_model("vit_micro_32", num_classes=8, weights="random")
    return Client(model, None, photographs(32, 4), torch.arange(4), 0.01, 0)


def test_one_step_is_the_gradient(client) -> None:
    (sent,) = on_one_image(client, steps=1, rate=0.1)
    true = observe(client.plain, client.images[:1], client.labels[:1]).gradients
    for name, gradient in sent.gradients.items():
        torch.testing.assert_close(gradient, true[name], atol=3e-6, rtol=1e-3)
    assert (sent.kind, sent.local_steps) == ("weights", 1)


def test_every_image_stands_in_three_of_six_updates(client) -> None:
    pairs = [pair for _, pair in client.updates()]
    assert Counter(i for pair in pairs for i in pair) == dict.fromkeys(range(4), 3)
    assert pairs[-1] == [0, 1]
    sent = on_two_images(client, rate=0.1, alone=False)
    assert [view.local_steps for view in sent] == [2] * 6
    assert on_two_images(client, rate=0.1, alone=True)[0].round == 5


def test_adam_moves_by_the_rate_and_is_undone(client) -> None:
    (sent,), (undone,) = (by_adam(client, epsilon=1e-8, rate=1e-3, undone=u) for u in (False, True))
    assert float(sent.gradients["patch_embed.proj.weight"].abs().median()) == pytest.approx(1, abs=0.01)
    assert undone.bounds.keys() == sent.gradients.keys()
    (third,) = by_adam(client, epsilon=1e-8, rate=1e-3, steps=3)
    moved = dict(third.model.named_parameters())["head.weight"] - client.plain.module.head.weight
    assert float(moved.abs().max()) > 1e-3  # the update starts at the weights after two steps


def test_every_situation_has_a_row_of_its_own() -> None:
    named = [(one.name, one.attack) for one in situations()]
    assert len(set(named)) == len(named)
    assert {attack for _, attack in named} == {"patch_embedding", "token_span", "batch_rounds", "batch_tokens"}


@pytest.mark.parametrize(
    ("options", "words"), [(["--num-images", "3"], "must be at least 4"), (["--attacks", "april"], "takes some of")]
)
def test_mistakes_are_one_line(tmp_path: Path, capsys, options: list[str], words: str) -> None:
    assert local_training.main([*options, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
