"""MP3 and DropPos against a slow oracle: masks, targets, losses, on grids that are not square too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from attacks import UsageError
from fedmjp.config import ModelConfig
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.vit import ViT, attend_to_context
from fedmjp.objectives import Draws, Learner, TrainingBatch, read_objective
from fedmjp.objectives.counts import count_kept
from fedmjp.objectives.droppos import DropPos
from fedmjp.objectives.droppos import place_logits as droppos_logits
from fedmjp.objectives.mp3 import MP3
from fedmjp.objectives.mp3 import place_logits as mp3_logits
from fedmjp.objectives.places import attentive_weights, members, random_subsets, sincos_table, smoothed_places
from tests.conftest import photographs
from tests.objectives import oracle

GRIDS = [(3, 3), (2, 4)]
WIDTH = 8


def small(objective, grid: tuple[int, int], **changes) -> BuiltModel:
    """A ViT of two blocks in float64 whose every weight is drawn, biases and norms too."""
    torch.manual_seed(1)
    module = ViT(
        img_size=(4 * grid[0], 4 * grid[1]),
        patch_size=4,
        embed_dim=WIDTH,
        depth=2,
        num_heads=2,
        num_classes=5,
        **changes,
    )
    objective.attach(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.4)
    module.double().eval()
    return BuiltModel(module, "small", "standard", 4 * grid[0], 4, (0.5,) * 3, (0.5,) * 3, "drawn")


def pictures(grid: tuple[int, int], count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(count, 3, 4 * grid[0], 4 * grid[1], generator=generator, dtype=torch.float64)


def draw(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("eta", [0.0, 0.5, 0.8])
def test_mp3_against_the_oracle(grid, eta: float) -> None:
    objective = MP3(eta=eta)
    model = small(objective, grid, pos_embed="none")
    images, total = pictures(grid), grid[0] * grid[1]
    found = objective.loss(model, TrainingBatch((ClientInput(images),), None, draw()), None)
    context = random_subsets(3, total, math.ceil((1 - eta) * total - 1e-9), draw(), images.device)
    losses = []
    for image, keys in zip(model.normalise(images), context.tolist(), strict=True):
        hidden = oracle.encode(model.module, oracle.patches_of(model.module, image), keys)
        for place, token in enumerate(hidden):
            losses.append(-math.log(oracle.softmax(oracle.linear(model.module.pretext, token))[place]))
    assert len(losses) == 3 * total
    assert float(found.detach()) == pytest.approx(np.mean(losses), rel=1e-10)


def test_mp3_reads_keys_and_values_from_the_context_only() -> None:
    """A patch that is no context changes its own logits alone; one that is changes those of all."""
    model = small(MP3(), (2, 4), pos_embed="none")
    images = pictures((2, 4), 1)
    context = torch.tensor([[0, 2, 4, 6]])
    before = mp3_logits(model.module, images, context)
    for place, reaches in ((1, [1]), (2, list(range(8)))):
        other = images.clone()
        row, column = divmod(place, 4)
        other[0, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
        changed = (mp3_logits(model.module, other, context) - before).abs().amax(dim=2)[0] > 1e-9
        assert changed.nonzero().flatten().tolist() == reaches


@pytest.mark.parametrize("fused", [True, False])
def test_attending_to_a_context_is_timms_block_under_a_mask(fused: bool) -> None:
    block = small(MP3(), (2, 4), pos_embed="none", qk_norm=True, init_values=0.5).module.blocks[0]
    block.attn.fused_attn = fused
    tokens = torch.randn(3, 8, WIDTH, generator=draw(), dtype=torch.float64)
    context = random_subsets(3, 8, 3, draw(1), tokens.device)
    found = attend_to_context(block, tokens, context)
    torch.testing.assert_close(found, block(tokens, attn_mask=members(context, 8)[:, None, None]))


def test_a_context_and_relative_positions_do_not_go_together() -> None:
    module = small(MP3(), (2, 4), relative_positions=True).module
    with pytest.raises(ValueError, match="attends to all tokens"):
        module.encode(torch.zeros(1, 8, WIDTH, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64))


def test_mp3_is_equivariant_without_positions() -> None:
    """Patches shown in another order get the logits in that order: nothing but the patches says where they stand."""
    model = small(MP3(), (2, 4), pos_embed="none")
    patches = pictures((2, 4), 1).unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)  # (1, N, ...)
    order = torch.randperm(8, generator=draw())

    def image_of(parts: torch.Tensor) -> torch.Tensor:
        return parts.view(1, 2, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(1, 3, 8, 16)

    everything = torch.arange(8)[None]
    before = mp3_logits(model.module, image_of(patches), everything)
    after = mp3_logits(model.module, image_of(patches[:, order]), everything)
    torch.testing.assert_close(after, before[:, order], atol=1e-10, rtol=0)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("sigma", "anneal", "tau", "progress"),
    [(1.0, True, 0.1, 0.25), (2.0, False, 0.5, 0.25), (0.0, False, math.inf, 0.0), (1.0, True, math.inf, 0.0)],
)
def test_droppos_against_the_oracle(grid, sigma: float, anneal: bool, tau: float, progress: float) -> None:
    objective = DropPos(0.3, 0.5, sigma, anneal, tau, decoder_width=32)
    model = small(objective, grid, unknown_position=True)
    images, total = pictures(grid), grid[0] * grid[1]
    found = objective.loss(model, TrainingBatch((ClientInput(images),), None, draw(), progress), None)
    generator = draw()
    seen = math.floor(0.7 * total)
    shown = random_subsets(3, total, seen, generator, images.device).tolist()
    slots = random_subsets(3, seen, seen - math.floor(0.5 * seen), generator, images.device).tolist()
    targets = oracle.smoothed(grid, sigma * (1 - progress) if anneal else sigma)
    positions, module = oracle.sincos(grid, WIDTH), model.module
    unknown, first = (p.detach().numpy()[0, 0] for p in (module.unk_embed, module.cls_token))
    weighed, weights = 0.0, 0.0
    for image, kept, hidden in zip(model.normalise(images), shown, slots, strict=True):
        patches = oracle.patches_of(module, image)
        tokens = [patches[p] + (unknown if s in hidden else positions[p]) for s, p in enumerate(kept)]
        decoded = [oracle.linear(module.pretext.embed, t) for t in oracle.encode(module, [first, *tokens])]
        for layer in module.pretext.blocks:
            decoded = oracle.block(layer, decoded, range(len(decoded)))
        logits = [oracle.linear(module.pretext.predict, oracle.norm(module.pretext.norm, t)) for t in decoded[1:]]
        whole = oracle.encode(module, [first, *(p + e for p, e in zip(patches, positions, strict=True))])
        likeness = oracle.softmax(np.array([oracle.cosine(whole[0], t) for t in whole[1:]]) / tau)
        for slot in hidden:
            place = kept[slot]
            weight = 1.0 if math.isinf(tau) else likeness[place]
            weighed -= weight * targets[place] @ np.log(oracle.softmax(logits[slot]))
            weights += weight
    assert float(found.detach()) == pytest.approx(weighed / weights, rel=1e-6)  # the sin-cos table is made in float32


@pytest.mark.parametrize("grid", [*GRIDS, (14, 14), (1, 5)])
@pytest.mark.parametrize("sigma", [0.0, 0.05, 1.0, 2.0])
def test_smoothed_places(grid, sigma: float) -> None:
    map_ = smoothed_places(grid, sigma)
    np.testing.assert_allclose(map_.numpy(), oracle.smoothed(grid, sigma), atol=1e-12)
    torch.testing.assert_close(map_.sum(dim=1), torch.ones(len(map_), dtype=torch.float64))
    assert torch.equal(map_.argmax(dim=1), torch.arange(len(map_)))


def test_smoothing_lies_on_the_true_grid_and_the_published_one_does_not() -> None:
    """(5, 5) of a 14 x 14 grid: its neighbours are above and below it; on a grid of width 16 they are not."""
    ours, place = smoothed_places((14, 14), 1.0), 5 * 14 + 5
    nearest = ours[place].topk(5).indices.tolist()
    assert sorted(nearest) == [place - 14, place - 1, place, place + 1, place + 14]
    axis = torch.arange(256)
    squares = (axis[:, None] // 16 - axis // 16) ** 2 + (axis[:, None] % 16 - axis % 16) ** 2
    weights = torch.exp(-squares.double())
    # As in the code: columns are divided, not rows, and the loss reads the first 196 rows and columns.
    published = (weights / weights.sum(-1))[:196, :196]
    nearest = [divmod(n, 14) for n in published[place].topk(5).indices.tolist()]
    assert {(4, 3), (6, 7)} <= set(nearest)
    sums = published.sum(dim=1)
    assert (round(float(sums.min()), 2), round(float(sums.max()), 2)) == (0.66, 1.11)


@pytest.mark.parametrize("grid", GRIDS)
def test_sincos_table(grid) -> None:
    table = sincos_table(grid, WIDTH, 1)
    assert (table[0, 0] == 0).all()
    np.testing.assert_allclose(table[0, 1:].double().numpy(), np.array(oracle.sincos(grid, WIDTH)), atol=1e-6)


def test_attentive_weights_take_no_gradient() -> None:
    model = small(DropPos(decoder_width=32), (3, 3), unknown_position=True)
    weights = attentive_weights(model.module, pictures((3, 3)), 0.1)
    assert not weights.requires_grad
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("grid", GRIDS)
def test_relative_positions_against_the_oracle(grid) -> None:
    class Nothing:
        attach = staticmethod(lambda module: None)

    model = small(Nothing, grid, pos_embed="none", relative_positions=True)
    image = model.normalise(pictures(grid, 1))
    tokens = [model.module.cls_token.detach().numpy()[0, 0], *oracle.patches_of(model.module, image[0])]
    expected = np.array(oracle.encode(model.module, tokens))
    found = model.module.forward_features(image).detach().numpy()[0]
    np.testing.assert_allclose(found, expected, atol=1e-10)
    bare = ViT(
        img_size=(4 * grid[0], 4 * grid[1]), patch_size=4, embed_dim=WIDTH, depth=2, num_heads=2, pos_embed="none"
    )
    assert np.abs(found - bare.double().forward_features(image).detach().numpy()[0]).max() > 1e-3


def test_a_model_with_relative_positions_starts_as_one_without() -> None:
    plain, relative = (build_model(f"vit_mini_32{v}", num_classes=4, weights="random") for v in ("_nope", "_rel"))
    images = plain.normalise(photographs(32, 2))
    torch.testing.assert_close(relative.module(images), plain.module(images), atol=1e-6, rtol=0)
    assert "relative.0.relative_position_bias_table" in relative.module.no_weight_decay()


def test_counts() -> None:
    assert [count_kept(64, g, rounds_up=False) for g in (0.0, 0.25, 0.5, 0.75, 0.95)] == [64, 48, 32, 16, 3]
    assert [count_kept(196, g, rounds_up=False) for g in (0.75, 0.95)] == [49, 9]
    assert count_kept(10, 0.7, rounds_up=True) == 3  # (1 - 0.7) * 10 is 3.0000000000000004
    assert count_kept(10, 0.9, rounds_up=False) == 1  # and (1 - 0.9) * 10 is 0.9999999999999998


def test_subsets_are_uniform() -> None:
    drawn = members(random_subsets(4000, 8, 3, draw(), torch.device("cpu")), 8)
    assert (drawn.sum(dim=1) == 3).all()
    shares = drawn.double().mean(dim=0)
    assert float((shares - 3 / 8).abs().max()) < 5 * math.sqrt(3 / 8 * 5 / 8 / 4000)


def learner(entry: str, model: str = "vit_micro_32", defense: str = "none", weights: str = "random") -> Learner:
    return Learner.build(
        read_objective(entry),
        DEFENSES.get(defense)(),
        ModelConfig(model, weights),
        num_classes=8,
        seed=0,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("mp3:eta=0.5", "vit_micro_32_nope"),
        ("droppos:decoder_width=32", "vit_micro_32_mjp"),
        ("droppos:decoder_width=32,positions=learned,tau=inf", "vit_micro_32_mjp"),
    ],
)
def test_every_parameter_that_is_sent_has_a_gradient(entry: str, name: str) -> None:
    made = learner(entry)
    assert made.model.name == name
    draws = Draws.seeded(1, 2)
    made.loss(made.views(photographs(32, 2), draws, 1), None, draws).backward()
    gradients = {n: p.grad for n, p in made.model.module.named_parameters()}
    assert all(g is not None and g.abs().max() > 0 for g in gradients.values())
    assert ("pos_embed" in gradients) == ("learned" in entry)
    assert "pos_embed" not in made.model.module.state_dict() or "learned" in entry
    assert not any(n.startswith("head.") for n in gradients)


def test_droppos_shows_only_what_it_keeps() -> None:
    """Patches that are not shown, and positions that are hidden, have no gradient."""
    made = learner("droppos:decoder_width=32,positions=learned")
    module, images = made.model.module, photographs(32, 1).requires_grad_()
    shown = torch.tensor([[0, 5, 9, 63]])
    logits = droppos_logits(module, made.model.normalise(images), shown, torch.tensor([[1, 3]]))
    assert logits.shape == (1, 2, 64)
    logits.square().sum().backward()
    moved = torch.nn.functional.unfold(images.grad, 4, stride=4)[0].abs().sum(dim=0).nonzero().flatten()
    assert moved.tolist() == [0, 5, 9, 63]
    rows = module.pos_embed.grad[0].abs().sum(dim=1).nonzero().flatten()
    assert rows.tolist() == [0, 1, 10]  # the class token's, and those of the patches 0 and 9


@pytest.mark.parametrize("entry", ["mp3", "droppos:decoder_width=32"])
def test_evaluation_repeats_and_starts_at_chance(entry: str) -> None:
    from fedmjp.data import load_data

    made, data = learner(entry), load_data("photos", size=32)
    first, second = (made.objective.evaluate(made.model, None, data, torch.device("cpu")) for _ in range(2))
    assert first == second
    assert first[0] == pytest.approx(math.log(64), rel=0.1)
    assert first[1] < 0.1


def test_a_supervised_checkpoint_starts_the_pretext_task() -> None:
    made = learner("mp3", "vit_mini_32", weights="auto")
    assert made.model.provenance == "shipped vit_mini_32_nope.safetensors (pretext head random)"
    plain = build_model("vit_mini_32_nope", num_classes=10, weights="auto")
    assert torch.equal(made.model.module.blocks[3].mlp.fc1.weight, plain.module.blocks[3].mlp.fc1.weight)


def test_masked_attention_is_the_same_fused_and_unfused() -> None:
    made = learner("mp3:eta=0.5")
    images, context = made.model.normalise(photographs(32, 2)), torch.tensor([[0, 3], [5, 63]])
    fused = mp3_logits(made.model.module, images, context)
    for block in made.model.module.blocks:
        block.attn.fused_attn = not block.attn.fused_attn
    torch.testing.assert_close(mp3_logits(made.model.module, images, context), fused, atol=1e-5, rtol=1e-4)


def test_bad_weights_are_one_line(tmp_path) -> None:
    torch.save({"head.weight": torch.zeros(2, 2)}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="does not fit"):
        learner("mp3", weights=str(tmp_path / "other.pt"))
    assert isinstance(learner("mp3").model.module.pretext, nn.Linear)


@pytest.mark.parametrize("entry", ["mp3:eta=0.5", "droppos:gamma=0.25,gamma_pos=0.5,decoder_width=64,tau=inf"])
def test_the_pretext_task_can_be_learned(entry: str) -> None:
    """On a few photographs seen again and again, with new masks each time, most places are found; chance is 1 / 64."""
    made, images = learner(entry), photographs(32, 8)
    optimizer = torch.optim.AdamW(made.model.module.parameters(), 2e-3)
    draws = Draws.seeded(1, 2)
    found = 0.0
    for step in range(400):
        loss = made.loss(made.views(images, draws, 1), None, draws)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            logits, places = made.objective.predict(made.model, images, draw(3))
            found = float((logits.argmax(dim=-1) == places).float().mean())
            if found > 0.5:
                break
    assert found > 0.5
