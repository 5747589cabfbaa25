"""Provenance of a number: commit, package versions, device."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attacks.arithmetic import is_exact
from attacks.registry import UsageError
from fedmjp import __version__

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "flwr",
    "flwr-datasets",
    "datasets",
    "lpips",
    "scikit-image",
    "numpy",
    "pandas",
)


# The folders of an absolute path at the beginning of an argument or of a value in it (MODEL=PATH, folder:PATH).
FOLDERS = re.compile(r"(^|[=:,])/(?:[^/,=:]+/)*(?=[^/,=:])")


# Options whose values are nobody else's business.
SECRETS = re.compile(r"token|password|passwd|secret|credential|api[-_]?key|private[-_]?key|^--ray$", re.IGNORECASE)


@lru_cache
def commit() -> str:
    """Short git commit of the source tree, with "-dirty" for uncommitted changes; outside a checkout `source()`."""
    root = Path(__file__).resolve().parent.parent.parent

    def git(*arguments: str) -> str:
        """What git answers about this copy; CalledProcessError where it is no checkout."""
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return source()
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return source()


@lru_cache
def source() -> str:
    """A digest of the code and the weights that this process runs: equal copies of the project have equal ones."""
    root, digest = Path(__file__).resolve().parent.parent.parent, hashlib.sha256()
    for folder in ("attacks", "fedmjp"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".safetensors"):
                digest.update(f"{file.relative_to(root).as_posix()}:{file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    return f"source-{digest.hexdigest()[:10]}"


def versions() -> dict[str, str]:
    """Version of each package that can affect results; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """The device in words, for example "cpu (x86_64 AVX512, 2 threads)"; float32 products in fewer digits are named.

    The instructions that torch's kernels use are named because they decide how sums are rounded.
    """
    name, machine = device.type, f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, "
    if device.type == "cuda":
        name, machine = torch.cuda.get_device_name(device), ""
    coarse = "" if is_exact() else ", float32 products in fewer digits"
    return f"{name} ({machine}{torch.get_num_threads()} threads{coarse})"


def columns(device: torch.device) -> dict[str, str]:
    """The columns of a results row that describe code, versions and device."""
    return {
        "commit": commit(),
        "version": __version__,
        "torch_version": torch.__version__,
        "device": device_name(device),
    }


def run_id(options: Mapping[str, Any]) -> str:
    """A short id of the options that affect results: equal options have equal ids.

    Args:
        options: as JSON-serialisable values.

    Returns:
        Ten hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:10]


def require_same(out: Path, noun: str, before: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse to continue in a folder what was begun with other options or by other code: their rows must not mix.

    Args:
        out: the folder.
        noun: what it holds, such as "run".
        before: the folder's description, with the entries config and commit.
        config: the options now, as plain values.

    Raises:
        UsageError: an option or the commit differs.
    """
    if changed := sorted(_changed(before["config"], config)):
        raise UsageError(
            f"{out} holds a {noun} with another {', '.join(changed)}; resume with the same options or pass another "
            "--out"
        )
    if before["commit"] != commit():
        raise UsageError(
            f"{out} was begun at commit {before['commit']}, this is {commit()}; check out that commit to resume, or "
            "pass another --out"
        )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Names of the options that differ, at any depth."""
    found: set[str] = set()
    for key, value in now.items():
        if isinstance(value, dict):
            found |= _changed(before.get(key) or {}, value)
        elif before.get(key) != value:
            found.add(key)
    return found


def command(program: str) -> str:
    """The command line of this process, with `program` for what was started.

    Of an absolute path only its last part stays (`.../cifar10`), because results are published and the folders of one
    machine mean nothing on another. For the same reason the value of an option that holds a secret is "***".
    """
    arguments, hidden = [], False
    for argument in sys.argv[1:]:
        option, equals, value = argument.partition("=")
        secret = bool(SECRETS.search(option)) and argument.startswith("-")
        if hidden or (secret and equals):
            argument = f"{option}=***" if secret and value else "***"
        hidden = secret and not equals
        arguments.append(shlex.quote(FOLDERS.sub(r"\1.../", argument)))
    return " ".join([program, *arguments]).encode("utf-8", "backslashreplace").decode()
