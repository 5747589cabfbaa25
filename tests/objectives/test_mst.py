"""MST against a slow oracle: views, masks, teacher, losses, on grids that are not square too."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from fedmjp.config import ModelConfig
from fedmjp.data import load_data
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.models.attention import candidates
from fedmjp.objectives import Draws, Learner, TrainingBatch, read_objective
from fedmjp.objectives.crop_encoder import encode_crops
from fedmjp.objectives.distillation import Teacher, distillation_loss, entropy, momentum_at, update_centre
from fedmjp.objectives.mst import MST
from fedmjp.objectives.mst_loss import mst_loss, pass_views, teach
from fedmjp.objectives.restoration import patch_values
from fedmjp.objectives.token_masks import BERT, draw_mask, replace_patches
from tests.conftest import photographs
from tests.objectives import oracle
from tests.objectives.test_position_prediction import GRIDS, draw, pictures, small

TINY = "outputs=6,hidden=5,bottleneck=4"
TINY_OPTIONS = {"outputs": 6, "hidden": 5, "bottleneck": 4}


def views_of(grid: tuple[int, int], local: int = 2) -> tuple[ClientInput, ...]:
    """Two global views of three images, and local ones of half the patches a side."""
    half = tuple(n // 2 + 1 for n in grid)
    every = torch.rand(2 + local, 3, 3, 4 * grid[0], 4 * grid[1], generator=draw(8), dtype=torch.float64)
    return tuple(ClientInput(one if n < 2 else one[..., : 4 * half[0], : 4 * half[1]]) for n, one in enumerate(every))


def learner(entry: str, model: str = "vit_micro_32", defense: str = "none") -> Learner:
    found = DEFENSES.get(defense)()
    config, device = ModelConfig(model, "random"), torch.device("cpu")
    return Learner.build(read_objective(entry), found, config, num_classes=8, seed=0, device=device)


def teacher_of(model) -> Teacher:
    """A teacher with other weights than the student's."""
    teacher = Teacher(model.module)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw(3), dtype=parameter.dtype))
    return teacher


