"""Folders of spoken words in the layout of Speech Commands (Warden, 2018): WORD/NAME.wav, a second each at 16 kHz.

`testing_list.txt` names the test words, one WORD/NAME.wav a line, and `validation_list.txt` words that are left out of
both splits; without the first, a fifth of every word is drawn for the test. Every folder is a class but those that
begin with "_", such as _background_noise_. Departs from MP3's twelve classes (ten commands, silence, unknown).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attacks.registry import UsageError
from fedmjp.data.catalog import DataBundle, Request
from fedmjp.data.folder import split_files
from fedmjp.data.frames import RATE, FrameSet
from fedmjp.data.imageset import choose
from fedmjp.errors import needs_extra

LAYOUT = "WORD/NAME.wav"


@dataclass(frozen=True)
class FileSounds:
    """Reads wave files.

    Attributes:
        root: the folder.
        files: names relative to `root`.
    """

    root: Path
    files: list[str]

    def __call__(self, index: int) -> np.ndarray:
        """The samples of file number `index`, (samples,) float32 in [-1, 1].

        Raises:
            UsageError: it cannot be read, is empty, or has another rate or several channels.
        """
        with needs_extra("speech", "speech"):
            import soundfile
        name = self.files[index]
        try:
            sound, rate = soundfile.read(self.root / name, dtype="float32")
        except (soundfile.SoundFileError, OSError) as error:
            raise UsageError(f"cannot read {name} ({type(error).__name__}); remove or replace it") from error
        if rate != RATE:
            raise UsageError(f"{name} has {rate} samples a second, not {RATE}; resample the folder")
        if sound.ndim != 1:
            raise UsageError(f"{name} has {sound.shape[1]} channels; convert the folder to mono")
        if not len(sound):
            raise UsageError(f"{name} holds no sound; remove it")
        return sound


def load_speech(request: Request) -> DataBundle:
    """Load the folder `request.path`.

    Raises:
        UsageError: the folder does not exist, holds no words, or a list names files that are not there.
        MissingExtra: librosa is not installed.
    """
    if request.path is None:
        raise UsageError("no folder given; write speech:PATH with the path of a folder of spoken words")
    root = request.path.expanduser()
    if not root.is_dir():
        raise UsageError(f"no folder at {root}; give a folder that holds {LAYOUT}")
    files = sorted(
        f"{folder.name}/{file.name}"
        for folder in root.iterdir()
        if folder.is_dir() and folder.name[0] not in "._"
        for file in folder.iterdir()
        if file.suffix.lower() == ".wav" and not file.name.startswith(".")
    )
    if not files:
        raise UsageError(f"no spoken word found in {root}; lay the files out as {LAYOUT}")
    train, test, how = _split(root, files, request.seed)
    classes = sorted({file.split("/")[0] for file in files})
    parts = (
        [part[i] for i in choose(len(part), limit, request.seed)]
        for part, limit in ((train, request.train_limit), (test, request.test_limit))
    )
    sets = [FrameSet(FileSounds(root, p), [classes.index(f.split("/")[0]) for f in p], p, classes) for p in parts]
    provenance = f"spoken words {root.resolve().name}/ ({len(classes)} words; {how})"
    return DataBundle(sets[0], sets[1], classes, f"speech:{request.path}", provenance)


def _split(root: Path, files: list[str], seed: int) -> tuple[list[str], list[str], str]:
    """Names of the train and of the test words, and how they were divided."""
    test, kept_back = _listed(root, "testing_list.txt", files), _listed(root, "validation_list.txt", files)
    if test:
        train = sorted(set(files) - set(test) - set(kept_back))
        if not train:
            raise UsageError(f"the lists in {root} leave no word for training")
        return train, test, f"its own lists, {len(test)} words for test"
    train, test = split_files([f for f in files if f not in set(kept_back)], seed)
    return train, test, f"split with seed {seed}, {len(test)} words for test"


def _listed(root: Path, name: str, files: list[str]) -> list[str]:
    """The words that a list names, sorted; none where there is no such list.

    Raises:
        UsageError: one of them is not in the folder.
    """
    path = root / name
    found = sorted(set(path.read_text(encoding="utf-8").split())) if path.is_file() else []
    missing = sorted(set(found) - set(files))
    if missing:
        raise UsageError(f"{path} names {len(missing)} files that are not there; the first is {missing[0]}")
    return found
