"""What may be resumed: the same options, at any depth, at the same commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attacks import UsageError
from fedmjp.records import provenance

OPTIONS = {"seed": 0, "defenses": {"weak": {"gamma": 0.1}, "strong": {"gamma": 0.9}}}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"seed": 1, "defenses": OPTIONS["defenses"]}, "another seed"),
        ({"seed": 0, "defenses": {"weak": {"gamma": 0.2}, "strong": {"gamma": 0.9}}}, "another gamma"),
        ({"seed": 0, "defenses": {"new": {"gamma": 0.1}}}, "another gamma"),
    ],
)
def test_other_options_are_refused(now: dict, said: str) -> None:
    before = {"config": OPTIONS, "commit": provenance.commit()}
    provenance.require_same(Path("out"), "run", before, OPTIONS)
    with pytest.raises(UsageError, match=f"out holds a run with {said}; resume with the same options"):
        provenance.require_same(Path("out"), "run", before, now)


def test_another_commit_is_refused() -> None:
    with pytest.raises(UsageError, match="out was begun at commit abc1234"):
        provenance.require_same(Path("out"), "run", {"config": OPTIONS, "commit": "abc1234"}, OPTIONS)


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("/home/me/cifar10", ".../cifar10"),
        ("vit_ti=/home/me/weights/vit.safetensors", "vit_ti=.../vit.safetensors"),
        ("folder:/home/me/pictures/", "folder:.../pictures/"),
        ("runs/cifar10", "runs/cifar10"),
        ("mjp:gamma=0.1,dal=none", "mjp:gamma=0.1,dal=none"),
        ("position embedding", "'position embedding'"),
    ],
)
def test_a_recorded_command_does_not_say_where_a_machine_keeps_its_files(argument, recorded, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark.py", "--data", argument])
    assert provenance.command("python benchmark.py") == f"python benchmark.py --data {recorded}"


def test_no_committed_record_holds_an_absolute_path() -> None:
    def strings(value: object) -> list[str]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [value] if isinstance(value, str) else [text for part in parts for text in strings(part)]

    records = sorted((Path(__file__).parents[2] / "results").rglob("run.json"))
    assert len(records) > 20
    for record in records:
        words = " ".join(strings(json.loads(record.read_text(encoding="utf-8")))).split()
        assert words
        assert not [word for word in words if provenance.FOLDERS.search(word)], record


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--token", "abc", "--seed", "1"], "run --token '***' --seed 1"),
        (["--hub.api-key=abc"], "run '--hub.api-key=***'"),
        (["--ray", "10.0.0.7:6379", "--workers", "4"], "run --ray '***' --workers 4"),
        (["--password=abc", "token"], "run '--password=***' token"),
        (["--out", "/home/me/runs"], "run --out .../runs"),
    ],
)
def test_a_command_line_keeps_no_secrets_and_no_folders(monkeypatch, given, kept) -> None:
    monkeypatch.setattr("sys.argv", ["program", *given])
    assert provenance.command("run") == kept


def test_outside_a_checkout_the_code_itself_is_named(monkeypatch) -> None:
    """A commit that is "unknown" everywhere would let a run be resumed by other code."""

    def no_git(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(provenance.subprocess, "run", no_git)
    provenance.commit.cache_clear()
    assert re.fullmatch("source-[0-9a-f]{10}", provenance.commit())
    provenance.commit.cache_clear()
