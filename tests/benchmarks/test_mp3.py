"""benchmarks/mp3.py: its measures against slow oracles, its tables, claims and steps, and one tiny run of it all."""

from __future__ import annotations

import math

import mp3 as mp3_command
import numpy as np
import pandas as pd
import pytest
import torch
from experiments.mp3.claims import CLAIMS, Claim, Seed, claim_table
from experiments.mp3.measures import (
    CORRELATIONS,
    NEIGHBOURS,
    block_tokens,
    correlation_numbers,
    head_distances,
    layer_neighbours,
    position_correlation,
    relative_maps,
    uniform_distance,
)
from experiments.mp3.options import DEFAULT, LINES, SCRATCH, MP3Options
from experiments.mp3.reassembly import mixed, reassemble, reassembled, shuffled_together, to_images, to_patches
from experiments.mp3.render import line_table, paper_accuracies, place_table
from experiments.mp3.rows import ROWS, Training
from experiments.rendering import read_rows

from fedmjp.config import DataConfig, ModelConfig
from fedmjp.data import load_data
from fedmjp.defenses import Defense
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.attention import every_attention, last_attention
from fedmjp.objectives import Learner, read_objective

CPU = torch.device("cpu")
GRID = (2, 3)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model() -> BuiltModel:
    """With weights five times as large, so that layers differ and attention is far from uniform."""
    built = build_model("vit_micro8_32", num_classes=8, weights="random")
    with torch.no_grad():
        for parameter in built.module.blocks.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return built


@pytest.fixture(scope="module")
def encoder() -> BuiltModel:
    config = ModelConfig("vit_micro8_32", "random")
    objective = read_objective("mp3")
    return Learner.build(objective, Defense(), config, num_classes=8, seed=0, device=CPU).model


def test_neighbours_by_layer_against_one_image_at_a_time(model) -> None:
    data = load_data("photos", size=32)
    train, test = data.train.subset(range(30)), data.test.subset(range(12))

    def layers_of(images) -> list[np.ndarray]:
        found = []
        for index in range(len(images)):
            tokens = model.module._pos_embed(model.module.patch_embed(model.normalise(images.images([index]))))
            means = []
            for block in model.module.blocks:
                tokens = block(tokens)
                means.append(tokens[0, 1:].mean(dim=0).detach().double().numpy())
            found.append(means)
        return [np.array(layer) for layer in zip(*found, strict=True)]

    with torch.no_grad():
        known, asked = layers_of(train), layers_of(test)
    found = layer_neighbours(model, train, test, CPU)
    for own, others, right in zip(known, asked, found, strict=True):
        for index, feature in enumerate(others):
            cosines = own @ feature / (np.linalg.norm(own, axis=1) * np.linalg.norm(feature))
            votes = np.zeros(8)
            for place in np.argsort(-cosines)[:NEIGHBOURS]:
                votes[train.labels[place]] += math.exp(cosines[place] / 0.07)
            assert bool(right[index]) == (votes.argmax() == int(test.labels[index]))
    assert 0 < float(found.double().mean()) < 1


def test_correlation_of_positions_against_numpy() -> None:
    tokens = torch.randn(4, 6, 5, generator=drawn())
    within, across = position_correlation(tokens)
    rows = tokens.numpy()
    for i in range(6):
        for j in range(6):
            own = np.mean([np.corrcoef(image[i], image[j])[0, 1] for image in rows])
            other = np.mean([np.corrcoef(rows[n][i], rows[(n + 1) % 4][j])[0, 1] for n in range(4)])
            assert float(within[i, j]) == pytest.approx(own)
            assert float(across[i, j]) == pytest.approx(other)
    numbers = correlation_numbers(within, across)
    apart = [float(within[i, j]) for i in range(6) for j in range(6) if i != j]
    assert numbers["same_image"] == pytest.approx(np.mean(apart))
    assert numbers["two_images_same_place"] == pytest.approx(float(across.diagonal().mean()))


