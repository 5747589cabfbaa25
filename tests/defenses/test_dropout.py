"""Dropout and drop path in training: what they change for attacks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS
from fedmjp.metrics import psnr
from tests.defenses.clients import update_under

RECIPES = [{"dropout": 0.1}, {"drop_path": 0.3}]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_closed_form_is_unchanged(recipe: dict) -> None:
    """Every token's gradient reaches its position row and its patch through the same mask."""
    update, plain = update_under("none", **recipe), update_under("none")
    assert not torch.equal(update.view.gradients["head.weight"], plain.view.gradients["head.weight"])
    found = update.attacked("patch_embedding")
    assert float(psnr(found.images, update.original)) > 60
    assert not found.diagnosis
    assert bool(found.known.all())
    assert not found.certified  # the step cannot be repeated


@pytest.mark.parametrize(("rate", "sent"), [(0.0005, torch.float32), (0.02, torch.float16)])
def test_few_dropped_entries_are_noticed(rate: float, sent: torch.dtype) -> None:
    """The answer is as far off as 23 and 14 dB where its equations expect more than 59 and 35."""
    update = update_under("none", dropout=rate)
    left = {n: g.to(sent).float() for n, g in update.view.gradients.items() if n != "pos_embed"}
    found = ATTACKS.get("token_span")()([dataclasses.replace(update.view, gradients=left)])
    assert float(psnr(found.images, update.original)) < 25
    assert found.details["deviation"] < 0.02
    assert "(dropout)" in found.diagnosis
    assert not bool(found.known.any())


def test_spans_hold_what_the_attention_read() -> None:
    """Dropped entries of tokens are not in the model that was sent: the answer is wrong, and not vouched for."""
    found = update_under("none", dropout=0.1).attacked("token_span")
    # Which entries were dropped decides whether the misfit of the equations or that of the span shows first.
    assert "(dropout)" in found.diagnosis or "outside the span" in found.diagnosis
    assert not bool(found.known.any())
    skipped = update_under("none", drop_path=0.3)
    found = skipped.attacked("token_span")
    assert float(psnr(found.images, skipped.original)) > 60
    assert not found.diagnosis
