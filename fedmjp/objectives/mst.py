"""MST: "Masked Self-supervised Transformer for Visual Representation" (Li et al., NeurIPS 2021).

A student and a teacher see several crops of each image. The student's projected class token predicts the teacher's of
another crop (`distillation`, lambda_1), and a decoder restores all pixels of the two global crops from the student's
patch tokens (`restoration`, lambda_2), some of which were hidden: those that the teacher's class token attends to least
are candidates, and each candidate is hidden with probability p (`token_masks`).

    L = lambda_1 L_distillation + lambda_2 mean over the global crops of L_restoration

What is at hand of the paper is its appendix. It gives lambda_1 = 1.0, lambda_2 = 0.6, AdamW at 2e-3 for a batch of
1024, weight decay 0.04 and 10 epochs of warm-up, and refers to DINO for momentum, temperatures and multi-crop: those
are DINO's defaults. Neither p nor the share of candidates is in it; 1/8 is the share that the field quotes, and p = 0.5
is a choice of this project. (The listing there calls the restoration's weight v_1 and the other v_2.)

Departs from the paper: the weight decay is constant (DINO raises it to 0.4), and so is the teacher's temperature;
restoration counts the mean over pixel values where the listing counts a sum (`l1=sum`); statistics of batch norm are
those of a client's batch, not synchronised. In a federation see `teacher`.

The update holds: the gradients of encoder, projection head, decoder and mask token, the batch norm's statistics, and
the centre, whose change is (1 - centre_momentum) times the batch's mean teacher output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attacks.registry import UsageError
from fedmjp.models.registry import MODELS, split_name
from fedmjp.objectives.base import Objective, TrainingBatch
from fedmjp.objectives.position_prediction import require_grid
from fedmjp.settings import write_value

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data import DataBundle
    from fedmjp.defenses import Defense
    from fedmjp.models import BuiltModel

NEIGHBOURS, REFERENCES = 20, 4096  # of the accuracy in a training's history
VARIANTS = ("", "_nope", "_mjp")  # those whose positions can be resampled to a smaller crop


@dataclass(frozen=True)
class MST(Objective):
    """Options of --objective mst."""

    accuracy_of: ClassVar[str] = "images (20 nearest neighbours)"
    recipe: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "epochs": 100,
            "learning_rate": 1e-3,  # per 512 images: 2e-3 for a batch of 1024
            "weight_decay": 0.04,
            "warmup_epochs": 10,
            "label_smoothing": 0.0,
            "clip_gradient": 3.0,
            "mixup": 0.0,
            "cutmix": 0.0,
            "erasing": 0.0,
            "repeats": 1,
            "rand_augment": "none",
            "smallest_crop": 1.0,
        }
    )

    teacher: Literal["client", "server"] = "client"
    """Who keeps the teacher in a federation: each client its own, which follows the client's steps and is not sent, or
    the server one for all, which follows the global weights from round to round and is sent with them."""
    momentum: float = 0.996
    """Of the teacher at the start, in [0, 1); it rises to 1 along half a cosine. A step is a client's (or, with
    teacher=server, a round)."""
    centre_momentum: float = 0.9
    """Of the centre of the teacher's outputs, in [0, 1)."""
    student_temperature: float = 0.1
    """Above 0."""
    teacher_temperature: float = 0.04
    """Above 0, and below the student's for outputs that do not become uniform."""
    outputs: int = 65536
    """K, prototypes of the projection head."""
    hidden: int = 2048
    """Channels of the projection head's two hidden layers."""
    bottleneck: int = 256
    """Channels before the prototypes."""
    frozen: float = 0.01
    """Share of the training at its start in which prototypes stay as they are, in [0, 1] (DINO: 1 of 100 epochs)."""
    lambda_1: float = 1.0
    """Weight of the distillation; 0 leaves masked modelling alone, without head and local crops."""
    lambda_2: float = 0.6
    """Weight of the restoration; 0 leaves out the decoder."""
    local_crops: int = 8
    """Small crops of each image beside the two global ones; only the student sees them."""
    local_side: float = 0.43
    """Side of the local crops as a share of the image's, rounded to whole patches (DINO: 96 of 224 pixels)."""
    global_area: tuple[float, float] = (0.4, 1.0)
    """Smallest and largest share of the image's area in a global crop."""
    local_area: tuple[float, float] = (0.05, 0.4)
    """Smallest and largest share of the image's area in a local crop."""
    augmentation: Literal["byol", "crop"] = "byol"
    """byol: crops and flips, then jitter, grey, blur and solarisation; crop: crops and flips alone."""
    masking: Literal["none", "random", "attention", "attended"] = "attention"
    """Candidates to be hidden: all patches (random), those that the teacher's class token attends to least (attention)
    or most (attended)."""
    share: float = 0.125
    """Share of the patches that are candidates, in (0, 1]; of no effect on random."""
    p: float = 0.5
    """Probability that a candidate is hidden, in [0, 1]."""
    replacement: Literal["token", "bert"] = "token"
    """What stands in a hidden patch's place: the mask token, or BERT's mixture of it (80 %), another patch (10 %) and
    the patch itself (10 %)."""
    restored: Literal["image", "masked"] = "image"
    """Pixels that the restoration counts: all, or those of hidden patches."""
    l1: Literal["mean", "sum"] = "mean"
    """Reduction of the L1 loss: the mean over values, or the paper's listing, a sum over the batch that grows with
    batch and resolution."""
    decoder_norm: bool = True
    """Whether the decoder has a batch norm."""

    @property
    def whole_views(self) -> int:
        """The two global crops."""
        return 2

    @property
    def kept_by(self) -> str:
        """Who keeps the teacher."""
        return self.teacher

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        for name in ("momentum", "centre_momentum"):
            self._require(name, 0 <= getattr(self, name) < 1, "lie in [0, 1)")
        for name in ("student_temperature", "teacher_temperature"):
            self._require(name, 0 < getattr(self, name) < float("inf"), "be above 0")
        for name in ("outputs", "hidden", "bottleneck"):
            self._require(name, getattr(self, name) >= 1, "be at least 1")
        for name in ("p", "frozen"):
            self._require(name, 0 <= getattr(self, name) <= 1, "lie in [0, 1]")
        for name in ("share", "local_side"):
            self._require(name, 0 < getattr(self, name) <= 1, "lie in (0, 1]")
        for name in ("lambda_1", "lambda_2"):
            self._require(name, 0 <= getattr(self, name) < float("inf"), "not be negative")
        self._require("local_crops", self.local_crops >= 0, "not be negative")
        for name in ("global_area", "local_area"):
            low, high = getattr(self, name)
            self._require(name, 0 < low <= high <= 1, "be two shares, the smaller first, in (0, 1]")
        if self.lambda_1 == self.lambda_2 == 0:
            raise UsageError("lambda_1 and lambda_2 of objective 'mst' are both 0: there is nothing to learn")
        if self.restored == "masked" and self.masking == "none":
            raise UsageError("restored=masked of objective 'mst' needs hidden patches; pass another masking than none")

    def _require(self, name: str, fits: bool, words: str) -> None:
        if not fits:
            raise UsageError(f"{name} of objective 'mst' must {words}, not {write_value(getattr(self, name))}")

    def check(self, model: str, defense: Defense) -> None:
        """Refuse models whose positions cannot be resampled, and jigsaws of crops smaller than the image.

        Raises:
            UsageError: see `Objective.check`.
        """
        from fedmjp.objectives.token_masks import candidate_count

        _, patches = require_grid("mst", model, VARIANTS)
        if split_name(defense.model_name(model))[1] not in VARIANTS:
            raise UsageError(f"--objective mst cannot train {defense.model_name(model)}, which embeds patches' origins")
        if defense.moves_patches and self._small():
            raise UsageError(
                "the defence moves patches of whole images, and the local crops of --objective mst are smaller; pass "
                "mst:local_crops=0"
            )
        if self.attends and not candidate_count(self.share, patches):
            raise UsageError(f"share={self.share} of objective 'mst' makes none of the {patches} patches a candidate")
        spec = MODELS.get(split_name(model)[0])
        if self._small() and not self._cells(spec.image_size // spec.patch_size):
            raise UsageError(f"local_side={self.local_side} of objective 'mst' is less than a patch of {model}")

    def attach(self, module: nn.Module) -> None:
        """Projection head, decoder, mask token and centre instead of the classifier, as far as they are used."""
        from fedmjp.objectives.mst_loss import MSTHeads

        module.reset_classifier(0)
        module.pretext = MSTHeads(module, self)

    def local(self, model: BuiltModel) -> nn.Module | None:
        """The teacher, equal to the student at the start; None if neither distillation nor masking asks for one."""
        from fedmjp.objectives.distillation import Teacher

        return Teacher(model.module) if self.lambda_1 or self.attends else None

    def views(self, images: Tensor, model: BuiltModel, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Two global crops of the image's size, then the local ones."""
        from fedmjp.objectives.crops import FIRST, LOCAL, SECOND, change_colours, random_crops

        embed, size = model.module.patch_embed, (images.shape[2], images.shape[3])
        small = tuple(self._cells(n) * p for n, p in zip(embed.grid_size, embed.patch_size, strict=True))
        kinds = [(size, self.global_area, FIRST), (size, self.global_area, SECOND)]
        kinds += [(small, self.local_area, LOCAL)] * self._small()
        found = []
        for wanted, area, colours in kinds:
            crop = random_crops(images, wanted, area, generator)
            if self.augmentation == "byol":
                crop = change_colours(crop, colours, max(size), generator)
            found.append(crop)
        return tuple(found)

    def loss(self, model: BuiltModel, batch: TrainingBatch, local: nn.Module | None) -> Tensor:
        """The weighted sum of both losses; in training the centre moves on."""
        from fedmjp.objectives.mst_loss import mst_loss

        return mst_loss(self, model, batch, local)

    def after_step(self, model: BuiltModel, local: nn.Module | None, progress: float) -> None:
        """Let the teacher follow the student."""
        from fedmjp.objectives.distillation import momentum_at

        if local is not None:
            local.follow(model.module, momentum_at(self.momentum, progress))

    def evaluate(
        self, model: BuiltModel, local: nn.Module | None, data: DataBundle, device: torch.device
    ) -> tuple[float, float]:
        """Restoration of the test images, and k-NN accuracy of the student's class token.

        Nothing is hidden and nothing cropped, so that the numbers follow from the weights that are sent: the teacher
        of a federation may be on its clients.

        Returns:
            Mean absolute error of the restored pixels, normalised as the model's input (NaN without a decoder), and the
            share of test images whose class the 20 nearest of at most `REFERENCES` training images tell (NaN without
            labels).
        """
        from fedmjp.evaluation.neighbours import neighbour_accuracy
        from fedmjp.objectives.mst_loss import restoration_error

        error = restoration_error(model, data.test, device)
        if not data.labelled:
            return error, float("nan")
        some = data.train.subset(range(0, len(data.train), -(-len(data.train) // REFERENCES)))
        k = min(NEIGHBOURS, len(some))
        accuracy = neighbour_accuracy(model, replace(data, train=some), device, (k,))[k]
        return error, accuracy

    @property
    def attends(self) -> bool:
        """Whether the teacher's attention decides what may be hidden."""
        return self.masking in ("attention", "attended")

    def _small(self) -> int:
        """How many local crops are of use: none without the distillation."""
        return self.local_crops if self.lambda_1 else 0

    def _cells(self, cells: int) -> int:
        """Patches along a side of a local crop, of `cells` along the image's."""
        return int(self.local_side * cells + 0.5)
