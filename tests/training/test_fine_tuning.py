"""--from: what a fine-tuned model takes from a pre-trained one, in central training and in a federation, layer decay,
drop path, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attacks import UsageError
from fedmjp import simulate
from fedmjp import train as train_command
from fedmjp.before_start import check_before_start
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, EncoderConfig, ModelConfig, RunConfig, from_flat
from fedmjp.models import build_model
from fedmjp.objectives import read_objective
from fedmjp.objectives.learner import restore
from fedmjp.objectives.places import sincos_table
from fedmjp.training import Recipe, TrainConfig, train
from fedmjp.training.config import StartConfig
from fedmjp.training.folder import TrainingFolder
from fedmjp.training.trainer import Trainer
from tests.training.test_train import QUIET

DATA = DataConfig(data="photos", train_limit=16, test_limit=8)
RECIPE = Recipe(
    epochs=1, batch_size=8, warmup_epochs=0, mixup=0, cutmix=0, label_smoothing=0, erasing=0, rand_augment="none"
)
ENTRIES = {"mp3": "mp3:eta=0.5", "droppos": "droppos:decoder_width=32", "supervised": "supervised"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each objective after one epoch of two steps."""
    found = {}
    for name, entry in ENTRIES.items():
        out = tmp_path_factory.mktemp(name) / "out"
        config = TrainConfig(
            objective=entry, model=ModelConfig("vit_micro_32", "random"), data=DATA, recipe=RECIPE, out=out
        )
        found[name] = train(config, QUIET)
    return found


def config(checkpoint: Path, model: str = "vit_micro_32", out: Path = Path("unused"), **start) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(model, "random"),
        data=DATA,
        recipe=RECIPE,
        start=StartConfig(checkpoint, **start),
        out=out,
        seed=3,
    )


@pytest.mark.parametrize(
    ("name", "model", "new"),
    [
        ("mp3", "vit_micro_32", "class token, positions, head new"),
        ("mp3", "vit_micro_32_nope", "class token, head new"),
        ("mp3", "vit_micro_32_rel", "class token, relative positions, head new"),
        ("droppos", "vit_micro_32", "positions, head new"),
        ("supervised", "vit_micro_32", "(head new)"),
    ],
)
def test_the_encoder_is_kept_and_the_rest_is_new(trained, name: str, model: str, new: str) -> None:
    trainer = Trainer(config(trained[name], model))
    module, state = trainer.model.module, load_file(trained[name])
    assert new in trainer.model.provenance
    assert f"pre-trained by {ENTRIES[name]}" in trainer.model.provenance
    for part in ("patch_embed.proj.weight", "blocks.2.attn.qkv.weight", "norm.weight"):
        assert torch.equal(dict(module.named_parameters())[part], state[part].float())
    fresh = build_model(model, num_classes=8, weights="random", seed=3).module
    assert torch.equal(module.head.weight, fresh.head.weight) == (name != "supervised")  # see the test of its seed
    assert not hasattr(module, "pretext")
    if name == "mp3":
        assert torch.equal(module.cls_token, fresh.cls_token)
        assert model != "vit_micro_32" or torch.equal(module.pos_embed, fresh.pos_embed)
    if name == "droppos":
        assert torch.equal(module.pos_embed, sincos_table((8, 8), 64, 1))
        assert module.pos_embed.requires_grad
        assert torch.equal(module.cls_token, state["cls_token"].float())
    if name == "supervised":
        assert torch.equal(module.pos_embed, state["pos_embed"].float())


def test_a_fine_tuning_runs_resumes_and_is_written_down(trained, tmp_path) -> None:
    options = config(trained["mp3"], out=tmp_path / "out", layer_decay=0.5, drop_path=0.2)
    train(options, QUIET)
    described = json.loads((tmp_path / "out" / "run.json").read_text())["config"]["start"]
    assert described == {"checkpoint": str(trained["mp3"]), "layer_decay": 0.5, "drop_path": 0.2}
    card = (tmp_path / "out" / "model.md").read_text()
    assert "From the encoder of model.safetensors" in card
    assert "encoder of model.safetensors pre-trained by mp3:eta=0.5 (class token, positions, head new)" in card
    assert "layer decay 0.5, drop path 0.2" in card
    longer = replace(options, recipe=replace(RECIPE, epochs=2), out=tmp_path / "longer")
    train(longer, QUIET)
    assert len(TrainingFolder(replace(longer, resume=True)).load()[1]) == 2


