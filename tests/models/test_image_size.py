"""Models for images of another size than their own: the position embedding, checkpoints of both sizes, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed

from attacks import UsageError
from fedmjp import simulate
from fedmjp.config import DataConfig
from fedmjp.defenses import Defense
from fedmjp.model_options import ModelConfig
from fedmjp.models import build_model, resize_model
from fedmjp.objectives import Learner
from fedmjp.objectives.supervised import Supervised
from fedmjp.records.rows import load_rows
from fedmjp.training.config import UNAUGMENTED, TrainConfig
from fedmjp.training.run import train

TINY = {"num_classes": 5, "seed": 1}


TABLES = {"pos_embed": 1, "idx_embed": 0}  # with so many prefix tokens


@pytest.mark.parametrize("name", ["vit_micro_32", "vit_micro_32_mjp", "vit_micro_32_idx", "vit_micro_32_nope"])
def test_only_the_position_embedding_changes(name: str) -> None:
    own = build_model(name, weights="random", **TINY)
    other = build_model(name, weights="random", image_size=48, **TINY)
    assert (other.image_size, other.grid) == (48, (12, 12))
    theirs = dict(own.module.named_parameters())
    for key, value in other.module.named_parameters():
        if key in TABLES:
            assert torch.equal(value, resample_abs_pos_embed(theirs[key], [12, 12], num_prefix_tokens=TABLES[key]))
        else:
            assert torch.equal(value, theirs[key]), key
    assert other.module(torch.rand(2, 3, 48, 48)).shape == (2, 5)
    assert "resized to 48 px" in other.provenance


def test_a_checkpoint_of_either_size_is_loaded(tmp_path) -> None:
    """Weights of the model's own size are resampled, those of the asked size taken as they are."""
    for size in (None, 48):
        built = build_model("vit_micro_32", weights="random", image_size=size, **TINY)
        save_file(built.module.state_dict(), tmp_path / f"{size}.safetensors")
    wanted = load_file(tmp_path / "48.safetensors")
    for size in (None, 48):
        path = str(tmp_path / f"{size}.safetensors")
        found = build_model("vit_micro_32", weights=path, image_size=48, num_classes=5, seed=2).module.state_dict()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    with pytest.raises(UsageError, match="pass the --image-size that it was trained at"):
        build_model("vit_micro_32", weights=str(tmp_path / "48.safetensors"), num_classes=5)


@pytest.mark.parametrize("size", [None, 48])
def test_an_encoder_of_either_size_is_fine_tuned_with_its_positions(tmp_path, size: int | None) -> None:
    start = build_model("vit_micro_32", weights="random", image_size=size, **TINY)
    save_file(start.module.state_dict(), tmp_path / "start.safetensors")
    wanted = start.module.pos_embed if size else resize_model(start, 48).module.pos_embed
    model, cpu = ModelConfig("vit_micro_32", "random", image_size=48), torch.device("cpu")
    encoder = tmp_path / "start.safetensors"
    found = Learner.build(Supervised(), Defense(), model, num_classes=7, seed=2, device=cpu, encoder=encoder)
    assert torch.equal(found.model.module.pos_embed, wanted)
    assert found.model.image_size == 48
    assert "positions new" not in found.model.provenance


@pytest.mark.parametrize("name", ["vit_micro_32_rel", "swin_micro_32", "speech_mini"])
def test_models_with_more_than_a_position_embedding_are_refused(name: str) -> None:
    size = build_model(name, weights="random", num_classes=5).image_size
    with pytest.raises(UsageError, match="only a plain ViT with a learned position embedding, or none"):
        build_model(name, weights="random", num_classes=5, image_size=2 * size)


def test_heads_with_a_place_a_patch_are_refused() -> None:
    config = ModelConfig("vit_micro_32", "random", image_size=48)
    data = DataConfig("photos", train_limit=8, test_limit=4)
    recipe = dataclasses.replace(UNAUGMENTED, batch_size=8, label_smoothing=0)
    with pytest.raises(UsageError, match="only a plain ViT"):
        train(TrainConfig(objective="mp3", model=config, data=data, recipe=recipe), Console(quiet=True))


@pytest.mark.parametrize("size", [0, -4, 30])
def test_a_size_that_is_no_multiple_of_the_patches_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"--image-size {size} must be a multiple of 4"):
        ModelConfig("vit_micro_32", "random", image_size=size).side()
    with pytest.raises(UsageError, match="must be a multiple of 4"):
        TrainConfig(model=ModelConfig("vit_micro_32", "random", image_size=size)).validate()


def test_a_training_at_another_size_goes_on_from_its_own_weights(tmp_path) -> None:
    recipe = dataclasses.replace(UNAUGMENTED, epochs=1, batch_size=8, warmup_epochs=0, label_smoothing=0)
    config = TrainConfig(
        model=ModelConfig("vit_micro_32", "random", image_size=48),
        data=DataConfig("photos", train_limit=16, test_limit=8),
        recipe=recipe,
        threads=1,
        out=tmp_path / "first",
    )
    weights = train(config, Console(quiet=True))
    assert load_file(weights)["pos_embed"].shape == (1, 145, 64)
    again = dataclasses.replace(config.model, weights=str(weights))
    train(dataclasses.replace(config, model=again, out=tmp_path / "second"), Console(quiet=True))


def test_a_federation_at_another_size_is_audited_at_it(tmp_path) -> None:
    options = ["--model", "vit_micro_32", "--weights", "random", "--image-size", "24", "--clients", "2"]
    more = ["--defense", "none", "--rounds", "1", "--attacks", "patch_embedding", "--budget", "0s"]
    assert simulate.main([*options, *more, "--out", str(tmp_path / "run")]) == 0
    rows = load_rows(tmp_path / "run" / "rows.jsonl")
    assert (rows[rows["attack"] == "patch_embedding"]["psnr"] > 60).all()
    assert rows["weights"].str.contains("resized to 24 px").all()
