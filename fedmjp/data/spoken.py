"""`spoken`: ten command words spoken by the synthesiser espeak-ng, where Speech Commands is not at hand.

The words are Speech Commands' ten commands. Each clip has an English accent, a voice, a speed and a pitch of its own,
begins at a random time in its second, and has white noise of 5 to 30 dB below it. Voices of test clips speak no
training clip. A synthesiser speaks far more evenly than people do: what is measured on these words is no figure for
Speech Commands, and every table says so.
"""

from __future__ import annotations

import functools
import io
import shutil
import subprocess
from dataclasses import dataclass

import numpy as np

from attacks.registry import UsageError
from fedmjp.data.catalog import DataBundle, Request
from fedmjp.data.frames import RATE, SECONDS, FrameSet
from fedmjp.data.imageset import choose
from fedmjp.errors import needs_extra

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-029")
TRAIN_VOICES = ("m1", "m2", "m3", "m5", "m6", "m7", "f1", "f2", "f4", "klatt", "klatt3")
TEST_VOICES = ("m4", "m8", "f3", "f5", "klatt2")
TRAIN, TEST = 1500, 400  # clips in a split
SPEEDS, PITCHES, NOISE = (120, 220), (20, 80), (5.0, 30.0)  # words a minute, espeak's scale, dB below the word


@dataclass(frozen=True)
class Spoken:
    """Speaks clips; the same arguments and index give the same one.

    Attributes:
        test: whether the voices are those of the test clips.
        seed: of all random choices.
        numbers: number of the clip by index; its word is the number modulo ten.
    """

    test: bool
    seed: int
    numbers: tuple[int, ...]

    def __call__(self, index: int) -> np.ndarray:
        """The samples of clip number `index`, (16000,) float32.

        Raises:
            UsageError: espeak-ng fails.
            MissingExtra: librosa is not installed.
        """
        number = self.numbers[index]
        rng = np.random.default_rng([self.seed, int(self.test), number])
        voices = TEST_VOICES if self.test else TRAIN_VOICES
        voice = f"{ACCENTS[rng.integers(len(ACCENTS))]}+{voices[rng.integers(len(voices))]}"
        sound = _speak(WORDS[number % len(WORDS)], voice, int(rng.integers(*SPEEDS)), int(rng.integers(*PITCHES)))
        length = RATE * SECONDS
        sound = sound[:length]
        start = int(rng.integers(length - len(sound) + 1))
        clip = rng.standard_normal(length) * np.sqrt(np.mean(sound**2)) * 10 ** (-rng.uniform(*NOISE) / 20)
        clip[start : start + len(sound)] += sound
        return (0.9 * clip / np.abs(clip).max()).astype(np.float32)


def _speak(word: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """A word at `RATE`, without the silence around it."""
    with needs_extra("speech", "speech"):
        import librosa
        import soundfile
    command = [espeak(), "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", word]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        raise UsageError(f"espeak-ng does not speak with the voice {voice} ({done.stderr.decode().strip()[:80]})")
    sound, rate = soundfile.read(io.BytesIO(done.stdout), dtype="float32")
    return librosa.effects.trim(librosa.resample(sound, orig_sr=rate, target_sr=RATE))[0]


@functools.cache
def espeak() -> str:
    """Path of the program.

    Raises:
        UsageError: it is not installed.
    """
    found = shutil.which("espeak-ng")
    if found is None:
        raise UsageError(
            "data set 'spoken' needs the program espeak-ng (apt-get install espeak-ng); or use speech:PATH"
        )
    return found


def load_spoken(request: Request) -> DataBundle:
    """1,500 train and 400 test clips of ten words.

    Raises:
        UsageError: a path is given, or espeak-ng is not installed.
    """
    if request.path is not None:
        raise UsageError("data set 'spoken' is spoken by espeak-ng; drop --data-path, or use speech:PATH instead")
    version = subprocess.run([espeak(), "--version"], capture_output=True, text=True, check=False).stdout
    train = _set(False, TRAIN, request.train_limit, request.seed)
    test = _set(True, TEST, request.test_limit, request.seed)
    speaker = " ".join(version.split("Data")[0].split())
    provenance = (
        f"synthetic: {len(train)} train and {len(test)} test clips of {len(WORDS)} words by {speaker}, "
        f"{len(ACCENTS)} accents, other voices for test"
    )
    return DataBundle(train, test, list(WORDS), "spoken", provenance)


def _set(test: bool, count: int, limit: int | None, seed: int) -> FrameSet:
    numbers = tuple(int(i) for i in choose(count, limit, seed))
    ids = [f"{WORDS[n % len(WORDS)]}/{'test' if test else 'train'}/{n}" for n in numbers]
    return FrameSet(Spoken(test, seed, numbers), [n % len(WORDS) for n in numbers], ids, WORDS)
