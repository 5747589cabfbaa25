"""Options of the leakage to a server that sets layers of the model that it sends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from experiments.fishing.options import Options as FishingOptions

if TYPE_CHECKING:
    from attacks import Attack, ThreatModel


@dataclass(frozen=True)
class Options(FishingOptions):
    """What does a server get out of a batch if it chooses the layers, or the tokens, of the model that it sends?

        python benchmarks/imprint.py                                             small ViT, 64 photographs, one update
        python benchmarks/imprint.py --attack-options imprint.calibrated=true
        python benchmarks/imprint.py --cases token_bins=mixed --rounds 16 --attack-options token_bins.slices=16
        python benchmarks/imprint.py --cases adapter_trap=mixed --defense adapters --batch-sizes 1 --clients 8

    As benchmarks/fishing.py, with attacks that set other parts of the model than the classifier: a layer of bins in
    front (imprint), the first MLP (token_bins), adapters (adapter_trap) or LoRA's factors (lora_trap). Each attack is
    granted what it uses, and no more.

    Writes rows.jsonl.gz, table.csv, batch.png (embedded photographs) and run.json to --out; --resume goes on with an
    unfinished run, or adds models and cases to a finished one.
    """

    adapts: ClassVar[bool] = True

    model: str = "vit_mini_64"
    """Plain model; the defence turns it into the variant it needs."""
    cases: tuple[str, ...] = ("imprint=mixed",)
    """ATTACK=LABELS: an attack that chooses what is sent, and the labels of a client's images: distinct, equal or
    mixed (as they come)."""
    batch_sizes: tuple[int, ...] = (64,)
    """Images of a client."""
    clients: int = 1
    """Clients for each case and batch size, with different images."""
    rounds: int = 1
    """Rounds that the server takes at most (0: one more than the client has images)."""
    out: Path = Path("runs/imprint")
    """Folder of rows, tables and figures (the committed ones stand in results/imprint)."""

    def threat_model(self, attack: Attack | None) -> ThreatModel:
        """See `FishingOptions.threat_model`: what the attack uses."""
        from attacks import ThreatModel  # imports torch

        return ThreatModel() if attack is None else ThreatModel(attack.used())