def test_relative_maps_and_distances_of_heads_against_loops() -> None:
    attention = torch.rand(2, 2, 7, 7, generator=drawn()).softmax(dim=-1)
    places = [(row, column) for row in range(GRID[0]) for column in range(GRID[1])]
    sums, counts = np.zeros((2, 3, 5)), np.zeros((3, 5))
    for query, (y, x) in enumerate(places):
        for key, (other_y, other_x) in enumerate(places):
            offset = other_y - y + 1, other_x - x + 2
            counts[offset] += 1
            for head in range(2):
                among = attention[:, head, 1 + query, 1:]
                sums[(head, *offset)] += float((among[:, key] / among.sum(dim=-1)).mean())
    np.testing.assert_allclose(relative_maps(attention, 1, GRID).numpy(), sums / counts, rtol=1e-6)


def test_heads_that_attend_nowhere_else_and_everywhere(model) -> None:
    data = load_data("photos", size=32, test_limit=4).test
    found = head_distances(model, data, CPU)
    attention = every_attention(model, data.images(range(4)))
    assert found.shape == (3, 2)
    torch.testing.assert_close(attention[-1], last_attention(model, data.images(range(4))))
    places = [(row / 4, column / 4) for row in range(4) for column in range(4)]
    apart = np.array([[math.dist(a, b) for b in places] for a in places])
    shares = attention[1, :, 1, 1:, 1:].double()
    expected = ((shares / shares.sum(dim=-1, keepdim=True)).numpy() * apart).sum(axis=-1).mean()
    assert float(found[1, 1]) == pytest.approx(expected)
    assert uniform_distance((4, 4)) == pytest.approx(apart.mean())
    with pytest.raises(Exception, match="no plain ViT"):
        every_attention(build_model("swin_micro_32", num_classes=8, weights="random"), data.images(range(1)))


def test_tokens_are_those_of_the_blocks(encoder) -> None:
    data = load_data("photos", size=32, test_limit=3).test
    (tokens,) = block_tokens(encoder, data, CPU)
    assert tokens.shape == (3, 3, 16, 64)
    with torch.no_grad():
        last = encoder.module.forward_features(encoder.normalise(data.images(range(3))))
    torch.testing.assert_close(encoder.module.norm(tokens[-1]), last)


def test_reassembly_against_loops() -> None:
    patches = torch.rand(2, 6, 3, 2, 2, generator=drawn())
    places = torch.tensor([[0, 1, 2, 3, 4, 5], [5, 5, 0, 2, 2, 2]])
    found = reassemble(patches, places)
    for image in range(2):
        for place in range(6):
            there = [patches[image, n] for n in range(6) if places[image, n] == place]
            expected = torch.stack(there).mean(dim=0) if there else torch.full((3, 2, 2), 0.5)
            torch.testing.assert_close(found[image, place], expected)


def test_patches_and_images_are_inverse_and_in_raster_order() -> None:
    images = torch.rand(2, 3, 4, 6, generator=drawn())
    patches = to_patches(images, 2)
    assert torch.equal(patches[1, 4], images[1, :, 2:4, 2:4])
    assert torch.equal(to_images(patches, GRID), images)


def test_two_images_are_divided_without_loss(encoder) -> None:
    pair = torch.rand(2, 3, 32, 32, generator=drawn())
    sets = shuffled_together(pair, 8, drawn(1))
    before, after = (part.flatten(0, 1).flatten(1) for part in (to_patches(pair, 8), sets))
    assert sorted(before.tolist()) == sorted(after.tolist())
    assert not torch.equal(before, after)
    assert mixed(encoder, 0.5, pair, drawn(2)).shape == pair.shape


def test_places_do_not_depend_on_the_order_of_the_patches(encoder) -> None:
    """With every patch as context: shuffled images are put together to the same picture."""
    images = torch.rand(2, 3, 32, 32, generator=drawn())
    order = torch.randperm(16, generator=drawn(3))
    shuffled = to_images(to_patches(images, 8)[:, order], (4, 4))
    torch.testing.assert_close(reassembled(encoder, 0.0, images, drawn()), reassembled(encoder, 0.0, shuffled, drawn()))