def test_a_head_that_the_encoder_was_trained_with_is_drawn_from_another_seed(trained) -> None:
    """A training from the same seed fitted the encoder to the head that the seed draws."""
    starts = {name: replace(config(trained[name]), seed=0) for name in ("supervised", "droppos")}
    heads = {name: Trainer(start).model.module.head.weight.detach() for name, start in starts.items()}
    seeds = build_model("vit_micro_32", num_classes=8, weights="random", seed=0).module.head.weight
    assert torch.equal(heads["droppos"], seeds)  # no head of its own
    before = load_file(trained["supervised"])["head.weight"]
    assert torch.nn.functional.cosine_similarity(before.flatten(), seeds.flatten(), dim=0) > 0.9
    assert torch.nn.functional.cosine_similarity(heads["supervised"].flatten(), seeds.flatten(), dim=0).abs() < 0.1
    assert float(heads["supervised"].std()) == pytest.approx(float(seeds.std()), rel=0.1)
    assert torch.equal(heads["supervised"], Trainer(starts["supervised"]).model.module.head.weight)


def test_layer_decay_scales_each_layers_rate(trained) -> None:
    trainer = Trainer(config(trained["droppos"], layer_decay=0.5))
    trainer.schedule.step_update(0)
    names = {id(p): n for n, p in trainer.model.module.named_parameters()}
    rates = {names[id(p)]: g["lr"] for g in trainer.optimizer.param_groups for p in g["params"]}
    peak = 5e-4 * 8 / 512
    assert rates["head.weight"] == pytest.approx(peak)
    assert rates["blocks.2.mlp.fc1.weight"] == pytest.approx(peak / 2)
    assert rates["blocks.0.mlp.fc1.weight"] == pytest.approx(peak / 8)
    assert rates["pos_embed"] == rates["patch_embed.proj.weight"] == pytest.approx(peak / 16)


def test_drop_path_rises_with_depth(trained) -> None:
    blocks = Trainer(config(trained["droppos"], drop_path=0.2)).model.module.blocks
    shares = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    assert shares == [0.0, pytest.approx(0.1), pytest.approx(0.2)]


def test_mean_pooling_reads_the_patches(trained) -> None:
    trainer = Trainer(replace(config(trained["droppos"]), objective="supervised:pool=mean"))
    images = trainer.model.normalise(trainer.data.test.images(range(4)))
    module = trainer.model.module.eval()
    expected = module.head(module.forward_features(images)[:, 1:].mean(dim=1))
    torch.testing.assert_close(module(images), expected)


def test_weights_say_which_objective_trained_them(trained) -> None:
    """A file that was trained otherwise than supervised says so in every table."""
    objective = read_objective(ENTRIES["mp3"])
    built = build_model("vit_micro_32_nope", num_classes=8, weights=str(trained["mp3"]), attach=objective.attach)
    assert built.provenance == "model.safetensors, trained by mp3:eta=0.5"
    assert (
        build_model("vit_micro_32", num_classes=8, weights=str(trained["supervised"])).provenance == "model.safetensors"
    )


def test_a_file_that_does_not_say(trained, tmp_path) -> None:
    save_file(load_file(trained["supervised"]), tmp_path / "bare.safetensors")
    with pytest.raises(UsageError, match="does not say how it was trained"):
        restore(tmp_path / "bare.safetensors", torch.device("cpu"))
    assert "encoder of bare.safetensors (head new)" in Trainer(config(tmp_path / "bare.safetensors")).model.provenance


def test_another_objectives_head_is_no_weight(trained, capsys) -> None:
    for options, words in (
        (["--weights", str(trained["mp3"])], "does not fit"),
        (["--objective", "mp3", "--weights", str(trained["droppos"])], "does not fit"),
    ):
        assert _run(*options) == 2
        printed = capsys.readouterr().err.strip()
        assert words in printed
        assert printed.count("\n") == 0


