"""Options of the leakage of messages of low precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import AttackOptions, check_positive

ATTACKS = ("patch_embedding", "token_span", "mjp_subspace", "mjp_rounds", "unmix", "sparse_rounds", "gauss_newton")
RETURNED, DECAYED, FEEDBACK = "returned weights", "weight decay", " with feedback"
# Message -> entry of the defence that makes it; none for those that a client's recipe makes.
PRECISIONS = {
    "float32": "none",
    "float16": "quantise:quantise_format=float16",
    "bfloat16": "quantise:quantise_format=bfloat16",
    "int8 per channel": "quantise:quantise_per=row",
    "int8 stochastic per channel": "quantise:quantise_per=row,quantise_rounding=stochastic",
    "int8 per tensor": "quantise",
    "int8 stochastic per tensor": "quantise:quantise_rounding=stochastic",
    "int4 per channel": "quantise:quantise_format=int4,quantise_per=row",
    "int4 stochastic per channel": "quantise:quantise_format=int4,quantise_per=row,quantise_rounding=stochastic",
    "int4 per tensor": "quantise:quantise_format=int4",
    "signs per channel": "quantise:quantise_format=sign,quantise_per=row",
    "signs per tensor": "quantise:quantise_format=sign",
    "largest 30 %": "topk:topk_share=0.3",
    "largest 10 %": "topk:topk_share=0.1",
    "largest 1 %": "topk:topk_share=0.01",
    "largest 30 % of the update": "topk:topk_share=0.3,topk_over=update",
    "largest 10 % of the update": "topk:topk_share=0.1,topk_over=update",
    "random 30 %": "topk:topk_share=0.3,topk_choice=random",
    "random 10 %": "topk:topk_share=0.1,topk_choice=random",
    "random 1 %": "topk:topk_share=0.01,topk_choice=random",
    f"largest 30 %{FEEDBACK}": "topk:topk_share=0.3,topk_feedback=true",
    f"largest 10 %{FEEDBACK}": "topk:topk_share=0.1,topk_feedback=true",
    f"largest 1 %{FEEDBACK}": "topk:topk_share=0.01,topk_feedback=true",
    RETURNED: "none",
    DECAYED: "none",
}


@dataclass(frozen=True)
class Options(AttackOptions):
    """How much do closed forms lose when a message has fewer digits, and how much do the known errors give back?

    One image an update. `patch_embedding`, `token_span` and `gauss_newton`, which refines the answer of the first and
    reads rounded messages alone, take the update of an undefended client of --model, `mjp_subspace` and `unmix` the
    last and `mjp_rounds` all of --updates updates of a client under MJP with --gamma (its variant with the suffix _mjp;
    every step jigsawed, with its localisation loss, weights drifting by --drift between two of them). Every message is
    sent in each of --precisions. Attacks that know the errors of a message's entries run twice, without and with them;
    weight decay is left in the update for the first and removed for the second. Of small images --bounds adds what no
    unbiased estimate from the equations of `patch_embedding` goes below, and from those of `gauss_newton`; of the
    former also what no estimate does where pixels are normal.

    `sparse_rounds` reads --sparse-updates updates, weights drifting likewise, of an undefended client that sends a
    share of the entries; messages with feedback are for it alone.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run, or adds models and
    images to a finished one.
    """

    model: str = "vit_mini_64"
    """A model that has a variant with the suffix _mjp."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    """Of the message."""
    attacks: tuple[str, ...] = ATTACKS
    """Of patch_embedding, token_span, mjp_subspace, mjp_rounds, unmix, sparse_rounds and gauss_newton."""
    bounds: bool = False
    """Also the Cramer-Rao bounds of the equations of patch_embedding and gauss_newton, of images up to 4,096 values;
    of gauss_newton for rounded messages that leave no entries out."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int = 12
    """Most images."""
    gamma: float = 0.1
    """MJP's masking ratio."""
    updates: int = 6
    """Of a client under MJP."""
    sparse_updates: int = 40
    """Of a client that sends a share of the entries."""
    drift: float = 1e-3
    """Change of the weights between two updates, relative."""
    rate: float = 1e-3
    """Learning rate of the clients that return weights."""
    decay: float = 0.05
    """Weight decay of the clients that add it."""
    seed: int = 0
    """Fixes random weights and masks."""
    out: Path = Path("runs/message_precision")
    """Folder of rows and tables (the committed ones stand in results/message_precision)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "updates", "sparse_updates")
        for kind, given, known in (("precisions", self.precisions, PRECISIONS), ("attacks", self.attacks, ATTACKS)):
            unknown = [name for name in given if name not in known]
            if unknown or not given:
                named = f"{unknown[0]!r} is none of" if unknown else "needs at least one of"
                raise UsageError(f"--{kind}: {named} {', '.join(known)}")
        if not 0 < self.gamma < 1:
            raise UsageError("--gamma must lie between 0 and 1")
        if not (self.rate > 0 and self.decay > 0):
            raise UsageError("--rate and --decay must be positive")
        super().validate()
