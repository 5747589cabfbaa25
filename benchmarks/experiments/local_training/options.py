"""Options of the leakage of clients that train locally."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import AttackOptions, check_positive

ATTACKS = ("patch_embedding", "token_span", "batch_rounds", "batch_tokens")


@dataclass(frozen=True)
class Options(AttackOptions):
    """What leaks when clients take several local steps, use AdamW, or send batches under MJP?

    Clients return float32 weights: after 1, 2 and 8 steps of SGD on one image, at two rates (`patch_embedding`, and
    `token_span` with the position gradient withheld); after 2 steps on two images (`patch_embedding`, and
    `batch_rounds` over six such updates of four images); after the first step of AdamW (`patch_embedding` on its step
    taken for a gradient, and on what is left after it is undone), at two values of epsilon and of the rate; after its
    third step with the moments kept. Others send the gradient of one batch of two (`batch_tokens`), or under MJP six
    gradients of batches of two of four images (`batch_rounds`). The answer is scored against one image of the last
    update.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run, or adds models and
    images to a finished one.
    """

    model: str = "vit_mini_64"
    """A model that has a variant with the suffix _mjp."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path; those of
    the variant are auto."""
    image_size: int = 0
    """Pixels of a side, a multiple of the patches' (0: the model's own)."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int = 12
    """Most images, at least four."""
    attacks: tuple[str, ...] = ATTACKS
    """Of patch_embedding, token_span, batch_rounds and batch_tokens."""
    drift: float = 0.01
    """How far the weights move between updates, relative to their size."""
    seed: int = 0
    """Fixes random weights, masks and drift."""
    out: Path = Path("runs/local_training")
    """Folder of rows and tables (the committed ones stand in results/local_training)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images")
        if self.num_images < 4:
            raise UsageError("--num-images must be at least 4: updates of different images hold four")
        unknown = [name for name in self.attacks if name not in ATTACKS]
        if unknown or not self.attacks:
            raise UsageError(f"--attacks takes some of {', '.join(ATTACKS)}")
        super().validate()
