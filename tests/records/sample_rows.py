"""Rows, rounds and run.json of an invented run, for the tests of records and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedmjp.records.rows import METRICS, RowLog

PSNR = {"mean_image": 12.5, "other_image": 9.8, "closed_form": 68.0, "optimise_match": 19.0, "april_analytic": None}
SHIFT = {"none": 0.0, "mjp": -8.0}
REFUSAL = "the gradient of pos_embed is zero for masked patches: the linear system has no unique solution"


def make_row(**changes: Any) -> dict[str, Any]:
    """One valid row; `changes` override single keys."""
    row = {
        "run_id": "sample",
        "commit": "0123abc",
        "version": "0.1.0",
        "torch_version": "2.9",
        "seed": 7,
        "device": "cpu",
        "dataset": "faces",
        "model": "vit_tiny",
        "weights": "random, seed 7",
        "block": "standard",
        "defense": "none",
        "defense_parameters": {"ratio": 0.3},
        "objective": "supervised",
        "objective_parameters": {},
        "setting": "trained 1 round",
        "precision": "float32",
        "update": "gradient",
        "batch_size": 1,
        "local_steps": 1,
        "attack": "closed_form",
        "attack_parameters": {"steps": 200},
        "threat_model": ["model weights", "gradient"],
        "round": 1,
        "client": 0,
        "image": 0,
        "image_id": "face_0001",
        "gradient_norm": 1.5,
        "mse": 0.01,
        "psnr": 20.0,
        "ssim": 0.5,
        "fft2d": 0.1,
        "fft2d_official": 0.2,
        "lpips": None,
        "patch_recovery": 0.25,
        "any_place": 0.25,
        "known": None,
        "certified": None,
        "residual": None,
        "seconds": 1.25,
        "diagnosis": "",
        "details": {},
        "flags": [],
    }
    return row | changes


def make_rows(rounds: int = 3, clients: int = 4) -> list[dict[str, Any]]:
    """Rows of two defences, three attacks (one of which fails under mjp) and the two baselines."""
    draw = np.random.default_rng(0)
    rows = []
    for defense, shift in SHIFT.items():
        for attack, level in PSNR.items():
            for number in range(1, rounds + 1):
                for client in range(clients):
                    place = {"defense": defense, "attack": attack, "round": number, "client": client}
                    place["image_id"] = f"face_{client:04d}"
                    rows.append(make_row(**place, **_scores(draw, attack, level, shift, defense)))
    return rows


def _scores(draw: np.random.Generator, attack: str, level: float | None, shift: float, defense: str) -> dict[str, Any]:
    if level is None and defense == "mjp":
        return dict.fromkeys(METRICS) | {"diagnosis": REFUSAL}
    level = 118.0 if level is None else level
    psnr = level + (0 if "image" in attack else shift) + draw.normal(0, 1.2)
    closeness = 1 / (1 + np.exp(-(psnr - 20) / 6))
    scores = {"psnr": psnr, "mse": 10 ** (-psnr / 10), "ssim": closeness, "patch_recovery": round(closeness, 1)}
    return scores | {"fft2d": 1 - closeness, "fft2d_official": 0.5 - closeness / 2}


def write_run(out: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    """Write rows.jsonl, rounds.csv and run.json as a run does; returns `out`."""
    with RowLog(out / "rows.jsonl") as log:
        for row in rows:
            log.append(row)
    lines = ["defense,round,loss,accuracy,seconds"]
    for index, defense in enumerate(SHIFT):
        lines += [f"{defense},{r},{2.3 / (r + 1) + 0.1 * index},{0.9 - 0.5 / r - 0.03 * index},4.2" for r in (1, 2, 3)]
    (out / "rounds.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = {
        "run_id": "sample",
        "command": "fedmjp-simulate --defenses none mjp --rounds 3 --seed 7",
        "config": {"model": {"name": "vit_tiny", "patch_size": 8}, "rounds": 3, "defenses": ["none", "mjp"]},
        "versions": {"fedmjp": "0.1.0", "torch": "2.9"},
        "commit": "0123abc",
        "device": "cpu",
        "seed": 7,
        "weights": {"vit_tiny": "random, seed 7"},
        "data": {"name": "faces", "provenance": "scikit-image, public domain", "skipped": ["face_0009 (too small)"]},
        "finished": True,
    }
    (out / "run.json").write_text(json.dumps(run | changes), encoding="utf-8")
    return out
