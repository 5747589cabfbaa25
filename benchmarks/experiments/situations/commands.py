"""Situations of a run of `python -m fedmjp.simulate`, on a small ViT."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from experiments.situations.answers import Answer, of_command

SMALL = "--model vit_mini_32 --weights random --clients 3 --audit-clients 1 --rounds 2 --test-limit 8 --threads 1"


def run(options: str = "", small: str = SMALL) -> Callable[[], Answer]:
    """A run with these options, as a function without arguments."""

    def ask() -> Answer:
        with tempfile.TemporaryDirectory() as folder:
            return of_command([*small.split(), *options.split()], Path(folder) / "run")

    return ask


def raising() -> Answer:
    """A run in which one attack's code fails."""
    from attacks import ATTACKS

    def fail(*_: object) -> None:
        raise RuntimeError("the matrix is singular")

    with patch.multiple(ATTACKS.get("april"), reconstruct=fail, reconstruct_many=fail):
        return run("--attacks patch_embedding april --defense none")()


FEWER = SMALL.replace("--audit-clients 1", "")
COMMANDS: dict[str, tuple[str, Callable[[], Answer]]] = {
    "no_defence": ("no defence: `--defense none`", run("--defense none")),
    "default_mjp": ("MJP as it comes: `--defense mjp` (γ = 0.9)", run("--defense mjp")),
    "low_gamma": ("`--defense mjp --gamma 0.1`", run("--defense mjp --gamma 0.1")),
    "gamma_one": ("every patch masked: `--defense mjp --gamma 1.0`", run("--defense mjp --gamma 1.0")),
    "gamma_zero": ("no patch masked, localisation loss on: `--defense mjp --gamma 0`", run("--defense mjp --gamma 0")),
    "two_gammas": ("two settings of one defence: `--defense mjp:gamma=0.1 mjp:gamma=0.9`",
                   run("--defense mjp:gamma=0.1 mjp:gamma=0.9")),
    "two_steps": ("two local steps: `--update weights --local-steps 2`", run("--update weights --local-steps 2")),
    "batch_of_eight": ("a batch of eight: `--batch-size 8`", run("--batch-size 8")),
    "frozen_positions": ("position embeddings are not trained: `--defense frozen_positions`",
                         run("--defense frozen_positions")),
    "noise": ("clipping and noise as they come: `--defense noise`", run("--defense noise")),
    "naive_attacks": ("only attacks that do not know MJP: `--defense mjp --attacks patch_embedding april`",
                      run("--defense mjp --attacks patch_embedding april")),
    "wrong_block": ("only an attack whose block is missing: `--attacks april`", run("--attacks april")),
    "raising_attack": ("the code of an attack raises an exception", raising),
    "large_batch": ("a batch larger than a client's data: `--clients 8 --batch-size 16`",
                    run("--clients 8 --batch-size 16 --rounds 1", FEWER.replace("--clients 3", ""))),
    "no_audit_clients": ("`--audit-clients` without a client", run("--audit-clients", FEWER)),
    "steps_without_search": ("`--attacks patch_embedding --steps 50`: no attack takes steps",
                             run("--attacks patch_embedding --steps 50")),
    "unwritable_out": ("`--out` cannot be written", run("--out /dev/null/run")),
    "typo_defence": ("a typing error: `--defense mpj`", run("--defense mpj")),
    "typo_option": ("a typing error: `--defense mjp --gama 0.5`", run("--defense mjp --gama 0.5")),
}  # fmt: skip
