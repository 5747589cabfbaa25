"""The answer of an audit of one's own model: reconstructions, scores, verdict, and findings on the inputs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from attacks.findings import Finding
from fedmjp.audit.folder import DEFENSE, AuditFolder, Subject
from fedmjp.audit.verdict import Verdict
from fedmjp.records.images import image_path, save_image
from fedmjp.records.rows import METRICS, load_rows

FIRST = ("attack", "image", "psnr", "ssim")
LAST = ("known", "certified", "residual", "seconds", "diagnosis", "attack_parameters", "details", "flags")
PRINTED = (*FIRST, "lpips", "patch_recovery", "certified", "diagnosis")
WIDTH = 100  # of the printed paragraph, characters


@dataclass(frozen=True, repr=False)
class Audit:
    """The answer of `audit_gradient`; `print` shows the verdict, the findings and the table.

    Attributes:
        images: attack -> (B, C, H, W) reconstructions in [0, 1] in the order of the originals, or None.
        known: attack -> (B, 1, H, W) bool, the pixels that it vouches for, for those that say so.
        verdict: what the attacks amount to, and which were not run.
        diagnoses: attack -> why its answer is not to be trusted, for those that have a reason.
        not_run: registered attack -> why it did not run.
        findings: what was noticed about images, gradients and normalisation.
        rows: one line an image and attack, with all columns of a results file.
        originals: (B, C, H, W) in [0, 1].
        subject: what was audited.
        options: how `audit_gradient` was called.
    """

    images: Mapping[str, Tensor | None]
    known: Mapping[str, Tensor]
    verdict: Verdict
    diagnoses: Mapping[str, str]
    not_run: Mapping[str, str]
    findings: tuple[Finding, ...]
    rows: pd.DataFrame
    originals: Tensor
    subject: Subject
    options: Mapping[str, Any]

    @property
    def table(self) -> pd.DataFrame:
        """One line an image and attack or guess: attack, image, PSNR (dB), SSIM, then all other columns."""
        metrics = [name for name in METRICS if name not in FIRST]
        return self.rows[[*FIRST, *metrics, *LAST]]

    def save(self, folder: str | Path) -> Path:
        """Write rows.jsonl, run.json, the pictures and report.html, as `python -m fedmjp.simulate` does.

        Args:
            folder: a new or empty folder.

        Returns:
            Path of report.html.

        Raises:
            UsageError: the folder holds results already or cannot be written to.
        """
        from fedmjp.report import read_panels

        files = AuditFolder(Path(folder), self.subject)
        with files.log as log:
            for row in self.rows.to_dict("records"):
                log.append(row)
        place = int(self.rows["round"].iloc[0]), int(self.rows["client"].iloc[0])
        pictures = {"original": self.originals, "seen": self.originals, **self.images}
        pictures |= {f"{name}_known": known.float() for name, known in self.known.items()}
        for what, images in pictures.items():
            for index, image in enumerate(images if images is not None else ()):
                save_image(image, image_path(files.out, DEFENSE, *place, index, what))
        return files.finish(
            read_panels(files.out, load_rows(files.out / "rows.jsonl")),
            options=self.options,
            ran=list(self.images),
            not_run=self.not_run,
            device=self.rows["device"].iloc[0],
            notes=[self.verdict.headline(), *(finding.sentence for finding in self.findings)],
        )

    def __str__(self) -> str:
        sentences = [self.verdict.headline(), *(finding.sentence for finding in self.findings)]
        if self.not_run:
            sentences.append(f"not run: {', '.join(self.not_run)} (the attribute not_run says why)")
        paragraph = " ".join(f"{text[:1].upper()}{text[1:]}." for text in sentences)
        shown = self.table[list(PRINTED)].astype({"certified": object})
        table = shown.where(shown.notna(), "").to_string(
            index=False, float_format="{:.2f}".format, formatters={"diagnosis": _short}, justify="left"
        )
        return f"{textwrap.fill(paragraph, WIDTH)}\n\n{table}"

    def __repr__(self) -> str:
        return f"Audit({self.verdict.headline()!r})"


def _short(text: str) -> str:
    return textwrap.shorten(text, 60, placeholder=" ...")
