"""Top-k and random masks against loops over entries, their memory, and the size of the message."""

from __future__ import annotations

import dataclasses
from math import ceil, log2

import pytest
import torch

from attacks import ATTACKS
from fedmjp.audit.victims import drifted
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, ModelConfig, RunConfig
from fedmjp.defenses.chain import read_defense
from fedmjp.defenses.topk import TopK
from fedmjp.federation import ENGINES, run_rounds
from fedmjp.federation_options import FederationConfig
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from fedmjp.objectives import Draws
from fedmjp.training import Recipe, TrainConfig
from fedmjp.training.trainer import Trainer
from tests.conftest import observe, photographs


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def update(seed: int = 1) -> dict[str, torch.Tensor]:
    return {
        "wide": 10 * torch.randn(12, 9, generator=draw(seed)),
        "bias": torch.randn(7, generator=draw(seed + 1)),
        "filters": torch.randn(4, 3, 2, 2, generator=draw(seed + 2)),
    }


@pytest.mark.parametrize("over", ["tensor", "update"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 1.0])
def test_the_largest_entries_are_sent_unchanged(share: float, over: str) -> None:
    """Against sorting by hand."""
    given = update()
    sent = TopK(topk_share=share, topk_over=over).message(given, draw(), {})[0]
    groups = [[name] for name in given] if over == "tensor" else [list(given)]
    for names in groups:
        places = sorted(
            ((name, i) for name in names for i in range(given[name].numel())),
            key=lambda place: -abs(float(given[place[0]].flatten()[place[1]])),
        )
        kept = set(places[: max(1, round(share * len(places)))])
        for name, i in places:
            expected = float(given[name].flatten()[i]) if (name, i) in kept else 0.0
            assert float(sent[name].flatten()[i]) == expected


@pytest.mark.parametrize("over", ["tensor", "update"])
def test_a_random_mask_follows_the_generator_and_not_the_entries(over: str) -> None:
    defense = TopK(topk_share=0.3, topk_choice="random", topk_over=over)
    first, again = (defense.message(update(seed), draw(), {})[0] for seed in (1, 5))
    other = defense.message(update(), draw(9), {})[0]
    assert all(torch.equal(first[n] != 0, again[n] != 0) for n in first)
    assert any(not torch.equal(first[n] != 0, other[n] != 0) for n in first)
    assert sum(int(t.count_nonzero()) for t in first.values()) == (32 + 2 + 14 if over == "tensor" else 49)
    counts = torch.stack([defense.message(update(), draw(s), {})[0]["wide"] != 0 for s in range(400)]).float().mean(0)
    assert float((counts - 0.3).abs().max()) < 0.12  # five standard deviations of 400 draws


def test_what_is_not_sent_is_remembered_and_sent_later() -> None:
    """Sums of what was sent and the last memory are the sums of the updates, and most entries are sent some time."""
    defense, memory = TopK(topk_share=0.1, topk_feedback=True), {}
    total, sent_total = ({n: torch.zeros_like(t) for n, t in update().items()} for _ in range(2))
    touched = {n: torch.zeros_like(t, dtype=torch.bool) for n, t in update().items()}
    for number in range(40):
        given = {n: t + 0.1 * torch.randn(t.shape, generator=draw(number)) for n, t in update().items()}
        sent, memory = defense.message(given, draw(), memory)
        for n in given:
            total[n] += given[n]
            sent_total[n] += sent[n]
            touched[n] |= sent[n] != 0
            torch.testing.assert_close(sent_total[n] + memory[n], total[n], rtol=1e-4, atol=1e-4)
            assert float(memory[n].abs().max()) <= float(sent[n][sent[n] != 0].abs().min())
    assert float(torch.cat([t.flatten() for t in touched.values()]).float().mean()) > 0.75  # 0.1 without a memory


def test_the_size_of_the_message() -> None:
    sizes = {"wide": 108, "bias": 7, "filters": 48}
    given = update()
    largest = TopK(topk_share=0.1)
    kept = {n: max(1, round(0.1 * size)) for n, size in sizes.items()}
    places = sum(min(size, kept[n] * ceil(log2(size))) for n, size in sizes.items())
    assert largest.bits(largest.message(given, draw(), {})[0]) == 32 * sum(kept.values()) + places
    whole = TopK(topk_share=0.1, topk_over="update")
    assert whole.bits(whole.message(given, draw(), {})[0]) == 32 * 16 + min(163, 16 * 8)
    scattered = TopK(topk_share=0.1, topk_choice="random")
    assert scattered.bits(scattered.message(given, draw(), {})[0]) == 32 * sum(kept.values()) + 64
    nothing = TopK(topk_share=1.0)
    assert nothing.bits(given) == 32 * 163 + 163  # a bit an entry is shorter than indices


def test_it_acts_in_a_chain_on_what_the_defence_before_it_sends() -> None:
    chain = read_defense("noise:noise_multiplier=0+topk:topk_share=0.3,topk_feedback=true+quantise")
    sent, memory = chain.message(update(), draw(), {})
    assert chain.remembers
    assert sorted(memory) == ["topk/bias", "topk/filters", "topk/wide"]
    whole = read_defense("noise:noise_multiplier=0").message(update(), draw(), {})[0]
    kept = {n: whole[n] - memory[f"topk/{n}"] for n in whole}
    assert all(len(t.unique()) <= 255 for t in sent.values())
    assert all(float((sent[n] - kept[n]).abs().max()) <= float(kept[n].abs().max()) / 250 for n in sent)


