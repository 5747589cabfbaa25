"""DP-SGD (Abadi et al. 2016, "Deep learning with differential privacy", algorithm 1): each image's gradient is clipped,
the sum is noised, and the mean is what a step uses.

    g~ = (sum_i g_i min(1, C / |g_i|) + N(0, (sigma C)^2 I)) / B

Abadi et al. take C = 3 to 4, sigma = 2 to 8 and delta = 1e-5, with lots of 600 to 2,000 images. Epsilon, and what it
assumes, is in `fedmjp.defenses.privacy`. It is that of an image, not of a client with all its images.

Departs from the paper: batches are those of the federation, of a fixed size and in shuffled epochs, and not Poisson
samples. The noise of a simulation comes from the run's seeds, so that runs can be repeated; that of a SuperNode from a
key of its own, by a generator that is not cryptographic (`fedmjp.entropy`). What a client reports beside the update
(its mean training loss) is not noised.

The gradients are those of `torch.func.vmap` over the loss of one image, whatever arguments the model takes, and not of
hooks on layers: opacus' hooks miss arguments given by keyword, such as `position_mask`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from attacks.registry import UsageError
from fedmjp.defenses.base import ClientInput, Defense, refuse_batch_norms
from fedmjp.defenses.noise import KNOWING_NOISE
from fedmjp.defenses.privacy import LARGEST, Schedule, check_target, epsilon_by_sampling, epsilon_in_epochs, noise_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data.augmentations import Augmentation
    from fedmjp.defenses.step import LocalStep
    from fedmjp.objectives import Objective


@dataclass(frozen=True)
class DPSGD(Defense):
    """Options of --defense dp_sgd."""

    random: ClassVar[bool] = True
    known_by: ClassVar[tuple[str, ...]] = (*KNOWING_NOISE, "known_draws")

    dp_clip_norm: float = 1.0
    """C, the largest Euclidean norm of one image's gradient (Abadi et al.: 3 to 4)."""
    dp_noise_multiplier: float = 1.0
    """sigma: standard deviation of the noise on the sum of a batch's gradients, in units of --dp-clip-norm (Abadi et
    al.: 2 to 8)."""
    dp_epsilon: float | None = None
    """Epsilon that each image is to have after all rounds; decides about the noise in place of --dp-noise-multiplier
    (none given: that one)."""
    dp_delta: float = 1e-5
    """delta of the guarantee; below 1 / images."""
    dp_micro_batch: int = 8
    """Images whose gradients are held in memory at the same time."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 < self.dp_clip_norm < math.inf:
            raise UsageError(f"--dp-clip-norm must be positive and finite, not {self.dp_clip_norm}")
        if not 0 <= self.dp_noise_multiplier < math.inf:
            raise UsageError(f"--dp-noise-multiplier must be finite and not negative, not {self.dp_noise_multiplier}")
        check_target(self.dp_epsilon, self.dp_delta)
        if self.dp_micro_batch < 1:
            raise UsageError(f"--dp-micro-batch must be at least 1, not {self.dp_micro_batch}")

    def check(self, objective: Objective, augmentation: Augmentation | None) -> None:
        """Refuse losses that are not a mean of one loss an image, and inputs that are made of two images."""
        if not objective.per_image:
            raise UsageError(
                "--defense dp_sgd clips the gradient of each image's own loss, and the loss of this --objective is not "
                "a mean of such losses; pass --objective supervised"
            )
        if augmentation is not None and augmentation.mixes:
            raise UsageError(
                "--defense dp_sgd clips the gradient of each image, and Mixup and CutMix make inputs of two; pass "
                "--augment crop+flip (fedmjp.train: --mixup 0 --cutmix 0)"
            )

    def adapt(self, module: nn.Module) -> None:
        """Refuse a model with batch norms, whose statistics mix the images of a batch."""
        refuse_batch_norms(
            module, "--defense dp_sgd needs a loss of each image alone, and this --model has batch norms"
        )

    def scheduled(self, schedule: Schedule) -> Self:
        """With the noise that the target epsilon asks for."""
        if self.dp_epsilon is None:
            return self
        found = noise_for(self.dp_epsilon, schedule, self.dp_delta)
        return replace(self, dp_noise_multiplier=found, dp_epsilon=None)

    def guarantee(self, schedule: Schedule) -> str:
        """Epsilon, and what it assumes."""
        sigma, delta = self.dp_noise_multiplier, self.dp_delta
        walk, sampled = (of(sigma, schedule, delta) for of in (epsilon_in_epochs, epsilon_by_sampling))
        images = f"{schedule.images} image{'s' * (schedule.images > 1)}"
        weak = f" A delta of {delta:g} is not below 1 / {schedule.images}." if delta >= 1 / schedule.images else ""
        return (
            f"dp_sgd with noise multiplier {sigma:.4g}: epsilon {_words(walk)} at delta {delta:g} for each image "
            f"(not for a client with all its images), against one who sees every update, after {schedule.steps} steps "
            f"of {schedule.batch_size} from {images}, in shuffled epochs: nothing is gained from sampling. Under "
            f"Poisson sampling at rate {schedule.rate:.3g}, which is not what is done here, it would be "
            f"{_words(sampled)}. The mean training loss that is reported is not covered.{weak}"
        )

    def gradients(self, step: LocalStep, generator: torch.Generator) -> dict[str, Tensor]:
        """The noised mean of the clipped gradients."""
        import torch

        if self.dp_epsilon is not None:
            raise UsageError("dp_epsilon needs the schedule of a training; pass dp_noise_multiplier here")
        total, losses = {name: torch.zeros_like(p) for name, p in step.trained.items()}, []
        for gradients, loss in per_image_gradients(step, self.dp_micro_batch):
            scale = (self.dp_clip_norm / norms(gradients).clamp(min=1e-30)).clamp(max=1)  # (m,)
            for name, own in gradients.items():
                total[name] += torch.tensordot(scale.to(own), own, dims=1)
            losses.append(loss)
        step.loss = torch.cat(losses).mean()
        count = sum(map(len, losses))
        noise = self.known_noise_of_step(total, count, generator)
        return step.with_zeros({n: t / count + noise[n] for n, t in total.items()})

    def known_noise_of_step(
        self, trained: Mapping[str, Tensor], images: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The noise on the mean of the clipped gradients."""
        import torch

        noise = {n: torch.randn(t.shape, generator=generator, device=generator.device) for n, t in trained.items()}
        sigma = self.dp_noise_multiplier * self.dp_clip_norm / images
        return {n: sigma * z.to(trained[n]) for n, z in noise.items()}


