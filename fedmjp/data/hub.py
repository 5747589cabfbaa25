"""Public data sets of the Hugging Face hub, downloaded from there or read from local parquet files.

In both cases the result is a memory-mapped `datasets.Dataset`, so that ImageNet can be used on a small machine: the
first load of parquet files writes an arrow copy into the user's `datasets` cache, and later loads only map it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from attacks.registry import UsageError
from fedmjp.data.catalog import DataBundle, Request
from fedmjp.data.folder import load_folder
from fedmjp.data.imageset import DECODE_ERRORS, ImageSet, choose
from fedmjp.errors import needs_extra

if TYPE_CHECKING:
    from datasets import Dataset

PROBE_SECONDS = 3.0
TEST_SPLITS = ("test", "valid", "validation", "val")


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub.

    Attributes:
        name: its name in this package.
        repo: its repository on the hub.
        image, label: names of its columns.
        test_split: name of the split that is used for testing.
        takes_folder: whether a local copy may also be an image folder.
    """

    name: str
    repo: str
    image: str
    label: str
    test_split: str
    takes_folder: bool = False

    def __call__(self, request: Request) -> DataBundle:
        """Load the data set, from `request.path` if it is given.

        Raises:
            UsageError: the hub cannot be reached and nothing is cached, or `request.path` does not hold this data set.
        """
        with needs_extra("federation", f"data set {self.name!r}"):
            import datasets  # noqa: F401
        if request.path is None:
            splits, origin = _from_hub(self), f"{self.repo} from the Hugging Face hub"
        else:
            files = parquet_files(request.path)
            if files is None and self.takes_folder:
                return replace(load_folder(request), name=self.name)
            if files is None:
                raise UsageError(
                    f"no train-*.parquet and {self.test_split}-*.parquet files in {request.path}; point --data-path "
                    f"at a folder with the parquet files of {self.repo}"
                )
            splits, origin = _from_parquet(files), f"{self.repo} from local parquet files"
        classes = _class_names(self, splits[0])
        train = _image_set(self, "train", splits[0], classes, request.train_limit, request)
        test = _image_set(self, "test", splits[1], classes, request.test_limit, request)
        provenance = f"{origin} (images stored as {_stored_as(RowImages(splits[0], self.image))})"
        return DataBundle(train, test, classes, self.name, provenance)


@dataclass(frozen=True)
class RowImages:
    """Opens the images in a column of a `datasets.Dataset`, without that library's decoding.

    Attributes:
        rows: the data set.
        column: name of the column of images.
    """

    rows: Dataset
    column: str

    def __post_init__(self) -> None:
        import datasets

        bare = self.rows.select_columns([self.column]).cast_column(self.column, datasets.Image(decode=False))
        object.__setattr__(self, "rows", bare)

    def __call__(self, index: int) -> Image.Image:
        """The image of row `index`, not yet decoded.

        Raises:
            OSError: the image cannot be opened.
        """
        cell = self.rows[index][self.column]  # {"bytes": ..., "path": ...}
        return Image.open(io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"])


def parquet_files(folder: Path) -> tuple[list[str], list[str]] | None:
    """Return the train and the test parquet files of `folder` or of a folder in it, None if either is missing.

    Args:
        folder: files in the hub's layout, train-*.parquet and SPLIT-*.parquet.

    Raises:
        UsageError: the folder does not exist.
    """
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UsageError(f"no folder at {folder}; give --data-path a folder of parquet files or images")
    for place in [folder, *sorted(f for f in folder.iterdir() if f.is_dir())]:
        train = sorted(str(f) for f in place.glob("train-*.parquet"))
        for split in TEST_SPLITS if train else ():
            test = sorted(str(f) for f in place.glob(f"{split}-*.parquet"))
            if test:
                return train, test
    return None


def _from_parquet(files: tuple[list[str], list[str]]) -> tuple[Dataset, Dataset]:
    import datasets

    try:
        with _quiet():
            loaded = datasets.load_dataset("parquet", data_files={"train": files[0], "test": files[1]})
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        folder = Path(files[0][0]).parent
        raise UsageError(f"cannot read the parquet files in {folder} ({_one_line(error)}); fetch them again") from error
    return loaded["train"], loaded["test"]


def _from_hub(source: HubSource) -> tuple[Dataset, Dataset]:
    import datasets

    try:
        with _quiet(), _no_retries_without_network():
            loaded = datasets.load_dataset(source.repo)
        return loaded["train"], loaded[source.test_split]
    except Exception as error:  # the errors of requests, httpx, hub and datasets have no common base class
        raise UsageError(
            f"cannot fetch {source.repo} from the Hugging Face hub and it is not cached ({_one_line(error)}); "
            f"connect (and log in if it is gated), or pass --data-path FOLDER with its parquet files"
            f"{' or images' if source.takes_folder else ''}"
        ) from error


@contextlib.contextmanager
def _no_retries_without_network() -> Iterator[None]:
    """Context in which `datasets` reads its cache at once if the hub is unreachable, instead of retrying for 30 s."""
    from datasets import config
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    before = config.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception:  # an error of requests or of httpx, depending on the version of huggingface_hub
        config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from datasets.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


def _class_names(source: HubSource, train: Dataset) -> list[str]:
    """Return the class names of `train`, or "0", "1", ... if the files contain no names."""
    missing = {source.image, source.label} - set(train.column_names)
    feature = train.features.get(source.label)
    if missing or "int" not in feature.dtype:
        raise UsageError(
            f"the files given for {source.name} need an image column {source.image!r} and an integer column "
            f"{source.label!r} but have {', '.join(train.column_names)}; "
            f"point --data-path at the files of {source.repo}"
        )
    return getattr(feature, "names", None) or [str(k) for k in range(max(train.unique(source.label), default=-1) + 1)]


def _image_set(
    source: HubSource, part: str, split: Dataset, classes: list[str], limit: int | None, request: Request
) -> ImageSet:
    if not len(split):
        raise UsageError(f"the {part} split of {source.name} is empty; fetch the files of {source.repo} again")
    chosen = choose(len(split), limit, request.seed)
    split = split.select(chosen)
    ids = [f"{source.name}/{part}/{row}" for row in chosen]
    return ImageSet(RowImages(split, source.image), split[source.label][:], ids, classes, request.size)


def _stored_as(pictures: RowImages) -> str:
    """Format and size of the first image, by which copies that were re-encoded with loss can be recognised."""
    try:
        picture = pictures(0)
    except DECODE_ERRORS:
        return "an unknown format"
    return f"{picture.format} {picture.width}x{picture.height}"


CIFAR10 = HubSource("cifar10", "uoft-cs/cifar10", "img", "label", "test")
CIFAR100 = HubSource("cifar100", "uoft-cs/cifar100", "img", "fine_label", "test")
TINY_IMAGENET = HubSource("tiny-imagenet", "zh-plus/tiny-imagenet", "image", "label", "valid")
IMAGENET = HubSource("imagenet", "ILSVRC/imagenet-1k", "image", "label", "validation", takes_folder=True)
