"""Options of the leakage table and of the comparison with and without position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attacks import ATTACKS, ThreatModel, UsageError
from experiments.scaffold import RESULTS, DefendedOptions, SuiteOptions, WorkerOptions, check_positive
from fedmjp.budgets import AUTO
from fedmjp.config import ATTACKS_HELP, AuditConfig

AUTO_HELP = (
    f"{ATTACKS_HELP} Chosen for each model, block and kind of input by its first client's update: at the default "
    "budget a DeiT-S gets the closed forms (1 to 3 s an image, block and kind of input on one core), and the searches, "
    "which take 10 minutes an image, are left out."
)
PAPER_MODELS = ("vit_s", "deit_s", "deit_s_nope", "deit_s_mjp")


@dataclass(frozen=True)
class Options(DefendedOptions, SuiteOptions, WorkerOptions):
    """Reproduce the leakage table of the MJP paper (Table 5), on the paper's own block and on the one people train.

        python benchmarks/april_attack.py                          every model, on the embedded photographs
        python benchmarks/april_attack.py --model deit_s_mjp       that model's rows
        python benchmarks/april_attack.py --attacks april patch_embedding          the attacks of the committed table
        python benchmarks/april_attack.py --images DIR --num-images 200 --weights random vit_ti=FILE.safetensors
        python benchmarks/april_attack.py --defense noise --clip-norm 30

    Settings: (a) the client is undefended; (b) the client is defended, and the reconstruction is compared with what the
    model saw (under MJP the masked and jigsawed image); (c) as (b) without the unknown position embedding (models that
    have one); (d) as (b), compared with the original image.

    The april block (no norm, no residual) is the paper's protocol, that of the `breaching` package; standard is the
    block as people train it. The client's loss is the cross-entropy alone, as there.

    A model without position embeddings sends no gradient per token, so there is nothing to solve with, and its row says
    so. How the paper got its figures for such a model is not stated. A second row grants the server that gradient
    nevertheless (threat model `token_gradient`): as if a position embedding fixed at zero were trained and sent.

    Writes rows.jsonl.gz, table.csv, table_BLOCK.tex and .md, condition.png, reconstructions_BLOCK_SETTING.png and
    run.json to --out; --resume goes on with an unfinished run, or adds models, attacks and images to a finished one.
    """

    model: tuple[str, ...] = ()
    """Models to attack (none given: vit_s, deit_s, deit_s_nope, deit_s_mjp, every checkpoint that ships, and every
    model named in --weights)."""
    weights: tuple[str, ...] = ("auto",)
    """SOURCE for every model, or MODEL=SOURCE for one; a source is random, timm, auto (shipped weights, else random),
    long (of a longer training), or a checkpoint's path."""
    block: tuple[Literal["april", "standard"], ...] = ("april", "standard")
    """First block: the paper's (april) or the one people train (standard)."""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=AUTO_HELP)] = (AUTO,)
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name (its test images)."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int | None = 24
    """Most images (None: all of them)."""
    seeds: tuple[int, ...] = (0,)
    """Each fixes random weights and what the defence draws; a table's figures are means over them."""
    precision: Literal["float32", "float64"] = "float32"
    """Type of weights and gradients. float64 shows what round-off hides: clients send float32."""
    grants: tuple[str, ...] = AuditConfig().grants
    """What the adversary sees beyond an update; an attack that needs more is refused."""
    accuracy_data: str | None = None
    """Data set whose labels the checkpoints were trained for: fills the accuracy column of trained models."""
    accuracy_path: Path | None = None
    """Local copy of --accuracy-data."""
    accuracy_images: int = 1000
    """Test images behind an accuracy."""
    batch_size: int = 16
    """Clients a pass; halved when memory runs out."""
    out: Path = Path("runs/april_attack")
    """Folder of rows, tables and figures (the committed ones stand in results/april_attack)."""

    def sources(self) -> dict[str, str]:
        """Model -> source of its weights, in the order of the table.

        Raises:
            UsageError: an unknown model.
        """
        from fedmjp.models import split_name
        from fedmjp.models.weights import shipped_names

        named = dict(entry.split("=", 1) for entry in self.weights if _names_a_model(entry))
        general = next((entry for entry in self.weights if not _names_a_model(entry)), "auto")
        models = self.model or tuple(dict.fromkeys((*PAPER_MODELS, *shipped_names(), *named)))
        for model in (*models, *named):
            split_name(model)
        return {model: named.get(model, general) for model in models}

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "batch_size", "num_images", "accuracy_images")
        if not (self.seeds and self.block):
            raise UsageError("--seeds and --block each need at least one value")
        self.chosen_defense()
        self.sources()
        for name in self.named():
            ATTACKS.get(name)().require(ThreatModel.parse(self.grants), name)


def _names_a_model(entry: str) -> bool:
    """Whether an entry of --weights is MODEL=SOURCE; a path may hold "=" as well."""
    name, equals, _ = entry.partition("=")
    return bool(equals) and "/" not in name


@dataclass(frozen=True)
class ClaimOptions:
    """Are models without position embeddings easier to attack?

    The MJP paper says so (section 5.2, from Table 5). This command compares the same photographs, weights and attacks
    on a model with and without its position embedding, image by image, from the rows of `april_attack.py`. Positive
    differences of PSNR and SSIM and negative ones of LPIPS mean: easier to attack without. As sent, a model without
    position embeddings holds no gradient per token and no closed form runs on it; the comparison is with the server
    that is granted that gradient nevertheless (threat model `token_gradient`).

    Prints the table, and writes position_claim.csv and .md beside the rows.
    """

    rows: Path = RESULTS / "april_attack" / "rows.jsonl.gz"
    """Rows of april_attack.py."""
    model: str = "deit_s"
    """Model with position embeddings; its _nope variant is compared with it."""
