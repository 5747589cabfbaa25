"""MP3 and DropPos on the command line: options that cannot be met, recipes, defences beside them, unlabelled data."""

from __future__ import annotations

import pytest

from fedmjp import probe as probe_command
from fedmjp import simulate as simulate_command
from fedmjp import train as train_command
from fedmjp.training.config import default_config
from tests.conftest import photographs

SMALL = ["--data", "photos", "--train-limit", "16", "--model", "vit_micro_32", "--batch-size", "8"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--objective", "mp3:eta=1"], "eta of objective 'mp3' must lie in [0, 1): at 1.0 no patch is context"),
        (["--objective", "mp3:eta=-0.1"], "must lie in [0, 1)"),
        (["--objective", "mp3", "--model", "resnet50"], "--objective mp3 needs a plain ViT, not resnet50"),
        (["--objective", "mp3", "--model", "vit_micro_32_mjp"], "pass --model vit_micro_32, not vit_micro_32_mjp"),
        (["--objective", "mp3", "--defense", "mjp"], "mp3 has no position embedding to hide, and the defence moves"),
        (["--objective", "mp3", "--defense", "frozen_positions"], "hides positions only"),
        (["--objective", "mp3", "--mixup", "0.8"], "has no labels to mix or smooth; pass --mixup 0"),
        (["--objective", "droppos:gamma=1"], "gamma of objective 'droppos' must lie in [0, 1)"),
        (["--objective", "droppos:gamma=0.99"], "leaves none of the 64 patches"),
        (["--objective", "droppos:gamma_pos=0"], "must lie in (0, 1]"),
        (["--objective", "droppos:gamma=0.98,gamma_pos=1.5"], "must lie in (0, 1]"),
        (["--objective", "droppos:tau=0"], "tau must be above 0"),
        (["--objective", "droppos:decoder_width=40"], "must be a multiple of 32"),
        (["--objective", "droppos", "--defense", "spp"], "predicts where patches stand, and the defence moves them"),
        (["--objective", "droppos", "--defense", "frozen_positions"], "sends no position embedding"),
        (["--objective", "droppos:gama=0.5"], "did you mean 'gamma'"),
    ],
)
def test_errors_are_one_line(options, words: str, tmp_path, capsys) -> None:
    assert train_command.main([*SMALL, *options, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0


def test_the_papers_recipes() -> None:
    assert (default_config("mp3").recipe.batch_size, default_config("mp3").recipe.repeats) == (256, 1)
    recipe = default_config("droppos").recipe
    assert (recipe.epochs, recipe.batch_size, recipe.learning_rate) == (200, 4096, 3e-4)  # 1.5e-4 a batch of 256
    for entry in ("mp3", "droppos"):
        default_config(entry).validate()


def test_noise_composes(tmp_path) -> None:
    options = ["--objective", "mp3", "--defense", "noise", "--epochs", "2", "--warmup-epochs", "1", "--threads", "1"]
    assert train_command.main([*SMALL, *options, "--out", str(tmp_path / "out")]) == 0


def test_pictures_without_labels(tmp_path, capsys) -> None:
    """A folder without class folders trains objectives that need no labels, and is refused by the others."""
    from PIL import Image

    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number, image in enumerate(photographs(32, 20)):
        pixels = image.mul(255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(pictures / f"{number}.png")
    own = ["--data", f"folder:{pictures}", "--model", "vit_micro_32", "--batch-size", "8", "--threads", "1"]
    own += ["--epochs", "2", "--warmup-epochs", "1", "--out", str(tmp_path / "out")]
    assert train_command.main([*own, "--objective", "mp3"]) == 0
    assert "no labels; split with seed 0" in (tmp_path / "out" / "model.md").read_text()
    capsys.readouterr()
    federated = ["--data", f"folder:{pictures}", "--model", "vit_micro_32", "--weights", "random", "--clients", "2"]
    checkpoint = ["--checkpoint", str(tmp_path / "out" / "model.safetensors"), "--data", f"folder:{pictures}"]
    for command, options, reader in (
        (train_command, [*own, "--resume"], "--objective supervised"),
        (simulate_command, [*federated, "--out", str(tmp_path / "run")], "--objective supervised"),
        (probe_command, checkpoint, "fedmjp.probe"),
    ):
        assert command.main(options) == 2
        printed = capsys.readouterr().err.strip()
        assert f"has no labels, which {reader} needs; lay the files out as CLASS/FILE" in printed
        assert printed.count("\n") == 0
