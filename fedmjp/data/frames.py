"""Words as sequences of frames: 40 mel-frequency cepstral coefficients (MFCCs) of 30 ms of sound, one every 10 ms.

A word is a second of sound at 16 kHz, and 100 frames. They are stored as an image of one row with 40 channels,
(40, 1, 100), so that a frame is a patch of one pixel and a model's linear map of a frame is a patch projection: models,
objectives, defences and attacks take them as they take images. Values are mapped to [0, 1] by fixed bounds for each
coefficient (`LOW`, `HIGH`), wide enough for speech; what lies outside is clipped.

MFCCs are those of librosa (Hann window, 40 mel bands from 20 Hz to 8 kHz, decibels, orthonormal DCT). MP3 takes those
of TC-ResNet's TensorFlow code, whose filter bank and scale it does not state. torchaudio would compute them, too, but
no release of it fits this project's torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch

from attacks.registry import UsageError
from fedmjp.data.catalog import SPEECH
from fedmjp.data.imageset import ImageSet
from fedmjp.errors import needs_extra

RATE, SECONDS = 16_000, 1  # samples a second; length of a word
COEFFICIENTS, WINDOW, HOP = 40, 480, 160  # the last two in samples
FRAMES = RATE * SECONDS // HOP
LOWEST = 20.0  # Hz, of the mel bands
# Bounds of each coefficient: the first is the loudness, the others are centred, and fall about as 1 / sqrt(k).
_WIDTHS = np.array([500.0, *(200.0 / np.sqrt(np.arange(1, COEFFICIENTS)))])
_CENTRES = np.array([-300.0, *np.zeros(COEFFICIENTS - 1)])
LOW, HIGH = _CENTRES - _WIDTHS, _CENTRES + _WIDTHS


class FrameSet(ImageSet):
    """Labelled words, read and turned into frames on demand, and then kept in memory (16 kB a word).

    Args:
        read: index in 0..n-1 -> sound of `RATE` samples a second, float32 in [-1, 1]; cut or filled with silence to
            `SECONDS`.
        labels, ids, classes: see `ImageSet`.
    """

    kind: ClassVar[str] = SPEECH

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        labels: Sequence[int] | torch.Tensor,
        ids: Sequence[str],
        classes: Sequence[str],
    ) -> None:
        super().__init__(read, labels, ids, classes, FRAMES)
        self._words: dict[int, torch.Tensor] = {}

    def images(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """Frames of the words at `indices`.

        Returns:
            FloatTensor (B, 40, 1, 100) in [0, 1].

        Raises:
            IndexError: an index is outside 0..n-1.
            UsageError: a file cannot be read, or has another rate; the message names it.
        """
        found = []
        for index in (int(i) for i in indices):
            self._check(index)
            row = int(self._rows[index])
            if row not in self._words:
                self._words[row] = scale(mfcc(self._open(row)))[:, None]
            found.append(self._words[row])
        return torch.stack(found)

    def keep(self) -> None:
        """Nothing to do: each word is kept once it is read."""

    def contents(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> list[bytes]:
        """The samples of the words at `indices`, float32: frames are rounded differently by different machines."""
        found = []
        for index in (int(i) for i in indices):
            self._check(index)
            found.append(np.asarray(self._open(int(self._rows[index])), dtype=np.float32).tobytes())
        return found

    def _of_rows(self, picked: list[int]) -> FrameSet:
        part = FrameSet(self._open, self.labels[picked], [self.ids[i] for i in picked], self.classes)
        part._words = self._words
        return part


def mfcc(sound: np.ndarray) -> torch.Tensor:
    """MFCCs (40, 100) float32 of a second of sound, (samples,) float32 at `RATE`.

    Raises:
        MissingExtra: librosa is not installed.
    """
    with needs_extra("speech", "speech"):
        import librosa
    if sound.ndim != 1 or not len(sound):
        raise UsageError(f"sound of shape {sound.shape} is no single channel of samples; convert it to mono")
    length = RATE * SECONDS
    sound = np.pad(sound[:length], (0, max(0, length - len(sound))))
    found = librosa.feature.mfcc(
        y=sound.astype(np.float32),
        sr=RATE,
        n_mfcc=COEFFICIENTS,
        n_mels=COEFFICIENTS,
        n_fft=512,
        win_length=WINDOW,
        hop_length=HOP,
        fmin=LOWEST,
    )
    # Frames are centred on multiples of the hop; the one on the sound's very end is left out.
    return torch.from_numpy(found[:, :FRAMES]).float()


def scale(coefficients: torch.Tensor) -> torch.Tensor:
    """MFCCs (40, T) to [0, 1], clipped."""
    low, high = (torch.from_numpy(bound).float()[:, None] for bound in (LOW, HIGH))
    return ((coefficients - low) / (high - low)).clamp(0, 1)
