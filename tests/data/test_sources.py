"""Data sources by name: parquet files, an unreachable hub, and a table of invalid calls with their error messages."""

import io
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data import SOURCES, load_data

NAMES = ["photos", "photos-in-order", "folder:PATH", "cifar10", "cifar100", "tiny-imagenet", "imagenet"]
NAMES += ["masks:PATH", "mosaics", "speech:PATH", "spoken"]
SNIPPET = """
import sys, fedmjp.data
print(sorted({"flwr", "flwr_datasets", "datasets", "skimage"} & set(sys.modules)))
import datasets, time
waits = []
time.sleep = waits.append
try:
    fedmjp.data.load_data("cifar10", size=32)
finally:
    print(sum(waits))
"""


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (6, 6), colour).save(buffer, "png")
    return buffer.getvalue()


def write_parquet(file, count, image="img", label="label", labels=None):
    cells = [{"bytes": png((k, 0, 0)), "path": None} for k in range(count)]
    labels = [k % 3 for k in range(count)] if labels is None else labels
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({image: cells, label: labels}), file)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Write the arrow copies of temporary files to a temporary cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_names():
    assert SOURCES.names() == NAMES


def test_shared_cifar10(shared):
    bundle = load_data("cifar10", size=32, path=shared("cifar10"))
    assert (len(bundle.train), len(bundle.test)) == (50_000, 10_000)
    assert bundle.classes == ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert torch.bincount(bundle.train.labels).tolist() == [5000] * 10
    assert torch.bincount(bundle.test.labels).tolist() == [1000] * 10
    assert "JPEG 32x32" in bundle.provenance, "the re-encoding must show"
    pixels = bundle.train.images([0, 49_999])
    assert pixels.flatten(1).std(dim=1).min() > 0.03


def test_shared_tiny_imagenet(shared):
    bundle = load_data("tiny-imagenet", size=224, path=shared("tiny-imagenet"), train_limit=100, test_limit=20)
    assert (len(bundle.train), len(bundle.test), len(bundle.classes)) == (100, 20, 200)
    assert bundle.classes == sorted(bundle.classes)
    pixels = bundle.test.images(range(20))
    assert pixels.shape == (20, 3, 224, 224)
    rows = [int(name.split("/")[-1]) for name in bundle.test.ids]
    everything = load_data("tiny-imagenet", size=224, path=shared("tiny-imagenet"))
    assert everything.test.labels[rows].tolist() == bundle.test.labels.tolist()
    assert torch.equal(everything.test.images([rows[7]])[0], pixels[7])


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "image", "label", "held_out", "below"),
    [
        ("cifar100", "img", "fine_label", "test", ""),
        ("cifar10", "img", "label", "test", "plain_text"),
        ("imagenet", "image", "label", "validation", "data"),
    ],
)
def test_hub_layouts(tmp_path, name, image, label, held_out, below):
    folder = tmp_path / "in" / below
    write_parquet(folder / "train-00000-of-00002.parquet", 5, image, label)
    write_parquet(folder / "train-00001-of-00002.parquet", 4, image, label)
    write_parquet(folder / f"{held_out}-00000-of-00001.parquet", 3, image, label)
    bundle = load_data(name, size=6, path=tmp_path / "in")
    assert (len(bundle.train), len(bundle.test), bundle.classes) == (9, 3, ["0", "1", "2"])
    assert bundle.train.labels.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    assert (bundle.train.images(range(9))[:, 0, 0, 0] * 255).round().tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert "PNG 6x6" in bundle.provenance


