"""Options of the measures of trained models."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import DeviceOptions, RowOptions
from experiments.trained_models.subjects import Subject, read_subjects
from fedmjp.defenses import DEFENSES

# The order of ImageNet-C: noise, blur, weather, digital.
CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
CLEAN = "none"
SEVERITIES = (1, 2, 3, 4, 5)
PROJECTIONS = {"pca": "PCA", "umap": "UMAP"}


@dataclass(frozen=True)
class TrainedOptions(DeviceOptions):
    """Trained models and the test images on which they are measured."""

    model: tuple[str, ...] = ()
    """MODEL for its shipped checkpoint, or MODEL=FILE, several times for several trainings of it in the order of their
    seeds (none given: every shipped 64-pixel checkpoint)."""
    data: str = "tiny-imagenet"
    """Data set whose test images are measured; the models must have been trained on its classes."""
    data_path: Path | None = None
    """Local copy of --data."""
    image_size: int | None = None
    """Pixels of an image's side, for models trained at another size than their own."""
    num_images: int | None = None
    """Use a random subset of this many test images."""
    seed: int = 0
    """Fixes the subset, and all that is drawn."""

    def side(self, subject: Subject) -> int:
        """Pixels of a side of the images that a model takes."""
        from fedmjp.models import MODELS, split_name

        return self.image_size or MODELS.get(split_name(subject.name)[0]).image_size

    def subjects(self) -> dict[str, Subject]:
        """Name -> what is measured under it.

        Raises:
            UsageError: an unknown model, or one without a checkpoint.
        """
        from fedmjp.models.weights import shipped_names

        shipped = tuple(name for name in shipped_names() if name.startswith("vit_mini_64"))
        return read_subjects(self.model or shipped)

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        subjects, reference = self.subjects(), getattr(self, "reference", None)
        if reference is not None and reference not in subjects:
            raise UsageError(f"--reference {reference} is none of the models: {', '.join(subjects)}")
        if reference is not None:
            for subject in subjects.values():
                subject.require_pairs(subjects[reference])
        if self.seed < 0:
            raise UsageError("--seed must not be negative")


@dataclass(frozen=True)
class ConsistencyOptions(TrainedOptions):
    """How much does a jigsaw change a model's answer?  Tables 1 and 3, Figure 2 of the MJP paper.

        python benchmarks/consistency.py --data tiny-imagenet --data-path DIR        every shipped 64-pixel checkpoint
        python benchmarks/consistency.py --model vit_mini_64 vit_ti=FILE.safetensors --data-path DIR

    Measures accuracy, Diff. Norm. and Consistency of trained models under jigsaws. An _mjp model sees the unknown
    position embedding at the shuffled places, as in training, and once more its own positions there; an _idx model is
    given the origin of every patch. Intervals are 95 % bootstrap intervals over images; they say nothing of another
    training of the same model. Writes table.csv, consistency.png and run.json to --out.
    """

    gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Shares of patches that are shuffled."""
    out: Path = Path("runs/consistency")
    """Folder of table and figure (the committed ones stand in results/consistency)."""
    resume: bool = False
    """Keep the lines of a table in --out for the models that are not asked for now."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        super().validate()
        for subject in self.subjects().values():
            subject.require_single()
        for gamma in self.gammas:
            DEFENSES.get("mjp")(gamma=gamma).validate()
        if not self.gammas:
            raise UsageError("--gammas needs at least one value")
        if (self.out / "table.csv").exists() and not self.resume:
            raise UsageError(f"{self.out} holds a table already; pass --resume to add to it, or another --out")


