"""Tables of segmentation and speech: lines, paired differences, the line "colour alone", files, mistakes."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import segmentation as segmentation_command
import speech as speech_command
import speech_leak as leak_command
import torch
from experiments.segmentation.options import Options, lines_of
from experiments.segmentation.protocol import colour_row
from experiments.segmentation.render import COLOUR, segmentation_table
from experiments.speech.options import SUPERVISED, TrainingOptions
from experiments.speech.render import leak_table, speech_table

from fedmjp.data import DataBundle
from fedmjp.data.catalog import LABEL_MAPS
from fedmjp.records.image_digests import FILE


class Painted:
    """Images whose class is their colour but for the upper half, which is grey."""

    kind, classes = LABEL_MAPS, ["dark", "light"]

    def __init__(self, count: int) -> None:
        self.labels = torch.arange(count) % 2

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices):
        found = self.labels[list(indices)][:, None, None, None].float().mul(0.8).add(0.1).repeat(1, 3, 8, 8)
        found[:, :, :4] = 0.5
        return found

    def targets(self, indices):
        return self.labels[list(indices)][:, None, None].repeat(1, 8, 8)


def exit_code(script, *options: str) -> int:
    try:
        return script.main(list(options))
    except SystemExit as stop:  # the parser of the command line leaves this way
        return int(stop.code)


def test_colour_alone_knows_what_colour_says() -> None:
    """Below, colour is the class; above, one class is said everywhere: IoU (4 of 8 rows) / (4 + 8) for the other."""
    row = colour_row(DataBundle(Painted(6), Painted(4), Painted.classes, "painted", ""))
    assert sorted(row["iou"]) == pytest.approx([50.0, 100 * 8 / 12])
    assert row["miou"] == pytest.approx(np.mean(row["iou"]))


def test_differences_are_paired_by_seed() -> None:
    names = [line.name for line in lines_of(("swin_micro_32",), ("swin_micro_32",))]
    scores = {names[0]: [30, 31, 35], names[1]: [29, 30.5, 34], names[2]: [40, 41, 42], names[3]: [41, 42.1, 43]}
    rows = [
        {"line": name, "seed": seed, "miou": value, "macc": value + 10}
        for name, values in (scores | {COLOUR: [18, 19, 18]}).items()
        for seed, value in enumerate(values)
    ]
    table = segmentation_table(pd.DataFrame(rows)).set_index(["line", "metric"])
    assert table.loc[(names[1], "miou"), "difference_mean"] == pytest.approx(-2.5 / 3)
    assert pd.isna(table.loc[(COLOUR, "miou"), "difference_mean"])
    trained = table.loc[(names[3], "macc")]
    assert trained["difference_mean"] == pytest.approx(3.1 / 3)
    assert trained["paper_difference"] == 0.28
    assert trained["verdict"] == "agrees"


def test_the_supplements_comparison_starts_from_both_encoders() -> None:
    options = Options()
    plain, jigsawed = lines_of((), options.pretrained_models)
    assert (plain.defense, jigsawed.defense) == ("none", "none")
    trained = [options.pretraining_config(line, 0) for line in (plain, jigsawed)]
    assert [config.defense for config in trained] == ["none", "mjp"]
    assert trained[0].out != trained[1].out
    assert options.started(jigsawed, 0).start.checkpoint == trained[1].out / "model.safetensors"


def test_segmentation_writes_its_files(tmp_path) -> None:
    pytest.importorskip("segmentation_models_pytorch", reason="the extra segmentation is not installed")
    small = [
        "--train-limit",
        "16",
        "--test-limit",
        "8",
        "--epochs",
        "1",
        "--models",
        "vit_micro_32",
        "--seeds",
        "0",
        "1",
    ]
    small += ["--pretrained-models", "--out", str(tmp_path / "out"), "--pretrained", str(tmp_path / "pre")]
    assert exit_code(segmentation_command, *small) == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    assert table["line"].unique().tolist() == [COLOUR, "vit_micro_32", "vit_micro_32, MJP in segmentation"]
    assert (table["seeds"] == 2).all()
    assert not (tmp_path / "pre").exists()
    assert exit_code(segmentation_command, *small) == 2


def tones(root):
    soundfile = pytest.importorskip("soundfile", reason="the extra speech is not installed")
    for word, hertz in (("low", 300), ("high", 1500)):
        (root / word).mkdir(parents=True)
        for number in range(10):
            sound = 0.3 * np.sin(2 * np.pi * (hertz + 9 * number) * np.arange(16_000) / 16_000)
            soundfile.write(root / word / f"{number}.wav", sound, 16_000)
    return f"speech:{root}"


@pytest.mark.long
def test_speech_writes_its_files(tmp_path) -> None:
    options = ["--data", tones(tmp_path / "words"), "--epochs", "2", "--warmup-epochs", "1", "--batch-size", "8"]
    options += ["--pretraining-epochs", "1", "--seeds", "0", "--pretrained", str(tmp_path / "pre")]
    assert exit_code(speech_command, *options, "--out", str(tmp_path / "out")) == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    assert table["line"].tolist() == [SUPERVISED, f"MP3 for 1 epochs, then {SUPERVISED}"]
    assert 0 <= table["place_accuracy"][1] <= 100


@pytest.mark.long
def test_a_wide_model_with_learned_positions_gives_its_frames_away(tmp_path) -> None:
    options = ["--data", tones(tmp_path / "words"), "--words", "2", "--widths", "128", "--out", str(tmp_path / "out")]
    assert exit_code(leak_command, *options) == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv").set_index("positions")
    assert table.loc["learned", "explained_mean"] > 99.9
    assert pd.isna(table.loc["fixed", "explained_mean"])
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["rows"] == 4


def test_other_sounds_of_the_same_names_are_refused(tmp_path, capsys) -> None:
    data = tones(tmp_path / "words")
    options = ["--data", data, "--widths", "32", "--words", "1", "--out", str(tmp_path / "out"), "--threads", "1"]
    assert exit_code(leak_command, *options) == 0
    capsys.readouterr()
    assert exit_code(leak_command, *options, "--resume") == 0
    (first,) = (line.split()[-1].rstrip('"') for line in (tmp_path / "out" / FILE).read_text().splitlines())
    other = next(file for file in (tmp_path / "words").rglob("*.wav") if file.parent.name != first.split("/")[0])
    (tmp_path / "words" / first).write_bytes(other.read_bytes())
    capsys.readouterr()
    assert exit_code(leak_command, *options, "--resume") == 2
    assert f"image {first!r} of {data} is not the one" in capsys.readouterr().err


def test_tables_of_speech() -> None:
    rows = [
        {"line": line, "seed": seed, "accuracy": value, "place_accuracy": places}
        for line, values, places in ((SUPERVISED, [90, 91, 92], None), ("MP3", [93, 93, 96], 4.0))
        for seed, value in enumerate(values)
    ]
    table = speech_table(pd.DataFrame(rows)).set_index("line")
    assert table.loc["MP3", "difference_mean"] == pytest.approx(3)
    assert table.loc["MP3", "place_accuracy"] == 4
    assert pd.isna(table.loc[SUPERVISED, "difference_mean"])
    shared = {"width": 32, "positions": "fixed", "diagnosis": "no"}
    found = leak_table(pd.DataFrame([shared | {"explained": None, "rank": None}] * 2))
    assert found["count"].tolist() == [2]


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (segmentation_command, ["--seeds", "0", "0"], "--seeds takes different numbers"),
        (segmentation_command, ["--data", "photos"], "needs images with a class a pixel"),
        (speech_command, ["--data", "mosaics"], "--model speech_mini needs spoken words"),
        (speech_command, ["--given", "1"], "given of objective 'mp3' must lie in"),
        (leak_command, ["--widths", "40"], "--widths takes multiples of 16"),
        (leak_command, ["--data", "photos"], "this command needs spoken words"),
    ],
)
def test_mistakes_are_one_line(script, options, words, tmp_path, capsys) -> None:
    assert exit_code(script, *options, "--out", str(tmp_path / "out")) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert "\n" not in printed


def test_options_name_the_papers_share() -> None:
    assert TrainingOptions().pretraining_config(3, 0).objective == "mp3:eta=0,given=0.05"
