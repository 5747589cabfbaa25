"""Options of the tables of pre-trainings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attacks.registry import UsageError
from experiments.pretraining.shared_options import PretrainingOptions
from experiments.scaffold import check_positive
from fedmjp.objectives.droppos import DropPos
from fedmjp.training.config import Recipe, TrainConfig, default_config

# The 13 pre-trainings of Tables S1 to S3 of the DropPos supplement, by the names of the paper's lines. Its lines have
# tau = 0.1 unless they vary tau; here they have tau = inf, because at 0.1 a model as small as this one learns nothing.
INF = float("inf")
REFERENCE, PAPERS_REFERENCE = "tau_inf", "default"
TAUS: dict[str, dict[str, Any]] = {REFERENCE: {"tau": INF}, PAPERS_REFERENCE: {"tau": 0.1}, "tau_0.5": {"tau": 0.5}}
TRAININGS = TAUS | {
    "gamma_0": {"gamma": 0.0, "tau": INF},
    "gamma_0.25": {"gamma": 0.25, "tau": INF},
    "gamma_0.5": {"gamma": 0.5, "tau": INF},
    "gamma_pos_0.25": {"gamma_pos": 0.25, "tau": INF},
    "gamma_pos_0.5": {"gamma_pos": 0.5, "tau": INF},
    "gamma_pos_1": {"gamma_pos": 1.0, "tau": INF},
    "sigma_0": {"sigma": 0.0, "tau": INF},
    "sigma_1_constant": {"anneal": False, "tau": INF},
    "sigma_2_constant": {"sigma": 2.0, "anneal": False, "tau": INF},
    "sigma_2_annealed": {"sigma": 2.0, "tau": INF},
}
GAMMAS, GAMMAS_POS = (0.0, 0.25, 0.5, 0.75), (0.25, 0.5, 0.75, 0.95)  # the 16 cases that each is measured in
# Short; the rate was tried on `REFERENCE`, which at four times this one learns nothing.
SHORT = dataclasses.replace(
    default_config("droppos").recipe,
    epochs=2,
    batch_size=64,
    learning_rate=0.008,
    warmup_epochs=0.2,
    clip_gradient=1.0,
)
PICTURED = (REFERENCE, "gamma_0")  # trainings whose reassembled images are drawn


@dataclass(frozen=True)
class DropPosOptions(PretrainingOptions):
    """Position accuracy of DropPos.  Tables S1 to S3 of its supplement.

        python benchmarks/droppos.py --data-path DIR

    Pre-trains with each of 13 settings of gamma, gamma_pos, sigma and tau, and measures how many places are predicted
    in 16 cases: gamma 0, 0.25, 0.5, 0.75 by gamma_pos 0.25, 0.5, 0.75, 0.95. A training's rows are written when it
    ends, and for two of them pictures of images put together from predicted places. Writes rows.jsonl.gz, cells.csv,
    table.csv, table.md, cells.md and run.json to --out; --resume trains what is missing.
    """

    model: str = "vit_micro8_32"
    """A plain ViT. Of its 16 places more are found within 100,000 images than of vit_micro_32's 64."""
    recipe: Recipe = field(default_factory=lambda: SHORT)
    """How to train, all alike. The defaults are a short training."""
    precision: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Type of activations in training."""
    threads: int = 1
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    decoder_width: int = 64
    """Channels of the decoder (paper: 512, beside an encoder of 768)."""
    only: tuple[str, ...] = ()
    """Names of trainings (none given: all 13)."""
    out: Path = Path("runs/droppos")
    """Folder of rows and tables (the committed ones stand in results/droppos)."""

    def chosen(self) -> dict[str, DropPos]:
        """Name -> objective of each training."""
        names = self.only or tuple(TRAININGS)
        return {name: DropPos(decoder_width=self.decoder_width, **TRAININGS[name]) for name in names}

    def config(self, name: str, seed: int) -> TrainConfig:
        """The options of one training, as `python -m fedmjp.train` takes them."""
        settings = {"decoder_width": self.decoder_width, **TRAININGS[name]}
        entry = ",".join(f"{option}={_text(value)}" for option, value in settings.items())
        return self.training(f"droppos:{entry}", seed)

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        strange = [name for name in self.only if name not in TRAININGS]
        if strange:
            raise UsageError(f"unknown training {strange[0]!r}; choose from: {', '.join(TRAININGS)}")
        super().validate()
        check_positive(self, "decoder_width")
        for name in self.chosen():
            self.config(name, self.seeds[0]).validate()


def _text(value: Any) -> str:
    """A value as --objective takes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