def test_the_papers_differences_are_those_of_its_table() -> None:
    paper = paper_accuracies()["cifar100"]
    assert paper.notna().all()
    printed = [claim for claim in CLAIMS if claim.printed]
    assert len(printed) == 4
    for claim in printed:
        line, other = claim.needs
        assert claim.paper == pytest.approx(paper[line] - paper[other])


STRUCTURE = [{"measure": "neighbours", "layer": layer, "value": 30.0} for layer in (1, 2)]
STRUCTURE += [{"measure": "distance", "layer": layer, "head": 1, "value": 0.5} for layer in (1, 2)]
STRUCTURE += [{"measure": name, "value": 0.1} for name in CORRELATIONS]


def synthetic(accuracies: dict[str, list[float]]) -> pd.DataFrame:
    """Rows of trainings with labels, one an accuracy and seed, and of the encoders that they start from."""
    rows = []
    for name, values in accuracies.items():
        for seed, value in enumerate(values):
            line = LINES[name]
            encoder = f"e{line.eta}{line.pretraining}{seed}" if line.pretrained else ""
            shared = dict.fromkeys(ROWS.keys) | {"seed": seed, "network": "trained", "patches": 16, "eta": line.eta}
            shared |= {"model": "m", "recipe": {"epochs": 10}, "images_seen": 100, "pretraining_epochs": 30}
            bounds = {"value_low": value - 2, "value_high": value + 2}
            own = {"training": f"{name}{seed}", "line": name, "encoder": encoder, "measure": "accuracy", "value": value}
            rows.append(shared | own | bounds)
            rows += [shared | own | part for part in STRUCTURE if part["measure"] == "distance"]
            before = {"training": encoder, "line": "", "encoder": ""}
            if encoder and not any(row["training"] == encoder for row in rows):
                rows.append(shared | before | {"measure": "accuracy", "value": 25.0})
                places = [{"measure": "places", "eta_test": eta, "value": 30 - 10 * eta} for eta in (0, 0.9)]
                rows += [shared | before | part for part in (*places, *STRUCTURE)]
                rows += [shared | before | part | {"network": "start"} for part in STRUCTURE]
    return pd.DataFrame(rows, columns=list(ROWS.keys))


def test_tables_pair_seeds_and_judge_signs() -> None:
    found = {SCRATCH: [40, 41, 42], DEFAULT: [47, 48.5, 49], "mp3_none": [45, 44, 43.5], "eta_0": [46, 47, 48]}
    rows = synthetic(found)
    table = line_table(rows).set_index("line")
    assert table.loc[DEFAULT, "difference_mean"] == pytest.approx(21.5 / 3)
    assert table.loc[DEFAULT, "paper_difference"] == pytest.approx(10.6)
    assert table.loc[DEFAULT, "verdict"] == "agrees"
    assert pd.isna(table.loc["mp3_none", "difference_mean"])  # its line from scratch was not run
    assert table.loc[DEFAULT, "place_accuracy"] == 25
    claims = claim_table(rows).set_index("claim")
    verdicts = claims["verdict"].to_dict()
    assert verdicts["MP3 without positions beats absolute ones from scratch"] == "cannot tell"
    assert verdicts["after MP3, no positions are worse than absolute"] == "cannot tell"
    assert verdicts["trained at η = 0, fewer places are found at 0.9 than at 0"] == "agrees"
    assert "η = 0.9 is worse than 0.5" not in verdicts
    assert place_table(rows)["line"].unique().tolist() == [DEFAULT, "eta_0"]


def test_an_opposite_sign_contradicts() -> None:
    rows = synthetic({SCRATCH: [47, 48, 49], DEFAULT: [40, 41.5, 42]})
    table = line_table(rows).set_index("line")
    assert table.loc[DEFAULT, "verdict"] == "contradicts"


