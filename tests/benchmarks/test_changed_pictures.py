"""Every table's command compares the pictures that it attacks with those of the run that it resumes."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from experiments.scaffold import BENCHMARKS, AttackOptions, RowOptions
from experiments.session import AttackSession, Session
from PIL import Image
from rich.console import Console

from fedmjp.data import load_gallery
from fedmjp.records.image_digests import FILE
from fedmjp.records.rows import load_rows
from tests.records.sample_rows import make_row

MICRO = ["--model", "vit_micro_32", "--weights", "random"]
# Options of the smallest table of each command that attacks pictures and has --resume.
COMMANDS = {
    "april_attack": [*MICRO, "--num-images", "2", "--attacks", "patch_embedding"],
    "augmentation": [*MICRO, "--num-images", "2"],
    "batch_rounds": [*MICRO, "--num-images", "4", "--batch-sizes", "2", "--attacks", "patch_embedding"],
    "calibration": [*MICRO, "--num-images", "2", "--attacks", "patch_embedding"],
    "detect": ["--model", "vit_micro_32", "--data", "photos", "--starts", "scratch", "--train-limit", "16"],
    "fishing": [*MICRO, "--batch-sizes", "4", "--clients", "1"],
    "flower_mods": [*MICRO, "--clients", "2"],
    "gradient_matching": [*MICRO, "--num-images", "1", "--attacks", "dlg", "--gammas", "--batches", "1"],
    "identifiability": [*MICRO, "--num-images", "2"],
    "imprint": [*MICRO, "--batch-sizes", "4"],
    "local_training": [*MICRO, "--num-images", "4"],
    "matching_tuning": [*MICRO, "--num-images", "1", "--grid", "dlg.rate=1", "--steps", "1"],
    "message_precision": [*MICRO, "--num-images", "2", "--attacks", "patch_embedding"],
    "mjp_adaptive": [*MICRO, "--num-images", "2"],
    "objectives_leak": ["--num-images", "2", "--lines", "mp3_random"],
    "pieces": [*MICRO, "--num-images", "2"],
    "placement": ["--num-images", "2"],
    "strangers": [*MICRO, "--images", "photos", "--num-images", "2"],
    "withheld": ["--models", "vit_micro_32=random", "--num-images", "2"],
}
# Modules that load galleries beside `Session.gallery`, and why.
LOADERS = {
    "fishing/protocol": "compares the images that it draws (check_images)",
    "leakage/protocol": "a Campaign compares",
    "matching/protocol": "a Campaign compares",
    "matching/tuning": "a Campaign compares",
    **dict.fromkeys(
        ("adaptive/protocol", "batches/protocol", "mp3/figures", "trained_models/attention_maps"), "a figure"
    ),
    **dict.fromkeys(("confidence/protocol", "image_prior/protocol", "piece_predictor/protocol"), "a fit, without rows"),
    **dict.fromkeys(("speed/campaign_speed", "speed/matching_speed", "speed/speed"), "seconds"),
    "session": "Session.gallery itself",
}
SIDES = (32, 40, 64)  # of the models' images, and of the scenes that `augmentation` takes views of


@pytest.fixture(scope="module")
def other_digests() -> str:
    """The content of images.sha256 where other pictures than the embedded photographs were attacked."""
    ids = load_gallery("photos", size=32).images.ids
    return "".join(f"{'0' * 64}  {json.dumps(f'photos {side} {name}')}\n" for side in SIDES for name in ids)


@pytest.mark.parametrize("name", COMMANDS)
def test_other_pictures_are_refused_before_any_attack(name: str, tmp_path, capsys, other_digests: str) -> None:
    (tmp_path / FILE).write_text(other_digests)
    assert import_module(name).main([*COMMANDS[name], "--threads", "1", "--resume", "--out", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert complaint.startswith("error: image ")
    assert f"of photos is not the one that {tmp_path / FILE} was written for" in complaint
    assert not (tmp_path / "rows.jsonl").exists() or not (tmp_path / "rows.jsonl").stat().st_size
    assert (tmp_path / FILE).read_text() == other_digests


# Options of the smallest table of each command whose parts are federations, in folders beside each other.
FEW = ["--clients", "2", "--model", "vit_micro_32", "--data", "photos"]
FEDERATIONS = {
    "federated_tradeoff": ["--defenses", "none", "--rounds", "1", "--partitions", "iid", "--audit-points", "1", *FEW],
    "noise": ["--defenses", "noise", "--updates", "1", *FEW],
    "recipes": ["--defenses", "none", "--rounds", "1", "--recipes", "flip", *FEW],
}


@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_federation_has_the_pictures_of_those_beside_it(name: str, tmp_path, capsys, other_digests: str) -> None:
    beside = tmp_path / "federations" / "beside"
    beside.mkdir(parents=True)
    (beside / FILE).write_text(other_digests)
    assert import_module(name).main([*FEDERATIONS[name], "--threads", "1", "--resume", "--out", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "of photos is not the one that" in complaint
    assert not list(tmp_path.rglob("rows.jsonl.gz"))


def test_galleries_enter_tables_through_the_session() -> None:
    root = BENCHMARKS / "experiments"
    found = {
        str(path.relative_to(root).with_suffix(""))
        for path in root.rglob("*.py")
        if "load_gallery(" in path.read_text()
    }
    assert found == set(LOADERS)


def copied_photographs(folder: Path, count: int) -> list[Path]:
    """Embedded photographs as files of a folder."""
    folder.mkdir()
    images = load_gallery("photos", size=32, limit=count).images.images(range(count))
    files = [folder / f"{number}.png" for number in range(count)]
    for file, image in zip(files, images, strict=True):
        Image.fromarray((255 * image).round().byte().permute(1, 2, 0).numpy()).save(file)
    return files


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("withheld", ["--models", "vit_micro_32=random", "--groups", "nothing", "--attacks", "patch_embedding"]),
        ("placement", ["--image-size", "32", "--gammas", "0.3", "--levels", "20", "--solvers", "border"]),
    ],
)
def test_a_picture_changes_between_two_calls(name: str, options: list[str], tmp_path, capsys) -> None:
    files, out = copied_photographs(tmp_path / "pictures", 4), tmp_path / "out"

    def run(*more: str) -> int:
        call = ["--images", str(tmp_path / "pictures"), "--out", str(out), "--threads", "1", *options, *more]
        return import_module(name).main(call)

    assert run("--num-images", "4") == 0
    noted = (out / FILE).read_text()
    assert noted.count("\n") == 4
    assert run("--num-images", "4", "--resume") == 0
    assert (out / FILE).read_text() == noted
    before, pixels = {path.name: path.read_bytes() for path in out.iterdir()}, Image.open(files[2])
    pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(files[2])
    capsys.readouterr()
    assert run("--num-images", "4", "--resume") == 2
    assert "image '2.png' of folder:pictures is not the one that" in capsys.readouterr().err
    assert (out / FILE).read_text() == noted
    if name == "placement":  # its pictures are loaded before the folder is written to
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / FILE).unlink()  # a folder of an earlier version
    assert run("--num-images", "4", "--resume") == 0
    assert (out / FILE).read_text() != noted


def test_more_pictures_and_fewer_are_not_other_ones(tmp_path) -> None:
    files, out = copied_photographs(tmp_path / "pictures", 3), tmp_path / "out"
    first = load_gallery(str(tmp_path / "pictures"), size=32, limit=2).images.ids
    (last,) = {file.name for file in files} - set(first)
    damaged = tmp_path / "pictures" / last
    Image.open(damaged).save(damaged, "JPEG")
    damaged.write_bytes(damaged.read_bytes()[:-200])  # it opens, and cannot be decoded
    for limit, lines in ((1, 1), (3, 2), (1, 2)):
        session = Session(RowOptions(out=out, resume=True), Console(quiet=True))
        gallery = session.gallery(str(tmp_path / "pictures"), size=32, limit=limit)
        assert len(gallery.images) == limit
        with session.rows() as rows:
            rows.append(make_row(image_id=f"call with {limit} and {lines}"))
        assert (out / FILE).read_text().count("\n") == lines


def test_a_protocol_that_compares_nothing_is_a_mistake(tmp_path) -> None:
    session = AttackSession(AttackOptions(out=tmp_path), Console(quiet=True))
    with (
        pytest.raises(RuntimeError, match="rows were written of images that have no digest in"),
        session.rows() as rows,
    ):
        rows.append(make_row())
    with session.rows() as rows:
        session.check_images(load_gallery("photos", size=32, limit=1))
        rows.append(make_row(image_id="another"))
    assert len(load_rows(tmp_path / "rows.jsonl.gz")) == 2
