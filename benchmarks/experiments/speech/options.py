"""Options of the tables of speech."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import RowOptions, check_positive
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.data.catalog import SPEECH, require_kind
from fedmjp.training.config import UNAUGMENTED, Recipe, StartConfig, TrainConfig

SUPERVISED = "supervised"
# Words are shifted in time and nothing else (`fedmjp.training.augmentation`); the rate is Adam's 1e-3 at 16 words.
WORDS = dataclasses.replace(UNAUGMENTED, epochs=20, batch_size=16, learning_rate=0.032, warmup_epochs=2)


@dataclass(frozen=True)
class TrainingOptions(RowOptions):
    """Spoken words, supervised and after MP3.  Tables 5 and 6 of the MP3 paper.

        python benchmarks/speech.py --data speech:DIR

    Trains the paper's small Transformer (8 layers of 32 channels over frames of 40 MFCCs, fixed sinusoidal positions)
    on words by the code of `python -m fedmjp.train`, once a seed: from random weights, and from encoders that predicted
    places before, once for each of --pretraining-epochs. The default words are synthetic, spoken by espeak-ng: their
    figures cannot be compared with the paper's. Pre-trained encoders are kept in --pretrained. Writes rows.jsonl.gz,
    table.csv and run.json to --out.
    """

    data: str = "spoken"
    """spoken (by espeak-ng, synthetic), or speech:PATH (WORD/NAME.wav, as Speech Commands)."""
    train_limit: int | None = 600
    """Use a random subset of this many training words."""
    test_limit: int | None = 300
    """Evaluate on a random subset of this many test words."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each fixes weights, order, shifts and the words, for all lines alike."""
    recipe: Recipe = field(default_factory=lambda: WORDS)
    """How to train words, all lines alike."""
    pretraining_epochs: tuple[int, ...] = (20,)
    """Epochs of MP3 before it, a line each."""
    given: float = 0.05
    """Share of places that MP3 is given (the paper's)."""
    pretrained: Path = Path("runs/speech_pretrained")
    """Folder of the pre-trained encoders; what is there is not trained again."""
    threads: int = 1
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    out: Path = Path("runs/speech")
    """Folder of rows and table (the committed ones stand in results/speech)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "train_limit", "test_limit", "pretraining_epochs")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError("--seeds takes different numbers, at least one")
        self.config(self.seeds[0]).validate()
        for epochs in self.pretraining_epochs:
            self.pretraining_config(epochs, self.seeds[0]).validate()

    def lines(self) -> Iterator[tuple[str, int]]:
        """Name and epochs of pre-training of each line."""
        yield SUPERVISED, 0
        for epochs in self.pretraining_epochs:
            yield f"MP3 for {epochs} epochs, then {SUPERVISED}", epochs

    def config(self, seed: int, epochs: int = 0) -> TrainConfig:
        """The options of one supervised training; `epochs` of pre-training name the encoder that it starts from."""
        weights = self.pretraining_config(epochs, seed).out / "model.safetensors" if epochs else None
        return self._config(self.recipe, seed, start=StartConfig(weights))

    def pretraining_config(self, epochs: int, seed: int) -> TrainConfig:
        """The options of one pre-training, in a folder of its own."""
        recipe = dataclasses.replace(self.recipe, epochs=epochs, label_smoothing=0, warmup_epochs=epochs / 10)
        objective, out = f"mp3:eta=0,given={self.given}", self.pretrained / f"mp3-{epochs}-{seed}"
        return self._config(recipe, seed, objective=objective, out=out, resume=True)

    def _config(self, recipe: Recipe, seed: int, **more) -> TrainConfig:
        return TrainConfig(
            model=ModelConfig("speech_mini", "random"),
            data=DataConfig(self.data, None, self.train_limit, self.test_limit),
            recipe=recipe,
            precision="float32",
            device=self.device,
            threads=self.threads,
            seed=seed,
            **more,
        )


@dataclass(frozen=True)
class LeakOptions(RowOptions):
    """What an update of a model of speech says of its frames.

    A frame is a patch, and its tokenizer is linear, so that the closed form on the patch projection applies where the
    position embedding is learned: D equations for 100 frames. The paper's model has D = 32, and fixed sinusoidal
    positions, which send no gradient. This table varies both: widths, and fixed against learned positions. Weights are
    random; clients send the gradient of one word.

    Writes rows.jsonl.gz, table.csv and run.json to --out; --resume goes on with an unfinished run.
    """

    data: str = "spoken"
    """spoken (by espeak-ng, synthetic), or speech:PATH (WORD/NAME.wav, as Speech Commands)."""
    words: int = 12
    """Words, a client each."""
    widths: tuple[int, ...] = (32, 64, 128)
    """Channels D of the model; multiples of 16."""
    seed: int = 0
    """Fixes weights and words."""
    out: Path = Path("runs/speech_leak")
    """Folder of rows and table (the committed ones stand in results/speech_leak)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        check_positive(self, "words", "widths")
        require_kind(self.data, SPEECH, "this command")
        if any(width % 16 for width in self.widths):
            raise UsageError("--widths takes multiples of 16 (four heads, sines and cosines)")
