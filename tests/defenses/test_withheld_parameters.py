"""Withheld parameters: groups and patterns, what clients send of them, and what still leaks."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch

from attacks import ATTACKS, UsageError
from attacks.gradient_matching.matched_update import extract_matched_update
from attacks.gradient_matching.simulation import build_simulation
from fedmjp.cli import split_commas
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, ModelConfig, RunConfig
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.chain import read_defense
from fedmjp.defenses.parameter_groups import GROUPS, belongs
from fedmjp.federation_options import FederationConfig
from fedmjp.metrics import psnr
from fedmjp.models import POSITION_TABLES, build_model
from tests.conftest import federated_rounds, observed_update

WITHHELD = DEFENSES.get("withheld")


def names_of(model: str) -> list[str]:
    return [n for n, _ in build_model(model, num_classes=8, weights="random").module.named_parameters()]


@pytest.mark.parametrize("model", ["vit_micro_32_mjp", "swin_micro_32", "resnet_micro_32"])
def test_groups_against_modules(model: str) -> None:
    """Norms by the classes of their modules, the head by timm's own `get_classifier`, biases by their names."""
    module = build_model(model, num_classes=8, weights="random").module
    norms = (torch.nn.LayerNorm, torch.nn.BatchNorm2d)
    by_class = {f"{p}.{n}" for p, m in module.named_modules() if isinstance(m, norms) for n, _ in m.named_parameters()}
    assert {n for n in names_of(model) if belongs(n, ["norms"])} == by_class
    head = {id(p) for p in module.get_classifier().parameters()}
    assert {n for n, p in module.named_parameters() if id(p) in head} == {
        n for n in names_of(model) if belongs(n, ["head"])
    }
    assert {n for n in names_of(model) if belongs(n, ["biases"])} == {n for n in names_of(model) if fnmatch(n, "*bias")}


def test_positions_are_the_tables_that_are_added_to_tokens() -> None:
    assert GROUPS["positions"] == POSITION_TABLES


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"withhold": ("all_but_head",)}, {"head.weight", "head.bias"}),
        ({"train_only": ("head",)}, {"head.weight", "head.bias"}),
        ({"train_only": ("blocks.5.norm?.weight",)}, {"blocks.5.norm1.weight", "blocks.5.norm2.weight"}),
        ({"withhold": ("all_but_*.norm1.bias",)}, {f"blocks.{i}.norm1.bias" for i in range(6)}),
    ],
)
def test_what_is_left(options: dict, sent: set[str]) -> None:
    defense = WITHHELD(**options)
    assert {n for n in names_of("vit_mini_32") if not defense.freezes(n)} == sent


def config_of(defense: str, **federation) -> RunConfig:
    return RunConfig(
        defense=(defense,),
        federation=FederationConfig(**({"clients": 2, "rounds": 1} | federation)),
        model=ModelConfig("vit_mini_32", "auto"),
        data=DataConfig(train_limit=8, test_limit=2),
    )


def observed(defense: str, **federation):
    """The task, and the observation of client 0's first update."""
    task = ClientTask(config_of(defense, **federation), defense)
    number, sent, (received, *_) = next(federated_rounds(task, 1))
    view = observed_update(task, sent, received, number)
    return task, view


@pytest.mark.parametrize("federation", [{}, {"update": "weights", "learning_rate": 0.1, "local_steps": 2}])
def test_bitfit_sends_the_gradients_of_biases_and_head_and_no_others(federation: dict) -> None:
    """Against a client that trains everything, where it takes one step; of two steps the names alone."""
    task, view = observed("withheld:train_only=biases,head", **federation)
    assert set(view.gradients) == {n for n in task.parameters if n.endswith(".bias") or n.startswith("head.")}
    if not federation:
        whole = observed("none")[1]
        assert all(torch.equal(view.gradients[n], whole.gradients[n]) for n in view.gradients)


@pytest.mark.parametrize(
    ("defense", "attack"),
    [
        ("withheld", "token_span"),
        ("withheld:withhold=positions,patch_projection", "token_span"),
        ("withheld:withhold=positions,first_attention", "unmix"),
        ("withheld:withhold=first_block", "patch_embedding"),
        ("withheld:withhold=blocks.*", "patch_embedding"),
        pytest.param("withheld:withhold=positions,first_block", "later_block", marks=pytest.mark.long),
        pytest.param(
            "withheld:withhold=cls_token,positions,patch_projection,blocks.[01].*",
            "later_block",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_attack_that_knows_it_recovers_a_photograph(defense: str, attack: str) -> None:
    task, view = observed(defense)
    assert attack in task.defense.known_by
    found = ATTACKS.get(attack)()([view])
    assert not found.diagnosis
    assert float(psnr(found.images, task.batch(0, 1, 0).images)) > 60


def test_closed_forms_say_what_they_lack() -> None:
    task, view = observed("withheld:withhold=positions,first_block")
    assert task.defense.known_by == ("inverting_gradients", "dlg", "later_block")
    for attack in ("patch_embedding", "token_span"):
        assert "no gradient of" in ATTACKS.get(attack)()([view]).diagnosis


def test_gradient_matching_matches_what_is_sent_and_nothing_else() -> None:
    """A frozen parameter is no gradient of zero: a client with the right image is simulated without a difference."""
    task, view = observed("withheld:train_only=biases,head")
    batch = task.batch(0, 1, 0)
    simulation, target = build_simulation(view, [extract_matched_update(view)], 1, exact=True)
    simulated = simulation.gradients(task.model.normalise(batch.images)[None], batch.labels[None])
    assert set(target.values) == set(view.gradients)
    for name, received in target.values.items():
        torch.testing.assert_close(simulated[name], received, rtol=1e-3, atol=1e-6)


def test_several_values_of_an_option_stand_in_an_entry_with_spaces_or_commas() -> None:
    parts = [read_defense(f"withheld:train_only={values}").parameters() for values in ("biases head", "biases,head")]
    assert parts == [{"train_only": ("biases", "head")}] * 2
    config = split_commas(replace(RunConfig(), defense=("none,withheld:train_only=biases head",)))
    assert config.defense == ("none", "withheld:train_only=biases head")
    config.validate()


def test_it_acts_in_chains() -> None:
    chain = read_defense("withheld:train_only=head+noise:noise_multiplier=0")
    update = {"head.bias": torch.ones(4), "w": torch.ones(4)}
    sent = chain.message(update, torch.Generator(), {})[0]
    assert not sent["w"].any()
    assert float(sent["head.bias"].norm()) == pytest.approx(1.0)  # the clip sees what is sent alone


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("withheld:withhold=blocks.9.*", "--withhold blocks.9.* is no parameter of the model; choose from positions"),
        ("withheld:train_only=classifier", "--train-only classifier is no parameter"),
        ("withheld:withhold=*", "leaves no parameter to train"),
        ("withheld:withhold=head,train_only=biases", "pass one of them"),
        ("withheld:withhold=", "needs --withhold or --train-only"),
    ],
)
def test_bad_options_are_one_line(entry: str, words: str) -> None:
    def start() -> None:
        read_defense(entry).validate()
        ClientTask(config_of(entry), entry)

    with pytest.raises(UsageError) as caught:
        start()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