def per_image_gradients(step: LocalStep, at_once: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Each image's own gradient by trained parameter, (m, *shape), and its loss (m,), for `at_once` images at a time.

    Raises:
        UsageError: model or loss hold an operation that vmap cannot take apart, such as one of a varying shape.
    """
    from torch.func import functional_call, grad_and_value, vmap
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = ("images", "position_mask", "origins")
    tensors = [{name: t for name in names if (t := getattr(view, name)) is not None} for view in step.views]
    labels = () if step.labels is None else (step.labels,)
    own = {name: p.detach() for name, p in step.trained.items()}
    whole = _loss_module(step)

    def loss(parameters: Mapping[str, Tensor], views: list[dict[str, Tensor]], *labels: Tensor) -> Tensor:
        """The loss of one image, as a function of the parameters."""
        one = tuple(ClientInput(**{name: t[None] for name, t in view.items()}) for view in views)
        named = {f"model.{name}": p for name, p in parameters.items()}
        return functional_call(whole, named, (one, *(t[None] for t in labels)))

    each = vmap(grad_and_value(loss), (None, *[0] * (1 + len(labels))), randomness="different")
    for start in range(0, len(step.views[0].images), at_once):
        some = slice(start, start + at_once)
        views = [{name: t[some] for name, t in view.items()} for view in tensors]
        try:
            with sdpa_kernel(SDPBackend.MATH):  # vmap takes no other apart
                found, losses = each(own, views, *(t[some] for t in labels))
        except RuntimeError as error:
            raise UsageError(f"the loss cannot be taken apart by image: {str(error).splitlines()[0]}") from error
        yield {name: gradient.detach() for name, gradient in found.items()}, losses.detach()


def norms(gradients: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm of each image's whole gradient, (m,) float64."""
    import torch

    parts = [torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64) for g in gradients.values()]
    return torch.stack(parts).norm(dim=0)


def _loss_module(step: LocalStep) -> nn.Module:
    """The step's loss as a module that holds the model as `model`, so that a call can replace its parameters."""
    from torch import nn

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = step.model.module

        def forward(self, views: tuple[ClientInput, ...], labels: Tensor | None = None) -> Tensor:
            """The loss of a batch."""
            return step.loss_of(views, labels)

    return Loss()


def _words(epsilon: float) -> str:
    return f"{epsilon:.3g}" if math.isfinite(epsilon) else f"above {LARGEST:,.0f}, which bounds nothing"