def oracle_tokens(module, image, replaced=()) -> list[np.ndarray]:
    """The encoder's input: patches, some replaced by the mask token, with positions resampled to the image's grid."""
    grid = (image.shape[1] // 4, image.shape[2] // 4)
    table = module.pos_embed.detach()[0]
    own = table[1:].T.reshape(1, table.shape[1], *module.patch_embed.grid_size)
    if own.shape[2:] != grid:
        own = torch.nn.functional.interpolate(own, grid, mode="bicubic", antialias=True)
    positions = own[0].flatten(1).T.numpy()
    patches = oracle.patches_of(module, image)
    for place in replaced:
        patches[place] = module.pretext.mask_token.detach().numpy()
    first = (module.cls_token.detach()[0, 0] + table[0]).numpy()
    return [first, *(p + e for p, e in zip(patches, positions, strict=True))]


def oracle_attention(network, image) -> np.ndarray:
    """The class token's attention to each patch in the last block, mean over heads."""
    tokens = oracle_tokens(network, image)
    for layer in network.blocks[:-1]:
        tokens = oracle.block(layer, tokens, range(len(tokens)))
    last = network.blocks[-1]
    triples = [oracle.linear(last.attn.qkv, oracle.norm(last.norm1, t)) for t in tokens]
    width, heads = len(tokens[0]), last.attn.num_heads
    size, total = width // heads, np.zeros(len(tokens) - 1)
    for h in range(heads):
        cut = slice(h * size, (h + 1) * size)
        scores = [triples[0][:width][cut] @ t[width : 2 * width][cut] / math.sqrt(size) for t in triples]
        total += oracle.softmax(np.array(scores))[1:]
    return total / heads


def oracle_head(head, x: np.ndarray) -> np.ndarray:
    for number, layer in enumerate((head.layers[0], head.layers[2], head.layers[4])):
        x = oracle.linear(layer, x)
        x = oracle.gelu(x) if number < 2 else x
    rows = head.prototypes.detach().numpy()
    return np.array([(row @ x) / np.linalg.norm(row) / np.linalg.norm(x) for row in rows])


def oracle_decoder(decoder, tokens: list[list[np.ndarray]], grid: tuple[int, int]) -> np.ndarray:
    """(B, 3, H, W): convolution, batch statistics, ReLU and the linear map by loops."""
    (rows, columns), weight = grid, decoder.mix.weight.detach().numpy()
    maps = np.zeros((len(tokens), len(weight), rows, columns))
    for b, own in enumerate(tokens):
        for i in range(rows):
            for j in range(columns):
                for di in (-1, 0, 1):
                    for dj in (-1, 0, 1):
                        if 0 <= i + di < rows and 0 <= j + dj < columns:
                            maps[b, :, i, j] += weight[:, :, di + 1, dj + 1] @ own[(i + di) * columns + j + dj]
    for channel in range(maps.shape[1]):
        values, norm = maps[:, channel], decoder.norm
        values = (values - values.mean()) / math.sqrt(values.var() + norm.eps)
        maps[:, channel] = values * norm.weight[channel].item() + norm.bias[channel].item()
    last, bias = decoder.predict.weight.detach().numpy()[:, :, 0, 0], decoder.predict.bias.detach().numpy()
    images = np.zeros((len(tokens), 3, 4 * rows, 4 * columns))
    for b in range(len(tokens)):
        for i in range(rows):
            for j in range(columns):
                pixels = last @ np.maximum(maps[b, :, i, j], 0) + bias
                images[b, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4] = pixels.reshape(3, 4, 4)
    return images


def oracle_loss(options: MST, model, teacher: Teacher, views, masks) -> float:
    module, heads = model.module, model.module.pretext
    centre = heads.centre.numpy()
    shown = [[2 * image - 1 for image in view.images] for view in views]  # mean = std = 0.5
    student, tokens, targets = [], [], []
    for v, images in enumerate(shown):
        hidden = [torch.nonzero(row).flatten().tolist() for row in masks[v]] if v < 2 else [()] * len(images)
        encoded = [oracle.encode(module, oracle_tokens(module, x, h)) for x, h in zip(images, hidden, strict=True)]
        student.append([oracle_head(heads.projection, e[0]) for e in encoded])
        tokens.append([e[1:] for e in encoded])
    for images in shown[:2]:
        network = teacher.network
        found = [oracle_head(network.pretext, oracle.encode(network, oracle_tokens(network, x))[0]) for x in images]
        targets.append([oracle.softmax((t - centre) / options.teacher_temperature) for t in found])
    pairs = [(g, v) for g in range(2) for v in range(len(views)) if v != g]
    crossed = 0.0
    for g, v in pairs:
        for target, output in zip(targets[g], student[v], strict=True):
            crossed -= (target * np.log(oracle.softmax(output / options.student_temperature))).sum()
    crossed /= len(pairs) * len(shown[0])
    restoration = 0.0
    for v in range(2):
        restored = oracle_decoder(heads.decoder, tokens[v], module.patch_embed.grid_size)
        off, kept = np.abs(restored - torch.stack(shown[v]).numpy()), np.ones(restored.shape, bool)
        if options.restored == "masked":
            columns = module.patch_embed.grid_size[1]
            for b, row in enumerate(masks[v]):
                for n, is_hidden in enumerate(row):
                    i, j = divmod(n, columns)
                    kept[b, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4] = bool(is_hidden)
        restoration += (off[kept].sum() if options.l1 == "sum" else off[kept].mean()) / 2
    return options.lambda_1 * crossed + options.lambda_2 * restoration


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"masking": "attention", "share": 0.5, "p": 0.7},
        {"masking": "attended", "share": 0.5, "p": 1.0, "restored": "masked", "lambda_1": 0.7},
        {"masking": "random", "p": 0.4, "l1": "sum", "lambda_2": 0.01},
    ],
)
def test_loss_against_the_oracle(grid, changes) -> None:
    options = MST(**TINY_OPTIONS, **changes)
    model = small(options, grid)
    model.module.pretext.centre.copy_(torch.randn(6, generator=draw(4)) * 0.1)
    model.module.train()
    teacher, views = teacher_of(model), views_of(grid)
    passed = pass_views(options, model, TrainingBatch(views, None, draw(9), 0.5), teacher)
    centre = model.module.pretext.centre.clone()
    wanted = oracle_loss(options, model, teacher, views, passed.masks)
    found = mst_loss(options, model, TrainingBatch(views, None, draw(9), 0.5), teacher)
    assert found.item() == pytest.approx(wanted, abs=1e-9)
    outputs = torch.cat(passed.targets)
    moved = [0.9 * float(c) + 0.1 * float(outputs[:, k].sum() / len(outputs)) for k, c in enumerate(centre)]
    assert model.module.pretext.centre.tolist() == pytest.approx(moved, abs=1e-12)
    found.backward()
    assert all(p.grad is not None for p in model.module.parameters())
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("most", [False, True])
def test_masks_follow_the_teachers_attention(grid, most: bool) -> None:
    options = MST(**TINY_OPTIONS, masking="attended" if most else "attention", share=0.4, p=1.0)
    model = small(options, grid)
    teacher, views = teacher_of(model), views_of(grid, 0)
    passed = pass_views(options, model, TrainingBatch(views, None, draw(), 0.5), teacher)
    count = round(0.4 * grid[0] * grid[1])
    for view, mask in zip(views, passed.masks, strict=True):
        for image, row in zip(view.images, mask, strict=True):
            attention = oracle_attention(teacher.network, 2 * image - 1)
            order = np.argsort(-attention if most else attention)
            assert sorted(order[:count].tolist()) == torch.nonzero(row).flatten().tolist()
            _, found = teach(options, teacher, ClientInput(2 * image[None] - 1))
            np.testing.assert_allclose(found[0].numpy(), attention, atol=1e-12)


