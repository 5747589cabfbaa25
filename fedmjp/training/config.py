"""The options of central training: the only place where their defaults stand.

The recipe's defaults are Table 6 of the MJP paper. What the table leaves open follows DeiT, whose recipe it names, and
is marked so below. Departs from it: timm's increasing posterisation keeps 0 bits at magnitude 10, which Pillow refuses,
so magnitudes are clipped at 9.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from attacks.registry import UsageError
from fedmjp.config import DEFENSE_HELP, OBJECTIVE_HELP, DataConfig, EncoderConfig, ModelConfig
from fedmjp.data.augmentations import DEIT, Augmentation
from fedmjp.data.catalog import IMAGES, LABEL_MAPS, SPEECH, require_kind
from fedmjp.defenses import Defense
from fedmjp.defenses.chain import read_defense
from fedmjp.defenses.options import defense_options, option_names
from fedmjp.models import MODELS, split_name
from fedmjp.models.registry import check_drop_rate
from fedmjp.objectives import OBJECTIVES, Objective, read_objective
from fedmjp.settings import split_entry

# Options that earlier trainings lacked, at what they did: left out of what is recorded, so that those stay the same.
LATER = {
    "recipe": {"optimizer": "adamw", "momentum": 0.0, "mirror": 0.5, "colour": 0.0},
    "start": {"dropout": 0.0},
}

# Images that the paper's recipe sees: 300 epochs of ImageNet-1k.
PAPER_IMAGES = 300 * 1_281_167


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults are the paper's, for ImageNet on eight GPUs."""

    epochs: int = 300
    """Passes over the training images."""
    batch_size: int = 1024
    """Images a step, an even number."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """adamw, sgd, or muon: orthogonalised Nesterov momentum for matrices and NAdamW for the rest, as in timm, where a
    matrix's step has the size of AdamW's (Liu et al., arXiv 2502.16982), so that one learning rate serves both."""
    learning_rate: float = 5e-4
    """Peak rate per 512 images of the batch (1024 images: twice that)."""
    momentum: float = 0.0
    """Momentum of sgd (Nesterov's is not used)."""
    weight_decay: float = 0.05
    """Decay of weights; biases, norms, class token and position embeddings are not decayed."""
    warmup_epochs: float = 20
    """Epochs of linear warm-up before the cosine."""
    label_smoothing: float = DEIT.label_smoothing
    """Share of the label spread over all classes."""
    clip_gradient: float = 1.0
    """Largest norm of a step's gradient, 0 for none (the paper clips but names no norm)."""
    repeats: int = 3
    """Repeated augmentation: times an image appears in the order of an epoch, whose length stays (3: DeiT)."""
    rand_augment: str = DEIT.rand_augment
    """timm's RandAugment string, or none."""
    smallest_crop: float = DEIT.smallest_crop
    """Smallest share of an image's area that a random crop takes (0.08: DeiT)."""
    mixup: float = DEIT.mixup
    """Alpha of Mixup, 0 for none."""
    cutmix: float = DEIT.cutmix
    """Alpha of CutMix, 0 for none; with both, each step draws one of them (DeiT)."""
    erasing: float = DEIT.erasing
    """Probability that a rectangle of an image is erased by noise."""
    mirror: float = DEIT.mirror
    """Probability that an image is mirrored."""
    colour: float = DEIT.colour
    """Largest relative change of brightness, contrast and saturation (not with --rand-augment)."""

    def augmentation(self) -> Augmentation:
        """The part of the recipe that changes images and labels."""
        names = {field.name for field in dataclasses.fields(Augmentation)}
        return Augmentation(**{name: value for name, value in vars(self).items() if name in names})


@dataclass(frozen=True)
class StartConfig(EncoderConfig):
    """What training starts from, and what fine-tuning adds to the recipe."""

    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the one before it (DropPos fine-tunes with 0.8; 1: none)."""
    drop_path: float = 0.0
    """Largest probability that a block is skipped, rising linearly with depth (MP3 and fine-tuning in DropPos: 0.1)."""
    dropout: float = 0.0
    """Probability that an activation is set to zero, on the tokens and after the linear layers of a block (queries,
    keys and values excepted)."""

    def validate(self, model: ModelConfig) -> None:
        """Check the options.

        Raises:
            UsageError: out of range, or see `EncoderConfig.validate`.
        """
        super().validate(model)
        if not 0 < self.layer_decay <= 1:
            raise UsageError(f"--layer-decay must lie in (0, 1], not {self.layer_decay}")
        check_drop_rate("--drop-path", self.drop_path, model.model)
        check_drop_rate("--dropout", self.dropout, model.model)


# The recipe with every augmentation left out, for short trainings that name the rest themselves.
UNAUGMENTED = Recipe(repeats=1, rand_augment="none", smallest_crop=1, mixup=0, cutmix=0, erasing=0)


@dataclass(frozen=True)
class TrainConfig:
    """Train a Vision Transformer in one place, on the model, data, loss and defence that a federation's clients use."""

    defense: Annotated[str, tyro.conf.arg(help=DEFENSE_HELP.replace("compare, one federation each", "train under"))] = (
        "none"
    )
    objective: Annotated[str, tyro.conf.arg(help=OBJECTIVE_HELP)] = "supervised"
    model: ModelConfig = field(default_factory=lambda: ModelConfig(weights="random"))
    data: DataConfig = field(default_factory=lambda: DataConfig(test_limit=None))
    recipe: Recipe = field(default_factory=Recipe)
    start: StartConfig = field(default_factory=StartConfig)
    options: DefenseOptions = field(default_factory=lambda: DefenseOptions())  # type: ignore[valid-type]
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations: bfloat16 through autocast, or float32; auto takes bfloat16 on a GPU and on a CPU that has
    instructions for it, and float32 elsewhere. What was taken is recorded."""
    workers: int = 0
    """Processes that prepare images (0: this one). Another number draws other augmentations."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    threads: int = 0
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    seed: int = 0
    """Fixes weights, order, augmentation and masks."""
    out: Path = Path("runs/train")
    """Folder of checkpoint, history, weights and model card (left at its default, a folder in it is named after the
    time)."""
    resume: bool = False
    """Go on with the unfinished training in --out; it ends in the same bits as an unbroken one."""

    def defence(self) -> Defense:
        """The defence with this run's options, and then those of the entry itself.

        Raises:
            UsageError: no such defence, or one of another package that cannot be imported.
        """
        return read_defense(self.defense, lambda name: getattr(self.options, name, None))

    def chosen_objective(self) -> Objective:
        """What is trained.

        Raises:
            UsageError: see `read_objective`.
        """
        return read_objective(self.objective)

    def model_name(self) -> str:
        """The variant of --model that is trained."""
        return self.defence().model_name(self.chosen_objective().model_name(self.model.model))

    def activations(self) -> Literal["float32", "bfloat16"]:
        """The type of activations that `precision` and `device` mean on this machine."""
        if self.precision != "auto":
            return self.precision
        return "bfloat16" if self.device.startswith("cuda") or cpu_has_bfloat16() else "float32"

    def identity(self) -> dict[str, Any]:
        """Everything that decides about the weights, as plain values."""
        values = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        values["options"] = {self.defense: json.loads(json.dumps(self.defence().parameters(), default=str))}
        values["precision"] = self.activations()
        for group, options in LATER.items():
            values[group] = {k: v for k, v in values[group].items() if k not in options or v != options[k]}
        return {k: v for k, v in values.items() if k not in ("out", "resume")}

    def validate(self) -> None:
        """Check the options.

        Raises:
            UsageError: one line that names the option and its range.
        """
        self.defence().validate()
        split_name(self.model.model)
        self.chosen_objective().check(self.model.model, self.defence())
        self.defence().check(self.chosen_objective(), self.recipe.augmentation())
        self._validate_labels()
        self.start.validate(self.model)
        self.model.side()
        self._validate_kind()
        if self.model.block != "standard":
            raise UsageError(f"--block {self.model.block} is a block to attack; train with --block standard")
        recipe = self.recipe
        for option in ("epochs", "batch_size", "repeats"):
            if getattr(recipe, option) < 1:
                raise UsageError(f"{_flag(option)} must be at least 1, not {getattr(recipe, option)}")
        if recipe.batch_size % 2:
            raise UsageError(f"--batch-size must be even (Mixup pairs images), not {recipe.batch_size}")
        for option in ("weight_decay", "warmup_epochs", "clip_gradient", "mixup", "cutmix"):
            if getattr(recipe, option) < 0:
                raise UsageError(f"{_flag(option)} must not be negative, but is {getattr(recipe, option)}")
        for option in ("label_smoothing", "erasing", "mirror", "colour"):
            if not 0 <= getattr(recipe, option) <= 1:
                raise UsageError(f"{_flag(option)} must lie in [0, 1], not {getattr(recipe, option)}")
        if not 0 < recipe.smallest_crop <= 1:
            raise UsageError(f"--smallest-crop must lie in (0, 1], not {recipe.smallest_crop}")
        if recipe.learning_rate <= 0:
            raise UsageError(f"--learning-rate must be positive, not {recipe.learning_rate}")
        if recipe.warmup_epochs >= recipe.epochs:
            raise UsageError(f"--warmup-epochs {recipe.warmup_epochs:g} must be fewer than --epochs {recipe.epochs}")
        if recipe.rand_augment != "none" and not recipe.rand_augment.startswith("rand-"):
            raise UsageError(f"--rand-augment takes none or timm's rand-..., not {recipe.rand_augment!r}")
        if recipe.colour and recipe.rand_augment != "none":
            raise UsageError("--colour and --rand-augment both change colours; pass --rand-augment none or --colour 0")
        if not 0 <= recipe.momentum < 1:
            raise UsageError(f"--momentum must lie in [0, 1), not {recipe.momentum}")
        if recipe.momentum and recipe.optimizer != "sgd":
            raise UsageError(f"--momentum is sgd's; leave it out with --optimizer {recipe.optimizer}")
        if self.workers < 0 or self.threads < 0 or self.seed < 0:
            raise UsageError("--workers, --threads and --seed must not be negative")

    def _validate_kind(self) -> None:
        """Data, model and objective are of images, of label maps, or of speech."""
        model, recipe = self.model.model, self.recipe
        if not MODELS.get(split_name(model)[0]).speech:
            kind = LABEL_MAPS if self.chosen_objective().per_pixel else IMAGES
            require_kind(self.data.data, kind, f"--objective {self.objective}")
            return
        if self.chosen_objective().per_pixel:
            raise UsageError(f"--objective {self.objective} needs a model of images, not {model}")
        require_kind(self.data.data, SPEECH, f"--model {model}")
        unused = {"rand_augment": "none", "smallest_crop": 1, "mixup": 0, "cutmix": 0, "erasing": 0}
        unused |= {name: LATER["recipe"][name] for name in ("mirror", "colour")}
        wrong = [f"{_flag(o)} {value}" for o, value in unused.items() if getattr(recipe, o) != value]
        if wrong:
            raise UsageError(f"--model {model} hears words, which are shifted in time only; pass {' '.join(wrong)}")

    def _validate_labels(self) -> None:
        """Mixing images and smoothing labels are of no use to an objective without labels, or with label maps."""
        recipe, objective = self.recipe, self.chosen_objective()
        used = [_flag(o) for o in ("mixup", "cutmix", "label_smoothing") if getattr(recipe, o) > 0]
        off = " ".join(f"{flag} 0" for flag in used)
        if used and not objective.needs_labels:
            raise UsageError(f"--objective {self.objective} has no labels to mix or smooth; pass {off}")
        if used and objective.per_pixel:
            raise UsageError(
                f"--objective {self.objective} has label maps, which are not mixed or smoothed; pass {off}"
            )
        if recipe.rand_augment != "none" and objective.per_pixel:
            raise UsageError(
                f"--rand-augment would move pixels away from the labels of --objective {self.objective}; pass none"
            )


def default_config(objective: str) -> TrainConfig:
    """The defaults of `fedmjp.train --objective ENTRY`: `TrainConfig` with the recipe of the objective's paper.

    Raises:
        UsageError: no such objective.
    """
    own = OBJECTIVES.get(split_entry(objective, "--objective")[0]).recipe
    names = {field.name for field in dataclasses.fields(StartConfig)}
    start = StartConfig(**{name: value for name, value in own.items() if name in names})
    recipe = Recipe(**{name: value for name, value in own.items() if name not in names})
    return TrainConfig(objective=objective, recipe=recipe, start=start)


def cpu_has_bfloat16() -> bool:
    """Whether this machine's CPU multiplies bfloat16 matrices by instructions of its own (AVX512-BF16 or AMX).

    Others emulate them, which is slower than float32.
    """
    import torch  # the command line is parsed without it

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


# A group of options a defence; only now are the names known that the other options take.
DefenseOptions = defense_options(option_names(TrainConfig))


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