@dataclass(frozen=True)
class CorruptionOptions(TrainedOptions, RowOptions):
    """Does MJP make a ViT more robust to common corruptions?  Tables 4 and 9 of the MJP paper.

        python benchmarks/corruptions.py --data tiny-imagenet --data-path DIR        every shipped 64-pixel checkpoint
        python benchmarks/corruptions.py --model vit_mini_64 vit_mini_64_mjp=FILE.safetensors --data tiny-imagenet ...

    Top-1 error on test images under the fifteen corruptions of ImageNet-C at severities 1 to 5, on the same
    pictures for every model, and on the untouched images. A corruption's error is the mean over its severities; CE
    is that error in per cent of the reference model's, mCE the mean of CE, as in ImageNet-C, whose reference is
    AlexNet. A model that is worse on untouched images is worse on corrupted ones too; the rise above the error on
    untouched images separates the two. Intervals are 95 % bootstrap intervals over images, paired between models;
    they say nothing of another training of the same model.

    Writes rows.jsonl.gz (a line a model, corruption and severity, with every image's answer), table.csv, summary.csv,
    corruptions.png and run.json to --out. A run that was stopped goes on with --resume.
    """

    reference: str = "vit_mini_64"
    """The model against which CE and differences are taken."""
    num_images: int | None = 1000
    """Use a random subset of this many test images."""
    corruptions: tuple[str, ...] = CORRUPTIONS
    """Names as in ImageNet-C."""
    severities: tuple[int, ...] = SEVERITIES
    """1 to 5."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX; pictures are corrupted on the CPU."""
    out: Path = Path("runs/corruptions")
    """Folder of rows, tables and figure (the committed ones stand in results/corruptions)."""
    resume: bool = False
    """Go on with the rows in --out."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        unknown = sorted(set(self.corruptions) - set(CORRUPTIONS))
        if unknown or not self.corruptions:
            raise UsageError(f"--corruptions {' '.join(unknown) or 'none'}: choose from: {', '.join(CORRUPTIONS)}")
        if not self.severities or not set(self.severities) <= set(SEVERITIES):
            raise UsageError("--severities takes numbers from 1 to 5")
        super().validate()
        sizes = {name: self.side(subject) for name, subject in self.subjects().items()}
        if len(set(sizes.values())) > 1:
            raise UsageError(f"models of one image size see the same pictures, these take {sizes}; run them apart")

    def cells(self) -> list[tuple[str, int]]:
        """(corruption, severity), the untouched images first."""
        return [(CLEAN, 0), *((c, s) for c in dict.fromkeys(self.corruptions) for s in sorted(set(self.severities)))]


@dataclass(frozen=True)
class AttentionOptions(TrainedOptions):
    """Is MJP's attention "more diverse and content-aware"?  Figure 4 of the MJP paper, with numbers.

        python benchmarks/attention_maps.py --data tiny-imagenet --data-path DIR     every shipped 64-pixel checkpoint
        python benchmarks/attention_maps.py --model vit_mini_64 vit_mini_64_mjp vit_ti=FILE.safetensors
            --data tiny-imagenet --data-path DIR

    Measures the last block's attention on test images (entropy, distance, head_diversity, content), each with its 95 %
    bootstrap interval over images and the paired difference from --reference for models with the same grid of patches,
    and draws it on photographs that ship with scikit-image. Every architecture also stands with random weights. Writes
    table.csv, attention.png and run.json to --out.
    """

    reference: str = "vit_mini_64"
    """The model from which differences are taken."""
    num_images: int | None = 500
    """Measure a random subset of this many test images."""
    photographs: int = 4
    """Rows of the figure, at most 8."""
    out: Path = Path("runs/attention_maps")
    """Folder of table and figure (the committed ones stand in results/attention_maps)."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        super().validate()
        if not 1 <= self.photographs <= 8:
            raise UsageError("--photographs takes numbers from 1 to 8")


@dataclass(frozen=True)
class PositionOptions:
    """What do position embeddings learn?  Tables 7 and 8, Figures 1, 3 and 7 of the MJP paper.

        python benchmarks/position_embeddings.py                                     every shipped checkpoint
        python benchmarks/position_embeddings.py --model vit_mini_64 vit_ti=FILE.safetensors

    Table 7 and Figure 3: the share of the position embeddings' variance in their first n principal components.
    Table 8: how well a linear map predicts a patch's place from its embedding, along the sequence (1-D) and in the
    grid (2-D), by 5-fold cross-validation, as mean absolute error in units of patches. Figures 1 and 7: the
    embeddings in the plane of their first two components and as UMAP places them, neighbours in the grid joined by
    lines. Regressions and folds are scikit-learn's, UMAP is umap-learn's: pip install 'fedmjp[tables]'.

    Writes explained_variance.csv, regression.csv, eigenvalues.png, projections.png and run.json to --out.
    """

    model: tuple[str, ...] = ()
    """MODEL for its shipped checkpoint, or MODEL=FILE (timm: published weights), several times for several trainings of
    it in the order of their seeds (none given: every shipped checkpoint with position embeddings)."""
    image_size: int | None = None
    """Pixels of an image's side, for models trained at another size than their own."""
    dimensions: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 16, 32)
    """Numbers of principal components in the table of explained variance."""
    shuffles: int = 20
    """Times the folds of the regression are drawn anew."""
    projections: tuple[str, ...] = tuple(PROJECTIONS)
    """Of the figure: pca, and umap, which needs umap-learn."""
    seed: int = 0
    """Fixes the folds, the random weights and UMAP."""
    out: Path = Path("runs/position_embeddings")
    """Folder of tables and figures (the committed ones stand in results/position_embeddings)."""

    def subjects(self) -> dict[str, Subject]:
        """Name -> what is measured under it.

        Raises:
            UsageError: an unknown model, or one without a checkpoint.
        """
        from fedmjp.models.weights import shipped_names

        shipped = [name for name in shipped_names() if not name.endswith("_nope")]
        return read_subjects(self.model or shipped, also=("timm",))

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        subjects = list(self.subjects().values())
        for subject in subjects[1:]:
            subject.require_pairs(subjects[0])
        if not self.dimensions or min(self.dimensions) < 1 or self.shuffles < 1 or self.seed < 0:
            raise UsageError("--dimensions and --shuffles take numbers from 1, --seed from 0")
        if not self.projections or not set(self.projections) <= set(PROJECTIONS):
            raise UsageError(f"--projections {' '.join(self.projections)}: choose from: {', '.join(PROJECTIONS)}")
        if find_spec("sklearn") is None:
            raise UsageError("position regression needs scikit-learn; pip install 'fedmjp[tables]'")
        if "umap" in self.projections and find_spec("umap") is None:
            raise UsageError("UMAP needs umap-learn; pip install 'fedmjp[tables]', or pass --projections pca")