def test_candidates_are_hidden_with_probability_p() -> None:
    attention = torch.rand(400, 64, generator=draw(6))
    allowed = candidates(attention, 8, most=False)
    assert (allowed.sum(dim=1) == 8).all()
    assert (attention[allowed].view(400, 8).amax(dim=1) <= attention[~allowed].view(400, 56).amin(dim=1)).all()
    share = draw_mask(allowed, 0.3, draw()).sum() / allowed.sum()
    assert float(share) == pytest.approx(0.3, abs=5 * math.sqrt(0.3 * 0.7 / 3200))
    assert not draw_mask(allowed, 0.0, draw()).any()
    assert torch.equal(draw_mask(allowed, 1.0, draw()), allowed)
    assert candidates(torch.ones(1, 4), 2, most=True)[0].tolist() == [True, True, False, False]


def test_replacement_as_in_bert() -> None:
    patches = torch.arange(40 * 64, dtype=torch.float32).view(40, 64, 1)
    mask, token = torch.rand(40, 64, generator=draw(6)) < 0.5, torch.tensor([-1.0])
    plain = replace_patches(patches, mask, token, "token", draw())
    assert torch.equal(plain[mask], torch.full((int(mask.sum()), 1), -1.0))
    assert torch.equal(plain[~mask], patches[~mask])
    mixed = replace_patches(patches, mask, token, "bert", draw())
    assert torch.equal(mixed[~mask], patches[~mask])
    hidden, same = mixed[mask] == -1, mixed[mask] == patches[mask]
    count, other = len(hidden), 1 - sum(BERT)
    for found, wanted in ((hidden, BERT[0]), (~hidden & ~same, BERT[1]), (same, other)):
        assert float(found.float().mean()) == pytest.approx(wanted, abs=5 * math.sqrt(wanted / count))


def test_teacher_follows_the_student() -> None:
    options = MST(**TINY_OPTIONS, momentum=0.9)
    model = small(options, (3, 3))
    teacher = teacher_of(model)
    before = {n: p.clone() for n, p in teacher.network.named_parameters()}
    student = dict(model.module.named_parameters())
    for step, progress in enumerate((0.0, 0.25, 0.5)):
        options.after_step(model, teacher, progress)
        m = 1 - 0.1 * (math.cos(math.pi * progress) + 1) / 2
        assert momentum_at(0.9, progress) == pytest.approx(m)
        for name, own in teacher.network.named_parameters():
            source = student[name.replace("pretext.", "pretext.projection.")]
            wanted = m * before[name].numpy() + (1 - m) * source.detach().numpy()
            np.testing.assert_allclose(own.numpy(), wanted, atol=1e-12, err_msg=f"{name}, step {step}")
            before[name] = own.clone()
    assert momentum_at(0.9, 1.0) == 1
    assert not any("decoder" in n or "mask_token" in n for n in teacher.state_dict())


def test_a_teacher_starts_as_the_student() -> None:
    model = small(MST(**TINY_OPTIONS), (2, 4))
    teacher, images = Teacher(model.module), pictures((2, 4))
    assert torch.equal(encode_crops(teacher.network, images), encode_crops(model.module, images))
    assert torch.equal(encode_crops(model.module, images), model.module.forward_features(images))


def test_a_student_that_ignores_the_image_reaches_the_entropy_of_the_mean() -> None:
    targets = torch.softmax(torch.randn(50, 4, generator=draw()), dim=1)
    best = targets.mean(dim=0).log().expand(50, 4)
    wanted = float(entropy(targets.mean(dim=0)))
    assert float(distillation_loss([best, best], [targets], 1.0)) == pytest.approx(wanted, abs=1e-6)
    assert entropy(targets).max() < math.log(4)
    point, uniform = torch.tensor([1.0, 0, 0, 0]), torch.full((4,), 0.25)
    assert (float(entropy(point)), float(entropy(uniform))) == pytest.approx((0.0, math.log(4)), abs=1e-6)


def test_centre_is_the_mean_over_both_views() -> None:
    centre, outputs = torch.tensor([1.0, 0.0]), [torch.tensor([[2.0, 4.0]]), torch.tensor([[0.0, 0.0]])]
    update_centre(centre, outputs, 0.75)
    assert centre.tolist() == [1.0, 0.5]


