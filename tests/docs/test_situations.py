"""The table of situations: every one is run again, and none ends in a reassurance that is not earned."""

from __future__ import annotations

from functools import cache

import pytest
from experiments.scaffold import RESULTS
from experiments.situations.answers import CRASHED, TABLE, Answer, answer_of
from experiments.situations.cases import CASES, GROUPS
from experiments.situations.render import read_answers, situations_block

NOW, BEFORE = (read_answers(RESULTS / "situations" / f"{column}.json") for column in ("now", "before"))
REASSURING = "no leak shown"
# What the answer must name, for the reader to know what to do.
CAUSES = {
    "default_mjp": "position rows are exactly zero",
    "gamma_one": "64 of 64 position rows are exactly zero",
    "two_steps": "2 local steps",
    "batch_of_eight": "the batch holds 8 images",
    "frozen_positions": "the update holds no gradient of pos_embed",
    "noise": "not the exact gradient of one image",
    "naive_attacks": "shared position embedding",
    "wrong_block": "APRIL's equation does not hold",
    "raising_attack": "RuntimeError: the matrix is singular",
    "large_batch": "--batch-size 16 exceeds the 12 images",
    "no_audit_clients": "--audit-clients takes at least one client",
    "steps_without_search": "--steps is for attacks that search",
    "unwritable_out": "pass another folder",
    "typo_defence": "did you mean 'mjp'?",
    "typo_option": "--gamma",
    "torchvision": "a classifier that starts at zero",
    "released_layout_masked": "position rows are exactly zero",
    "fixed_positions": "no learnable position embedding",
    "resnet": "need a Vision Transformer",
    "wrong_normalisation": "mean (0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225) do: pass those",
    "no_normalisation": "mean (0.5, 0.5, 0.5) and std (0.5, 0.5, 0.5) do: pass those",
    "normalised_images": "pass the images before normalisation",
    "byte_images": "divide by 255",
    "no_batch_axis": "images[None]",
    "module_prefix": "refixes of wrappers were removed",
    "none_gradients": "holds no gradient of blocks.1.",
    "partial": "holds no gradient of pos_embed",
    "head_only": "holds no gradient of",
    "nan": "holds NaN",
    "adam": "first step of Adam",
    "weight_decay": "(weight decay)",
    "clipped": "it was clipped",
    "noisy": "oise of standard deviation 1.0e-03",
    "half": "float16",
    "int8": "int8",
    "top_k": "top-k",
    "batch_of_two": "the batch holds 2 images",
    "repeated_image": "1 different image",
    "summed": "a sum of at least 2 different",
    "other_weights": "the weights are those before the step",
    "dropout": "training mode with dropout",
    "flipped": "differs from the one given",
    "saturated": "1 certified",
    "no_learning_rate": "learning_rate was not given",
    "wrong_learning_rate": "not one gradient step at the learning rate 0.01",
    "unsaid_steps": "not one gradient step of 1 image",
    "unsaid_batch": "not one gradient step of 1 image",
    "adam_clients": "first step of Adam",
    "decaying_clients": "(weight decay)",
    "partial_reply": "holds no gradient of pos_embed",
    "half_reply": "float16",
}
# Situations in which nothing is wrong but what is audited leaks.
LEAKING = (
    "no_defence",
    "low_gamma",
    "gamma_zero",
    "raising_attack",
    "timm",
    "hugging_face",
    "released_layout",
    "fedavg",
    "saturated",
)


# Of four seconds and more, and much like others.
LONG = ("two_gammas", "hugging_face", "gamma_one", "unsaid_batch", "adam_clients", "partial_reply", "half_reply")
LONG += ("noise", "released_layout_masked", "frozen_positions", "default_mjp", "low_gamma", "fixed_positions")
LONG += ("two_steps", "batch_of_eight", "partial")


# Whether `unmix` finds all tokens of random weights and borders then place a whole picture depends on the processor's
# rounding: without such a picture the answer is "partly", on all processors one of a leak.
ROUNDING = {"default_mjp": {"leaks", "partly"}, "two_gammas": {"leaks", "leaks / partly"}}


@cache
def answer(name: str) -> Answer:
    return answer_of(CASES[name][1])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", [pytest.param(name, marks=(pytest.mark.long,) * (name in LONG)) for name in CASES])
def test_the_answer_is_the_one_in_the_table_and_names_its_cause(name: str) -> None:
    found = answer(name)
    assert found.kind in ROUNDING.get(name, {NOW[name].kind}), found.words
    assert NOW[name].kind in ROUNDING.get(name, {NOW[name].kind})
    assert CAUSES.get(name, "") in found.words
    if name in LEAKING:
        assert found.kind == "leaks"


def test_nothing_is_reassuring_and_nothing_crashes() -> None:
    """The committed answers; the test above holds the present ones against them."""
    assert sorted(NOW) == sorted(BEFORE) == sorted(CASES)
    assert len(CASES) >= 25
    assert [name for name, one in NOW.items() if REASSURING in one.kind] == []
    assert [name for name, one in NOW.items() if one.kind in (CRASHED, TABLE)] == []


def test_the_earlier_version_reassured_and_crashed() -> None:
    """The table shows a difference: otherwise it would be read from the wrong version."""
    assert sum(REASSURING in one.kind for one in BEFORE.values()) >= 5
    assert sum(one.kind == CRASHED for one in BEFORE.values()) >= 5


def test_the_table_has_a_line_for_every_situation() -> None:
    block = situations_block(RESULTS / "situations")
    assert sum(line.startswith("| ") for line in block.splitlines()) == len(CASES) + len(GROUPS)
    assert all(what in block for what, _ in CASES.values())