def test_trainings_are_named_by_what_decides_about_them(tmp_path) -> None:
    options = MP3Options(data=DataConfig("photos"))
    names = set()
    for line in LINES.values():
        encoder = Training(options.pretraining(line, 0)) if line.pretrained else None
        here, there = (Training(options.supervised(line, 0, start), encoder) for start in (None, None))
        assert here.name == there.name
        names.add(here.name)
    assert len(names) == len(LINES)
    moved = Training(options.supervised(LINES[DEFAULT], 0), Training(options.pretraining(LINES[DEFAULT], 0)))
    assert moved.name in names


def test_claims_that_need_weights_are_about_blocks() -> None:
    values = {"neighbours": [30.0, 33.0, 31.0], "distance": [0.3, 0.5, 0.4, 0.6, 0.5, 0.5]}
    rows = []
    for line, training, shift in (("", "e", 0.0), (DEFAULT, "t", 0.02), (SCRATCH, "s", 0.1)):
        for measure, numbers in values.items():
            for index, value in enumerate(numbers):
                layer, head = (index + 1, None) if measure == "neighbours" else (index // 2 + 1, index % 2 + 1)
                own = {"line": line, "training": training, "encoder": "e" if line == DEFAULT else "", "layer": layer}
                rows.append(own | {"head": head, "measure": measure, "value": value + shift, "network": "trained"})
    seed = Seed(pd.DataFrame(rows))
    by_words: dict[str, Claim] = {claim.words: claim for claim in CLAIMS}
    assert by_words["the best block is not the last"].difference(seed) == pytest.approx(2.0)
    local = by_words["a block's most local head is more local after MP3 than from scratch"]
    assert local.difference(seed) == pytest.approx(-0.1)
    changed = by_words["fine-tuning changes the heads of the last block more than those of the first"]
    assert changed.difference(seed) == pytest.approx(0.0, abs=1e-12)


SMALL = ["--data", "photos", "--train-limit", "32", "--test-limit", "8", "--epochs", "1", "--batch-size", "16"]
SMALL += ["--pretraining-epochs", "1", "--references", "30"]


def test_rows_resume_and_figures(tmp_path, capsys) -> None:
    out = [*SMALL, "--out", str(tmp_path / "out"), "--weights", str(tmp_path / "weights")]
    timing = ["--timing-model", "vit_micro8_32", "--timing-batch", "2", "--timing-repeats", "1"]
    assert mp3_command.main([*out, *timing, "--lines", SCRATCH, DEFAULT]) == 0
    before = read_rows(tmp_path / "out", ROWS)
    assert before["training"].nunique() == 3
    assert mp3_command.main([*out, "--timing-repeats", "0", "--lines", SCRATCH, DEFAULT, "mp3_none", "--resume"]) == 0
    rows = read_rows(tmp_path / "out", ROWS)
    pd.testing.assert_frame_equal(rows[: len(before)], before)
    assert rows["training"].nunique() == 4  # the encoder was not trained again
    assert set(rows[rows["line"] == "mp3_none"]["encoder"]) == set(rows[rows["line"] == DEFAULT]["encoder"])
    assert set(rows[rows["measure"] == "places"]["eta_test"]) == {0, 0.25, 0.5, 0.75, 0.9}
    steps = pd.read_csv(tmp_path / "out" / "steps.csv")
    assert steps["ratio_median"].iloc[0] == 1
    assert steps["paper_ratio"].round(2).tolist() == [1, 0.78, 0.76, 0.69, 0.66]
    drawn_files = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert drawn_files == {f"{name}.png" for name in ("curves", "reassembled", "mixed", "correlation", "attention")}
    assert "mp3:eta=0.5, seed 0:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lines", "eta_2"], "--lines takes names from"),
        (["--seeds", "1", "1"], "--seeds takes different numbers"),
        (["--timing-batch", "3"], "--timing-batch takes even numbers"),
        (["--model", "resnet50"], "needs a plain ViT"),
    ],
)
def test_errors_are_one_line(options, words: str, tmp_path, capsys) -> None:
    assert mp3_command.main([*SMALL, *options, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0
