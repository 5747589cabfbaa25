"""Models of speech: the paper's size, fixed sinusoids, MP3 with places given, what an update says of the frames."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from experiments.speech.leak import attacked, observed, speech_model

from attacks import UsageError
from attacks.tokenizer import check_tokenizer, find_tokenizer
from fedmjp import simulate as simulate_command
from fedmjp import train as train_command
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.data.frames import COEFFICIENTS, FRAMES, RATE
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.models import build_model
from fedmjp.models.vit import fixed_positions
from fedmjp.objectives import TrainingBatch
from fedmjp.objectives.mp3 import MP3
from fedmjp.objectives.places import random_subsets
from fedmjp.training import TrainConfig
from fedmjp.training.batches import Batches
from fedmjp.training.config import UNAUGMENTED
from fedmjp.training.trainer import Trainer
from tests.objectives import oracle
from tests.objectives.test_position_prediction import draw, pictures, small

soundfile = pytest.importorskip("soundfile", reason="the extra speech is not installed")
pytest.importorskip("librosa", reason="the extra speech is not installed")

WORDS = dataclasses.replace(UNAUGMENTED, epochs=8, batch_size=8, learning_rate=0.2, warmup_epochs=1)


@pytest.fixture(scope="module")
def tones(tmp_path_factory):
    """Two words: tones that rise from a low pitch and from a high one."""
    root, rng = tmp_path_factory.mktemp("tones"), np.random.default_rng(0)
    for word, pitch in (("low", 400), ("high", 1600)):
        (root / word).mkdir()
        for number in range(20):
            hertz = pitch + np.linspace(0, 200, RATE) + rng.uniform(-100, 100)
            sound = 0.3 * np.sin(2 * np.pi * np.cumsum(hertz) / RATE) + 0.01 * rng.standard_normal(RATE)
            soundfile.write(root / word / f"{number}.wav", sound, RATE)
    return root


def test_the_model_has_the_papers_size() -> None:
    built = build_model("speech_mini", num_classes=12, weights="random")
    assert sum(p.numel() for p in built.module.parameters()) == pytest.approx(70_000, rel=0.01)
    assert built.grid == (1, FRAMES)
    assert "pos_embed" not in dict(built.module.named_parameters())
    assert "pos_embed" not in built.module.state_dict()
    assert not built.module.pos_embed[0, 0].any()  # the class token has no place


def test_positions_are_the_sinusoids_of_vaswani() -> None:
    table = fixed_positions((1, 7), 12)
    for place in range(7):
        for k in range(6):
            angle = place / 10_000 ** (2 * k / 12)
            assert float(table[place, 2 * k]) == pytest.approx(math.sin(angle), abs=1e-6)
            assert float(table[place, 2 * k + 1]) == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("grid", [(2, 4), (1, 6)])
def test_mp3_with_places_given_against_the_oracle(grid) -> None:
    """The table is added where places are given, and the loss is of the others."""
    objective = MP3(eta=0.25, given=0.4)
    model = small(objective, grid, pos_embed="none")
    images, total = pictures(grid), grid[0] * grid[1]
    found = objective.loss(model, TrainingBatch((ClientInput(images),), None, draw()), None)
    generator = draw()
    context = random_subsets(3, total, math.ceil(0.75 * total), generator, images.device)
    asked = random_subsets(3, total, math.floor(0.6 * total + 1e-9), generator, images.device)
    table, losses = fixed_positions(grid, model.module.embed_dim).double().numpy(), []
    for image, keys, places in zip(model.normalise(images), context.tolist(), asked.tolist(), strict=True):
        tokens = oracle.patches_of(model.module, image)
        tokens = [t if i in places else t + table[i] for i, t in enumerate(tokens)]
        hidden = oracle.encode(model.module, tokens, keys)
        for place in places:
            losses.append(-math.log(oracle.softmax(oracle.linear(model.module.pretext, hidden[place]))[place]))
    assert len(losses) == 3 * math.floor(0.6 * total + 1e-9)
    assert float(found.detach()) == pytest.approx(np.mean(losses), rel=1e-6)


def test_a_share_of_places_out_of_range_is_refused() -> None:
    with pytest.raises(UsageError, match="given of objective 'mp3' must lie in"):
        MP3(given=1.0).validate()


def test_words_are_shifted_whole_frames_in_training(tones) -> None:
    config = TrainConfig(model=ModelConfig("speech_mini", "random"), data=DataConfig(f"speech:{tones}"), recipe=WORDS)
    trainer = Trainer(config)
    words = trainer.data.train.images(range(len(trainer.data.train)))
    shifts = set()
    batches = Batches(trainer.data.train, dataclasses.replace(WORDS, batch_size=32), trainer.model, seed=0)
    for frames, _ in batches.epoch(1, torch.device("cpu")):
        for one in frames:
            for shift in range(-10, 11):
                moved = words[..., 20 - shift : 80 - shift]
                if any(torch.equal(moved[k], one[..., 20:80]) for k in range(len(words))):
                    shifts.add(shift)
                    break
            else:
                pytest.fail("no shift of a word")
    assert len(shifts) > 5


@pytest.mark.long
def test_words_are_learned(tones) -> None:
    config = TrainConfig(
        model=ModelConfig("speech_mini", "random"),
        data=DataConfig(f"speech:{tones}", test_limit=None),
        recipe=WORDS,
        precision="float32",
    )
    trainer = Trainer(config)
    found = [trainer.epoch(number, lambda loss: None) for number in range(1, WORDS.epochs + 1)]
    assert found[-1]["test_accuracy"] == 1


def test_mjp_jigsaws_frames() -> None:
    built = build_model("speech_mini_mjp", num_classes=3, weights="random", dal="none")
    words = torch.rand(2, COEFFICIENTS, 1, FRAMES)
    seen = DEFENSES.get("mjp")(gamma=0.5, dal="none").on_input(words, built, torch.Generator().manual_seed(0), 1)
    assert seen.position_mask.sum(dim=1).tolist() == [50, 50]
    assert torch.equal(seen.images.sort(dim=-1).values, words.sort(dim=-1).values)
    logits = built.module(built.normalise(seen.images), **seen.forward_kwargs())
    assert logits.shape == (2, 3)


def test_an_update_with_learned_positions_gives_the_frames_away() -> None:
    """D = 128 equations for 100 frames: the closed form is exact. The paper's fixed positions send no gradient."""
    generator = torch.Generator().manual_seed(0)
    frames = (0.5 + 0.05 * torch.randn(1, COEFFICIENTS, 1, FRAMES, generator=generator)).clamp(0, 1)
    label = torch.tensor([1])
    learned = speech_model(128, "learned", 3, seed=0)
    tokenizer = find_tokenizer(learned, (COEFFICIENTS, 1, FRAMES))
    assert (tokenizer.grid, tokenizer.patch_size, tokenizer.patch_dim) == ((1, FRAMES), 1, COEFFICIENTS)
    assert check_tokenizer(learned, tokenizer, (COEFFICIENTS, 1, FRAMES)) < 1e-4
    found = attacked(learned, frames, label)
    assert found["explained"] > 99.99
    assert found["diagnosis"] == ""
    fixed = attacked(speech_model(128, "fixed", 3, seed=0), frames, label)
    assert fixed["explained"] is None
    assert "no learnable position embedding" in fixed["diagnosis"]


