"""Chains of defences, and the hooks on steps and messages that clients call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from attacks import UsageError
from fedmjp.audit.verdict import _defense_of
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, ModelConfig, RunConfig
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.defenses.chain import Chain, chain_name, known_defense, read_defense, split_chain
from fedmjp.federation_options import FederationConfig
from fedmjp.report.words import defence_words


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_entries_are_split_at_names_only() -> None:
    entry = "mjp:gamma=1e-1,dal=none+noise:noise_multiplier=1e+3"
    assert split_chain(entry) == [("mjp", {"gamma": "1e-1", "dal": "none"}), ("noise", {"noise_multiplier": "1e+3"})]
    assert chain_name(entry) == "mjp+noise"
    assert defence_words(entry) == "mjp, gamma 1e-1, dal none + noise, noise_multiplier 1e+3"
    assert chain_name("none") == "none"


def test_a_chain_acts_in_order_with_the_options_of_each() -> None:
    chain = read_defense("mjp:gamma=0.25+noise:noise_multiplier=0")
    assert isinstance(chain, Chain)
    assert chain.model_name("vit_mini_64") == "vit_mini_64_mjp"
    assert chain.random
    assert chain.moves_patches
    assert chain.dal == "nonlinear"
    assert chain.loss_weights() == {"dal": 0.01}
    assert chain.parameters()["mjp.gamma"] == 0.25
    assert chain.parameters()["noise.noise_multiplier"] == 0.0
    update = {"w": torch.full((4,), 10.0)}
    assert torch.allclose(chain.on_update(update, draw())["w"].norm(), torch.tensor(1.0))


def test_an_attack_knows_a_chain_if_it_knows_every_part() -> None:
    mjp, noise = (DEFENSES.get(name).known_by for name in ("mjp", "noise"))
    assert "noisy_rounds" not in mjp  # it has nothing to weigh without noise
    assert set(known_defense("mjp+noise").known_by) == set(mjp) & set(noise) | {"noisy_rounds"}
    assert "noisy_rounds" not in known_defense("mjp+frozen_positions").known_by


@dataclass(frozen=True)
class Feedback(Defense):
    """Sends what it was handed plus what it remembers, and remembers half of it."""

    remembers: ClassVar[bool] = True

    def send(
        self, update: dict[str, Tensor], generator: torch.Generator, memory: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole = {n: t + memory.get(n, torch.zeros_like(t)) for n, t in update.items()}
        return whole, {n: t / 2 for n, t in update.items()}


def test_each_part_has_a_memory_of_its_own() -> None:
    chain = Chain((("a", Feedback()), ("b", Feedback())))
    update, memory = {"w": torch.ones(1)}, {}
    sent, memory = chain.send(update, draw(), memory)
    assert sorted(memory) == ["a/w", "b/w"]
    sent, memory = chain.send(update, draw(), memory)
    assert float(sent["w"]) == 2.0  # 1 + 0.5 of a's memory, + 0.5 of b's of the first, undisturbed, update


BAD = [
    ("mjp+mjp:gamma=0.1", "names mjp twice"),
    ("mjp+none", "none is no defence"),
    ("mjp+spp", "mjp and spp both move patches"),
    ("mjp+nosie", "unknown defense 'nosie'"),
    ("mjp:gamma=0.5+noise:gama=1", "defence 'noise' has no setting 'gama'"),
    ("mjp+noise:noise_multiplier=-1", "--noise-multiplier"),
]


@pytest.mark.parametrize(("entry", "message"), BAD)
def test_chains_that_cannot_be(entry: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunConfig(defense=(entry,)).validate()


def config_of(defense: str, **federation) -> RunConfig:
    options = {"clients": 2, "rounds": 1} | federation
    return RunConfig(
        defense=(defense,),
        federation=FederationConfig(**options),
        model=ModelConfig("vit_micro8_32", "random"),
        data=DataConfig(train_limit=8, test_limit=2),
    )


@pytest.mark.parametrize(("update", "decay"), [("gradient", 0.0), ("weights", 0.1)])
def test_frozen_parameters_do_not_move(update: str, decay: float) -> None:
    config = config_of("frozen_positions", update=update, learning_rate=0.1)
    task = ClientTask(config, "frozen_positions")
    weights = {n: p.detach().clone() for n, p in task.parameters.items()}
    sent = task.update(0, 1, weights).tensors
    moved = {n: t if update == "gradient" else weights[n] - t for n, t in sent.items()}
    assert not moved["pos_embed"].any()
    assert moved["patch_embed.proj.weight"].any()


def test_a_client_under_a_chain_sends_what_its_parts_would() -> None:
    """A client's update under mjp+frozen_positions is that under mjp with zeros for the tables of positions."""
    chained, alone = "mjp:gamma=0.5+frozen_positions", "mjp:gamma=0.5"
    tasks = [ClientTask(config_of(entry), entry) for entry in (chained, alone)]
    weights = {n: p.detach().clone() for n, p in tasks[0].parameters.items()}
    sent, whole = (task.update(1, 1, weights).tensors for task in tasks)
    assert not sent["unk_embed"].any()
    assert whole["unk_embed"].any()
    assert all(torch.equal(sent[n], whole[n]) for n in sent if n not in ("pos_embed", "unk_embed"))


def test_a_verdict_names_the_attacks_that_know_the_chain() -> None:
    import pandas as pd

    rows = pd.DataFrame({"defense": ["mjp:gamma=0.5+frozen_positions"] * 2})
    assert _defense_of(rows) == {
        "defense": "mjp+frozen_positions",
        "knowing": known_defense("mjp+frozen_positions").known_by,
    }
    # Options may stand on the command line instead of behind the name.
    given = {"withhold": ["first_block"]}
    rows = pd.DataFrame({"defense": ["withheld"], "defense_parameters": [given]})
    assert "token_span" in known_defense("withheld").known_by
    assert "token_span" not in _defense_of(rows)["knowing"]
    chained = pd.DataFrame(
        {"defense": ["withheld+noise"], "defense_parameters": [{"withheld.withhold": ["first_block"]}]}
    )
    assert "token_span" not in _defense_of(chained)["knowing"]
    assert _defense_of(pd.DataFrame({"defense": ["none"]})) == {}
    assert _defense_of(pd.DataFrame({"defense": ["not_installed"]})) == {}


def test_what_one_part_freezes_is_in_no_message_of_another() -> None:
    sent = {"head.weight": torch.randn(5, 8), "blocks.0.attn.qkv.weight": torch.zeros(96, 32)}
    alone = read_defense("quantise").bits({"head.weight": sent["head.weight"]})
    assert read_defense("withheld:train_only=head+quantise").bits(sent) == alone