@pytest.fixture(scope="module")
def unreachable(tmp_path_factory) -> dict[str, subprocess.Popen]:
    """Two processes that ask for data, with HF_HUB_OFFLINE and without it; most of their time is waiting."""

    def asking(offline: str) -> subprocess.Popen:
        # A closed port on this machine imitates a missing network, so that the test does not use the real one.
        home = str(tmp_path_factory.mktemp("hub"))
        env = {**os.environ, "HF_HUB_OFFLINE": offline, "HF_HOME": home, "HF_ENDPOINT": "http://127.0.0.1:9"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", SNIPPET], env=env, **pipes)

    return {offline: asking(offline) for offline in ("1", "0")}


@pytest.mark.parametrize("offline", ["1", "0"])
def test_an_unreachable_hub_raises_without_waiting(unreachable, offline):
    """The waits between retries are added up, not waited for: seconds by the clock depend on the machine."""
    stdout, stderr = unreachable[offline].communicate(timeout=120)
    imported, waited = stdout.splitlines()
    assert imported == "[]", "importing fedmjp.data must not import these"
    assert float(waited) < 5, "the retries of the hub's client, which this must not wait for, take over 20 s"
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("attacks.registry.UsageError: cannot fetch uoft-cs/cifar10")
    assert "--data-path" in last


MISTAKES = [
    (dict(name="mnist"), "choose from: photos, photos-in-order, folder:PATH, cifar10"),
    (dict(name="cifar"), "did you mean 'cifar10'"),
    (dict(name="photos", path="x"), "drop --data-path"),
    (dict(name="folder:x", path="x"), "drop --data-path"),
    (dict(name="folder:"), "write folder:PATH"),
    (dict(name="photos", size=0), "size is 0; give at least 1"),
    (dict(name="photos", train_limit=0), "train_limit is 0; give at least 1"),
    (dict(name="photos", test_limit=-3), "test_limit is -3; give at least 1"),
    (dict(name="photos", seed=-1), "seed is -1; give at least 0"),
    (dict(name="folder:", folder="gone"), "holds CLASS/FILE"),
    (dict(name="folder:", folder="empty"), "lay the files out as CLASS/FILE"),
    (dict(name="folder:", folder="bare"), "add images"),
    (dict(name="folder:", folder="single"), "add images"),
    (dict(name="folder:", folder="broken"), "none of the 2 image files"),
    (dict(name="imagenet", path="empty"), "lay the files out as CLASS/FILE"),
    (dict(name="cifar10", path="gone"), "give --data-path a folder"),
    (dict(name="cifar10", path="empty"), "point --data-path at a folder with the parquet files of uoft-cs/cifar10"),
    (dict(name="tiny-imagenet", path="empty"), "valid-\\*.parquet"),
    (dict(name="cifar10", path="torn"), "fetch them again"),
    (dict(name="cifar10", path="columns"), "point --data-path at the files of uoft-cs/cifar10"),
    (dict(name="cifar10", path="words"), "an integer column 'label'"),
    (dict(name="cifar10", path="unlabelled"), "whose labels count from 0"),
]


@pytest.fixture
def mistakes(tmp_path):
    """Return a folder with one subfolder for each kind of invalid data."""
    for name in ("empty", "torn", "bare", "single/a", "broken/a"):
        (tmp_path / name).mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "bare/loose.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "single/a/0.png")
    for k in range(2):
        (tmp_path / f"broken/a/{k}.png").write_bytes(b"x")
    for split in ("train", "test"):
        file = f"{split}-00000-of-00001.parquet"
        (tmp_path / "torn" / file).write_bytes(b"PAR1 and no more")
        write_parquet(tmp_path / "columns" / file, 3, image="picture")
        write_parquet(tmp_path / "words" / file, 3, labels=["a", "b", "c"])
        write_parquet(tmp_path / "unlabelled" / file, 3, labels=[0, 1, 2] if split == "train" else [-1, -1, -1])
    return tmp_path


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("call", "advice"), MISTAKES)
def test_invalid_calls_raise_one_line_that_says_what_to_do(mistakes, call, advice):
    call = {"size": 8, **call}
    name = call.pop("name")
    folder = call.pop("folder", None)
    if folder is not None:
        name = f"folder:{mistakes / folder}"
    if "path" in call:
        call["path"] = mistakes / call["path"]
    with pytest.raises(UsageError, match=advice) as caught:
        load_data(name, **call)
    assert "\n" not in str(caught.value)