def test_the_papers_width_leaves_no_direction_to_the_span_attack() -> None:
    """With D = 32 channels and 101 tokens the attention's inputs fill the space, and so do dL/dE's rows."""
    model = speech_model(32, "fixed", 3, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.double()
    frames = torch.rand(1, COEFFICIENTS, 1, FRAMES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    update = observed(model, frames, torch.tensor([0])).gradients
    inputs = torch.cat([update["blocks.0.attn.qkv.weight"], update["blocks.0.attn.qkv.bias"][:, None]], dim=1)
    assert int(torch.linalg.matrix_rank(inputs)) >= 32
    assert int(torch.linalg.matrix_rank(update["patch_embed.proj.weight"].flatten(1))) >= 31


OPTIONS = ["--rand-augment", "none", "--smallest-crop", "1", "--mixup", "0", "--cutmix", "0", "--erasing", "0"]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        (train_command, ["--model", "speech_mini", *OPTIONS], "--model speech_mini needs spoken words, and data set"),
        (train_command, ["--data", "spoken"], "--objective supervised needs images with a class each"),
        (
            train_command,
            ["--model", "speech_mini", "--data", "spoken", *OPTIONS, "--mixup", "0.8"],
            "hears words, which are shifted in time only; pass --mixup 0",
        ),
        (
            train_command,
            ["--model", "speech_mini", "--data", "mosaics", "--objective", "segmentation"],
            "--objective segmentation needs a model of images, not speech_mini",
        ),
        (train_command, ["--model", "speech_mini", "--data", "speech:", *OPTIONS], "write speech:PATH"),
        (simulate_command, ["--model", "speech_mini", "--data", "spoken"], "has no federation here"),
        (simulate_command, ["--data", "spoken"], "a federation needs images with a class each"),
    ],
)
def test_mistakes_are_one_line(command, options, words, tmp_path, capsys) -> None:
    assert command.main([*options, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert "\n" not in printed