def _run(*options: str) -> int:
    few = ["--data", "photos", "--train-limit", "16", "--model", "vit_micro_32", "--batch-size", "8"]
    return train_command.main([*few, "--epochs", "30", "--out", "unused", *options])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--from", "nowhere.safetensors"], "no checkpoint at nowhere.safetensors"),
        (["--layer-decay", "0"], "--layer-decay must lie in (0, 1]"),
        (["--drop-path", "1"], "--drop-path must lie in [0, 1)"),
        (["--drop-path", "0.1", "--model", "resnet_micro_32"], "--drop-path needs a plain ViT, not resnet_micro_32"),
        (["--objective", "supervised:pool=mean", "--model", "resnet_micro_32"], "pool=mean is for plain ViTs"),
    ],
)
def test_bad_options_are_one_line(options, words: str, tmp_path, capsys) -> None:
    assert _run(*options, "--out", str(tmp_path / "out")) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0


def test_checkpoints_that_hold_no_such_encoder(trained, tmp_path, capsys) -> None:
    state = load_file(trained["mp3"])
    parts = {
        "parameters missing": {n: t for n, t in state.items() if not n.startswith("blocks.1.")},
        "1 unknown (for example strange)": state | {"strange": torch.zeros(2)},
        "patch_embed.proj.weight is (64, 3, 8, 8), not": state | {"patch_embed.proj.weight": torch.zeros(64, 3, 8, 8)},
    }
    for words, content in parts.items():
        save_file(content, tmp_path / "part.safetensors")
        assert _run("--from", str(tmp_path / "part.safetensors"), "--out", str(tmp_path / "out")) == 2
        printed = capsys.readouterr().err.strip()
        assert words in printed
        assert printed.count("\n") == 0
    assert _run("--from", str(trained["mp3"]), "--weights", "timm", "--out", str(tmp_path / "out")) == 2
    assert "gives the encoder; leave out --weights timm" in capsys.readouterr().err


def federation(checkpoint: Path, **options) -> RunConfig:
    flat = {"from": str(checkpoint), "model": "vit_micro_32", "clients": 2, "rounds": 1, "test_limit": 8, "threads": 1}
    return from_flat({**flat, "train_limit": 16, "attacks": "patch_embedding", "audit_clients": "0"} | options)


@pytest.mark.parametrize("defense", ["none", "mjp"])
def test_clients_start_from_the_encoder(trained, defense: str) -> None:
    """As central training does; what a defence adds to the model is new."""
    config = federation(trained["droppos"], defense=defense)
    assert RunConfig.from_json(config.to_json()) == config  # what clients are sent names the checkpoint
    task, state = ClientTask(config, defense), load_file(trained["droppos"])
    for part in ("patch_embed.proj.weight", "blocks.2.attn.qkv.weight", "cls_token"):
        assert torch.equal(task.parameters[part], state[part].float())
    assert torch.equal(task.parameters["pos_embed"], sincos_table((8, 8), 64, 1))
    assert task.model.provenance.startswith("encoder of model.safetensors pre-trained by droppos")
    plain = ClientTask(replace(config, start=EncoderConfig()), defense)
    assert not torch.equal(task.parameters["patch_embed.proj.weight"], plain.parameters["patch_embed.proj.weight"])
    assert torch.equal(task.parameters["head.weight"], plain.parameters["head.weight"])


def test_a_federation_fine_tunes_and_its_rows_say_so(trained, tmp_path) -> None:
    config = replace(federation(trained["mp3"]), out=tmp_path / "run")
    simulate.run(config, QUIET)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert {row["weights"] for row in rows} == {
        "encoder of model.safetensors pre-trained by mp3:eta=0.5 (class token, positions, head new)"
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"from": "nowhere.safetensors"}, "no checkpoint at nowhere.safetensors"),
        ({"weights": "timm"}, "gives the encoder; leave out --weights timm"),
        ({"model": "resnet_micro_32"}, "holds no encoder of this model"),
    ],
)
def test_a_federation_refuses_what_does_not_fit(trained, options, words: str) -> None:
    config = federation(trained["supervised"], **options)
    with pytest.raises(UsageError, match=words):
        check_before_start(config)
