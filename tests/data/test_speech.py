"""Spoken words: frames against librosa, folders in Speech Commands' layout, words from espeak-ng, mistakes."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch

from attacks.registry import UsageError
from fedmjp.data import load_data, spoken
from fedmjp.data.frames import COEFFICIENTS, FRAMES, HIGH, HOP, LOW, LOWEST, RATE, WINDOW, mfcc, scale
from fedmjp.errors import MissingExtra

librosa = pytest.importorskip("librosa", reason="the extra speech is not installed")
soundfile = pytest.importorskip("soundfile", reason="the extra speech is not installed")
needs_espeak = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")


def tone(hertz: float, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def plant(root, *, rate: int = RATE, channels: int = 1, per_word: int = 5):
    """Tones of three pitches, as three words, and a folder of noise that is none."""
    for word, hertz in (("low", 200), ("middle", 600), ("top", 1800), ("_background_noise_", 50)):
        (root / word).mkdir(parents=True)
        for number in range(per_word):
            sound = tone(hertz + 10 * number, 0.5 + 0.1 * number, rate)
            sound = np.stack([sound] * channels, axis=1) if channels > 1 else sound
            soundfile.write(root / word / f"{number}.wav", sound, rate)
    return root


def load(root, **more):
    return load_data(f"speech:{root}", size=FRAMES, **more)


def test_mfccs_equal_a_transform_by_hand() -> None:
    """Frame by frame in float64: window, power, librosa's mel filters, decibels, orthonormal cosine transform."""
    sound = tone(440) + 0.01 * np.random.default_rng(0).standard_normal(RATE).astype(np.float32)
    found = mfcc(sound)
    assert found.shape == (COEFFICIENTS, FRAMES)
    filters = librosa.filters.mel(sr=RATE, n_fft=512, n_mels=COEFFICIENTS, fmin=LOWEST).astype(np.float64)
    window = np.zeros(512)
    window[16:496] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    padded = np.pad(sound.astype(np.float64), 256)
    powers = [np.abs(np.fft.rfft(padded[t * HOP : t * HOP + 512] * window)) ** 2 for t in range(FRAMES + 1)]
    bands = 10 * np.log10(np.maximum(filters @ np.array(powers).T, 1e-10))
    bands = np.maximum(bands, bands.max() - 80)
    cosines = np.array(
        [[math.cos(math.pi * k * (2 * m + 1) / (2 * COEFFICIENTS)) for m in range(COEFFICIENTS)] for k in range(40)]
    )
    cosines *= np.sqrt(2 / COEFFICIENTS)
    cosines[0] /= np.sqrt(2)
    np.testing.assert_allclose(found.numpy(), (cosines @ bands)[:, :FRAMES], atol=2e-2)


def test_frames_lie_in_the_unit_interval_and_keep_their_values() -> None:
    coefficients = mfcc(tone(300) + 1e-3)
    scaled = scale(coefficients)
    assert ((scaled > 0) & (scaled < 1)).all()
    back = scaled.double().numpy() * (HIGH - LOW)[:, None] + LOW[:, None]
    np.testing.assert_allclose(back, coefficients.numpy(), atol=1e-3)


def test_a_folder_of_words(tmp_path) -> None:
    bundle = load(plant(tmp_path))
    assert bundle.classes == ["low", "middle", "top"]
    assert (len(bundle.train), len(bundle.test)) == (12, 3)
    frames = bundle.train.images([0, 3])
    assert frames.shape == (2, COEFFICIENTS, 1, FRAMES)
    assert torch.equal(bundle.train.subset([3]).images([0]), frames[1:])
    assert not set(bundle.train.ids) & set(bundle.test.ids)
    sound, _ = soundfile.read(tmp_path / bundle.train.ids[3], dtype="float32")
    assert torch.equal(frames[1, :, 0], scale(mfcc(sound)))


def test_its_own_lists_are_kept_to(tmp_path) -> None:
    plant(tmp_path)
    (tmp_path / "testing_list.txt").write_text("low/0.wav\ntop/4.wav\n")
    (tmp_path / "validation_list.txt").write_text("middle/1.wav\n")
    bundle = load(tmp_path)
    assert bundle.test.ids == ["low/0.wav", "top/4.wav"]
    assert len(bundle.train) == 12
    assert "middle/1.wav" not in bundle.train.ids
    assert "its own lists, 2 words" in bundle.provenance


def everything(bundle):
    return bundle.train.images(range(len(bundle.train))), bundle.test.images(range(len(bundle.test)))


def overwrite(name, content):
    return lambda root: (root / name).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: shutil.rmtree(root), "no folder at .*; give a folder that holds WORD/NAME.wav"),
        (lambda root: [shutil.rmtree(f) for f in root.iterdir()], "no spoken word found in .*; lay the files out"),
        (
            overwrite("testing_list.txt", b"low/0.wav\nlow/9.wav\n"),
            "names 1 files that are not there; the first is low/9",
        ),
        (overwrite("low/0.wav", b"no sound"), "cannot read low/0.wav"),
        (
            lambda root: soundfile.write(root / "low/0.wav", tone(99, rate=8000), 8000),
            "8000 samples a second, not 16000",
        ),
        (lambda root: soundfile.write(root / "low/0.wav", np.zeros((9, 2)), RATE), "low/0.wav has 2 channels"),
        (lambda root: soundfile.write(root / "low/0.wav", np.zeros(0), RATE), "low/0.wav holds no sound"),
    ],
)
def test_mistakes_are_one_line(tmp_path, spoil, words) -> None:
    spoil(plant(tmp_path / "words"))
    with pytest.raises(UsageError, match=words) as raised:
        everything(load(tmp_path / "words"))
    assert "\n" not in str(raised.value)


def test_without_its_extra_the_message_names_it(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "librosa", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fedmjp\[speech\]'"):
        mfcc(tone(100))


@needs_espeak
def test_spoken_words_are_determined_by_seed_and_number() -> None:
    one, again, other = (load_data("spoken", size=FRAMES, seed=s, train_limit=2, test_limit=1) for s in (1, 1, 2))
    assert torch.equal(one.train.images([0, 1]), again.train.images([0, 1]))
    assert one.classes == list(spoken.WORDS)
    assert one.provenance.startswith("synthetic: 2 train and 1 test clips of 10 words by eSpeak NG")
    assert not torch.equal(one.train.images([0]), other.train.images([0]))
    assert [one.classes[k] for k in one.train.labels] == [name.split("/")[0] for name in one.train.ids]


def test_test_voices_are_not_used_in_training(monkeypatch) -> None:
    used: dict[bool, set[str]] = {}
    for test in (False, True):
        voices = used.setdefault(test, set())

        def speak(word, voice, speed, pitch, voices=voices):
            voices.add(voice.split("+")[1])
            return tone(300, 0.4)

        monkeypatch.setattr(spoken, "_speak", speak)
        clips = spoken.Spoken(test, 0, tuple(range(60)))
        assert all(clips(k).shape == (RATE,) and np.abs(clips(k)).max() <= 1 for k in range(60))
    assert used[False] == set(spoken.TRAIN_VOICES)
    assert used[True] == set(spoken.TEST_VOICES)
    assert not used[False] & used[True]


def test_without_espeak_the_message_names_it(monkeypatch) -> None:
    spoken.espeak.cache_clear()
    monkeypatch.setattr(spoken.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="needs the program espeak-ng"):
        load_data("spoken", size=FRAMES)
    spoken.espeak.cache_clear()