def config_of(**federation) -> RunConfig:
    return RunConfig(
        defense=("topk:topk_share=0.3,topk_feedback=true",),
        federation=FederationConfig(**({"clients": 2, "rounds": 3, "learning_rate": 0.1} | federation)),
        model=ModelConfig("vit_micro8_32", "random"),
        data=DataConfig(train_limit=8, test_limit=2),
    )


@pytest.mark.parametrize("kind", ["gradient", "weights"])
def test_the_rounds_of_a_client_add_up_to_what_it_computed(kind: str, monkeypatch) -> None:
    """In a federation: the entries a client sends, with its last memory, are those of its undefended updates."""
    config = config_of(update=kind)
    (entry,), sums = config.defense, {}
    update = ClientTask.update

    def noted(self, client, round, weights, source=None, kept=None):
        given = {n: t.clone() for n, t in weights.items()}
        result = update(self, client, round, weights, source, kept)
        plain = update(ClientTask(config, "none"), client, round, given)
        for n, t in result.tensors.items():
            own, whole = (t, plain.tensors[n]) if kind == "gradient" else (given[n] - t, given[n] - plain.tensors[n])
            before, computed, _ = sums.get((client, n), (0.0, 0.0, None))
            sums[client, n] = before + own, computed + whole, result.kept["defense/" + n]
        return result

    monkeypatch.setattr(ClientTask, "update", noted)
    task = ClientTask(config, entry)
    assert task.clients_keep

    def run(grid) -> None:
        run_rounds(grid, task, entry, on_update=lambda view: None, on_round=lambda number, state: None)

    ENGINES.get("local")(run, 2, config.client_entropy())
    assert len(sums) == 2 * len(task.parameters)
    for sent, computed, memory in sums.values():
        torch.testing.assert_close(sent + memory, computed, rtol=1e-3, atol=1e-6)
    assert any(memory.any() for _, _, memory in sums.values())


def test_a_central_training_takes_its_memory_up_again(tmp_path) -> None:
    """Two steps of which the second starts from a saved state are those of one training."""
    options = TrainConfig(
        defense="topk:topk_share=0.3,topk_feedback=true",
        model=ModelConfig("vit_micro8_32", "random"),
        data=DataConfig(train_limit=8, test_limit=2),
        recipe=Recipe(epochs=1, batch_size=4, warmup_epochs=0),
        threads=1,
        out=tmp_path / "train",
    )
    images, labels = torch.rand(4, 3, 32, 32, generator=draw()), torch.arange(4) % 2
    whole, resumed, forgetful = (Trainer(options) for _ in range(3))
    whole.step(images, labels, Draws.seeded(0, 1), 1)
    state = whole.state()
    assert any(t.any() for t in state["memory"].values())
    saved = tmp_path / "state.pt"
    torch.save(state, saved)
    resumed.load_state(torch.load(saved))
    forgetful.load_state(torch.load(saved) | {"memory": {}})
    for trainer in (whole, resumed, forgetful):
        trainer.step(images, labels, Draws.seeded(2, 3), 1)
    found, expected, other = (trainer.model.module.state_dict() for trainer in (resumed, whole, forgetful))
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert any(not torch.equal(other[n], t) for n, t in expected.items())


READ = ("pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")


@pytest.mark.parametrize(("choice", "least"), [("largest", 28.0), ("random", 26.0)])
def test_rounds_of_a_client_show_what_one_leaves_out(choice: str, least: float) -> None:
    """A photograph from ten updates with 30 % of the entries each, the weights drifting by 1e-3 between two of them."""
    built, image = build_model("vit_mini_32", num_classes=10, weights="auto"), photographs(32, 2)[1:]
    defense = TopK(topk_share=0.3, topk_choice=choice, topk_feedback=choice == "largest")
    history, memory = [], {}
    for number in range(10):
        view = observe(drifted(built, 1e-3, 0, number) if number else built, image)
        sent, memory = defense.message({n: view.gradients[n] for n in READ}, draw(number), memory)
        history.append(dataclasses.replace(view, gradients=sent))
    rounds, alone = ATTACKS.get("sparse_rounds")()(history), ATTACKS.get("patch_embedding")()(history[:1])
    assert float(psnr(rounds.images, image)) > max(least, float(psnr(alone.images, image)) + 6)
    assert bool(rounds.details["memory"]) == (choice == "largest")
    wrong = torch.nn.functional.avg_pool2d((rounds.images - image).square().mean(dim=1, keepdim=True), 4)
    assert not bool((rounds.known[..., ::4, ::4] & (wrong > 10**-2.5)).any())
    assert not alone.known.any()


def test_updates_of_different_images_are_not_vouched_for() -> None:
    built, defense, memory, history = build_model("vit_mini_32", num_classes=10, weights="auto"), TopK(0.3), {}, []
    for number, image in enumerate(photographs(32, 6)):
        view = observe(built, image[None])
        sent, memory = defense.message({n: view.gradients[n] for n in READ}, draw(number), memory)
        history.append(dataclasses.replace(view, gradients=sent))
    found = ATTACKS.get("sparse_rounds")()(history)
    assert not found.known.any()
    assert "not of one image" in found.diagnosis