def test_batch_norm_sees_one_global_view_at_a_time() -> None:
    options = MST(**TINY_OPTIONS)
    model = small(options, (3, 3))
    model.module.train()
    views, norm = views_of((3, 3)), model.module.pretext.decoder.norm
    seen: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    before = norm.running_mean.clone()
    mst_loss(options, model, TrainingBatch(views, None, draw(), 0.5), Teacher(model.module))
    assert [tuple(one.shape) for one in seen] == [(3, 8, 3, 3)] * 2
    wanted = before
    for one in seen:
        wanted = 0.9 * wanted + 0.1 * one.detach().mean(dim=(0, 2, 3))
    torch.testing.assert_close(norm.running_mean, wanted)


def test_frozen_prototypes_get_no_gradient() -> None:
    options = MST(**TINY_OPTIONS, frozen=0.2)
    model = small(options, (3, 3))
    for progress, moves in ((0.1, False), (0.2, True)):
        model.module.zero_grad(set_to_none=True)
        mst_loss(
            options, model, TrainingBatch(views_of((3, 3)), None, draw(), progress), Teacher(model.module)
        ).backward()
        assert (model.module.pretext.projection.prototypes.grad is not None) == moves


def test_sum_grows_with_the_resolution_and_mean_does_not() -> None:
    """The trap of the listing: the same error a pixel weighs four times as much on twice the side."""
    from fedmjp.objectives.restoration import restoration_loss

    found = {
        (side, how): float(
            restoration_loss(torch.zeros(2, 3, side, side), torch.ones(2, 3, side, side), None, (4, 4), how)
        )
        for side in (8, 16)
        for how in ("mean", "sum")
    }
    assert found == {(8, "mean"): 1, (16, "mean"): 1, (8, "sum"): 384, (16, "sum"): 1536}
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    assert float(restoration_loss(torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8), nothing, (4, 4), "mean")) == 0


def test_patch_values_are_in_raster_order() -> None:
    images = torch.rand(2, 3, 8, 12, generator=draw())
    unfolded = torch.nn.functional.unfold(images, 4, stride=4).transpose(1, 2)
    assert torch.equal(patch_values(images, (4, 4)), unfolded)


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        (f"mst:{TINY},local_crops=2", {"projection", "decoder", "mask_token"}),
        (f"mst:{TINY},local_crops=1,masking=none,lambda_2=0", {"projection"}),
        (f"mst:{TINY},lambda_1=0,masking=random,restored=masked,replacement=bert,p=0.5", {"decoder", "mask_token"}),
        (f"mst:{TINY},lambda_1=0,masking=attended,share=0.5", {"decoder", "mask_token"}),
        (f"mst:{TINY},lambda_2=0,masking=attention,share=0.5,local_crops=0", {"projection", "mask_token"}),
    ],
)
def test_every_parameter_that_is_sent_has_a_gradient(entry: str, parts: set[str]) -> None:
    made = learner(entry)
    draws = Draws(draw(1), draw(2))
    made.model.module.train()
    views = made.views(photographs(32, 4), draws, 1)
    sides = [view.images.shape[-1] for view in views]
    assert sides == [32, 32] + [12] * (len(views) - 2)
    made.loss(views, None, draws, progress=0.5).backward()
    gradients = {n: p.grad for n, p in made.model.module.named_parameters()}
    assert all(g is not None and g.abs().max() > 0 for g in gradients.values())
    assert {n.split(".")[1] for n in gradients if n.startswith("pretext.")} == parts
    assert not any(n.startswith("head.") for n in gradients)
    no_teacher = "lambda_1=0" in entry and "random" in entry
    assert (made.local is None) == no_teacher


def test_mjp_composes_without_local_crops() -> None:
    made = learner(f"mst:{TINY},local_crops=0", defense="mjp")
    draws = Draws(draw(1), draw(2))
    views = made.views(photographs(32, 2), draws, 1)
    assert len(views) == 2
    assert all(int(view.position_mask.sum()) == 2 * 58 for view in views)
    made.loss(views, None, draws, 0.5).backward()
    assert made.model.module.unk_embed.grad.abs().max() > 0


def test_evaluation_repeats_and_needs_no_teacher() -> None:
    made, data = learner(f"mst:{TINY}"), load_data("photos", size=32)
    first, second = (made.objective.evaluate(made.model, None, data, torch.device("cpu")) for _ in range(2))
    assert first == second
    assert 0.3 < first[0] < 3
    unlabelled = dataclasses.replace(data, labelled=False)
    error, accuracy = made.objective.evaluate(made.model, None, unlabelled, torch.device("cpu"))
    assert error == first[0]
    assert math.isnan(accuracy)
    without = learner(f"mst:{TINY},lambda_2=0")
    assert math.isnan(without.objective.evaluate(without.model, None, data, torch.device("cpu"))[0])
