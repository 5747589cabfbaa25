"""The image whose whole gradient equals a rounded message to its own precision: maximum likelihood by Gauss-Newton.

`patch_embedding` solves dL/dE = G^T X with G an unknown that was sent with errors. On float16 messages it ends at the
Cramer-Rao bound of these equations (benchmarks/experiments/message_precision/bounds.py): nothing more can be had from
the two gradients alone. A server that knows the weights also knows G as a function of the image, and so every other
gradient. With g(x) the client's gradient, t the message and sigma the deviation of every entry, as it is read from the
message (`attacks.linear.intervals`),

    minimise over x:  sum_e ((g_e(x) - t_e) / sigma_e)^2  +  (x - c)^T D (x - c),        D = sum_d G_d G_d^T / s_d

where c is the present image and D the precision of the closed form's answer, channel by channel: a step moves along
the combinations of patches that the closed form knows least. While the first term is far above its number of entries,
which the rounding alone explains, it is divided by what it is above it (Levenberg 1944, Marquardt 1963: the damping
falls with the misfit). Once the rounding explains the misfit, what is left are the combinations of pixels that the
message tells least, and steps take more iterations; nothing is vouched for before further steps hardly lower it.

A step solves (J^T J + D) d = J^T r by conjugate gradients, with J the derivative of g / sigma. Neither J nor J^T J is
formed: with u = dL/dx, J v is the derivative of <u, v> by the weights, and J^T w that of <g, w> by the image, and both
come from one graph. The preconditioner is D (x) I + A (x) B with the second moments A of rows and B of columns of
J^T e, e random signs (Hutchinson 1990): E J^T e (J^T e)^T = J^T J. It is inverted exactly by two generalised
eigendecompositions.

Gradient matching (Zhu, Liu and Han 2019) minimises the same difference with one weight for all entries and first
derivatives alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from attacks.base import Attack
from attacks.closed_form.patch_embedding import PatchEmbedding
from attacks.gradient_matching.labels import head_bias, infer_sparse_label
from attacks.gradient_matching.matched_update import extract_matched_update
from attacks.gradient_matching.simulation import build_simulation
from attacks.gradient_matching.unrolled import Simulation, math_attention
from attacks.linear.image_prior import conjugate_gradients
from attacks.linear.intervals import COARSE, coarseness, error_bounds
from attacks.linear.position_rows import bounds_of_update, position_gradient
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Precision of a normalised pixel by itself, the error that the image prior leaves where nothing is known (0.6), and
# the error of a float32 gradient relative to the rms entry of its parameter.
PIXEL_PRECISION, FLOAT32_ERROR = 1 / 0.6**2, 2e-7
# Misfit, per entry, that the rounding alone explains, with what is left to converge; steps below it have so many times
# the iterations, because what is left are the combinations of pixels that the message tells least.
EXPLAINED, CLOSER = 1.5, 4
# The search has settled where a step lowers an explained misfit by less than this share of what is above 1, or of 0.1.
SETTLED, LEAST_EXCESS = 1e-2, 0.1
# Smallest part of a step that is tried, and what the damping is multiplied by after a step was cut, and after a whole.
LEAST_STEP, MORE_DAMPING, LESS_DAMPING = 1e-2, 4.0, 0.25
# Damping of the first step.
FIRST_DAMPING = 100.0
# Relative residual at which conjugate gradients stop.
TOLERANCE = 1e-4
# Relative eigenvalue below which a preconditioner's factor is taken for round-off.
LEAST_EIGENVALUE = 1e-9
# Seconds of one pair of products on one CPU core, by tokens and parameters (0.08 s on vit_mini_32).
SECONDS_OF_A_PRODUCT = 0.08 / (65 * 2.7e6)


@dataclass(frozen=True, kw_only=True)
class GaussNewton(Attack):
    """Refine the answer of `patch_embedding` until it reproduces the whole message to its rounding.

    Args:
        start: the closed form.
        steps: most Gauss-Newton steps.
        iterations: of conjugate gradients in a step, before the misfit is explained.
        probes: random signs for the preconditioner, anew in each step.
        seed: of these.
    """

    start: PatchEmbedding = field(default_factory=PatchEmbedding)
    steps: int = 24
    iterations: int = 60
    probes: int = 20
    seed: int = 0

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT})
    reads_every_parameter: ClassVar[bool] = True

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: messages with the digits of float32 gain nothing."""
        try:
            check(observations[-1])
        except UsageError as error:
            return str(error)
        return ""

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: products, tokens and parameters."""
        model = observations[-1].model
        tokens = find_tokenizer(model, observations[-1].image_shape).num_patches + 1
        products = self.steps * (CLOSER * self.iterations + self.probes / 2)
        return SECONDS_OF_A_PRODUCT * products * tokens * sum(p.numel() for p in model.parameters())

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds the misfit per entry, at the start and at the end."""
        target = observations[-1]
        tokenizer = check(target)
        first = self.start.reconstruct(observations)
        if first.images is None:
            return first
        message = Message(target, tokenizer)
        image = message.normalised(first.images)
        generator = torch.Generator().manual_seed(self.seed)
        damping, misfits = FIRST_DAMPING, [message.misfit(image)]
        for _ in range(self.steps):
            iterations = self.iterations * (CLOSER if misfits[-1] < EXPLAINED else 1)
            step = self._step(message, image, damping * max(misfits[-1], 1.0), iterations, generator)
            share, misfit = message.search(image, step, misfits[-1])
            damping *= LESS_DAMPING if share == 1 else MORE_DAMPING
            image = image + share * step
            misfits.append(misfit)
            if share and misfit < EXPLAINED and misfits[-2] - misfit < SETTLED * max(misfit - 1, LEAST_EXCESS):
                return message.answer(image, misfits, settled=True)
        return message.answer(image, misfits, settled=False)

    def _step(
        self, message: Message, image: Tensor, damping: float, iterations: int, generator: torch.Generator
    ) -> Tensor:
        """The solution of the linearised problem, (1, C, H, W) float64."""
        at = message.linearise(image)
        precondition = at.preconditioner(self.probes, damping, generator)

        def hessian(x: Tensor) -> Tensor:
            """Product with J^T J + D."""
            return at.pull(at.push(x)) + damping * message.damp(x)

        target = at.pull(at.residual)
        return conjugate_gradients(hessian, target, torch.zeros_like(target), precondition, iterations, TOLERANCE)


def check(observation: Observation) -> Tokenizer:
    """The tokenizer of a model whose update the attack can take.

    Raises:
        UsageError: the message has the digits of float32, sums images or steps, or hides positions.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    rows = position_gradient(observation, tokenizer)
    if rows is None or tokenizer.weight not in observation.gradients:
        raise UsageError("the update holds no position gradient or none of the patch projection to start from")
    if observation.num_examples > 1 or observation.local_steps > 1:
        raise UsageError("the update is not that of one image and one step")
    hidden = int((rows[tokenizer.prefix :] == 0).all(dim=1).sum()) if tokenizer.hides_positions else 0
    if hidden:
        raise UsageError(f"{hidden} position rows are exactly zero: those patches hide behind a shared embedding (MJP)")
    if coarseness(observation, (tokenizer.positions, tokenizer.weight)) <= COARSE:
        raise UsageError("the message has the digits of float32: patch_embedding is as exact")
    return tokenizer


class Message:
    """What was sent of one image, whitened, and what simulates it.

    Attributes:
        simulation: of the client; it has the weights.
        label: (1,) int64.
    """

    def __init__(self, observation: Observation, tokenizer: Tokenizer) -> None:
        self.observation, self.tokenizer = observation, tokenizer
        update = extract_matched_update(observation)
        self.simulation, target = build_simulation(observation, [update], 1, exact=True)
        self.sent = {name: values[0].double() for name, values in target.values.items()}
        self.deviations = {name: _deviation(observation, name, sent) for name, sent in self.sent.items()}
        self.label = observation.labels if observation.labels is not None else _label(update.gradients, self.simulation)
        self.entries = sum(sent.numel() for sent in self.sent.values())
        self.precision = _precision(observation, tokenizer)

    def normalised(self, images: Tensor) -> Tensor:
        """Images in [0, 1] as the model's input, float64."""
        mean, std = (torch.tensor(v).double().view(1, -1, 1, 1) for v in (self.observation.mean, self.observation.std))
        return (images.double() - mean) / std

    def damp(self, image: Tensor) -> Tensor:
        """D x, (1, C, H, W)."""
        return self.tokenizer.unpatchify((self.precision @ self.tokenizer.patchify(image)[0])[None])

    def linearise(self, image: Tensor) -> Linearised:
        """The simulated gradient around an image."""
        return Linearised(self, image)

    def misfit(self, image: Tensor) -> float:
        """sum ((g(x) - t) / sigma)^2 over the number of entries."""
        return float(sum(r.square().sum() for r in self.linearise(image).residual)) / self.entries

    def search(self, image: Tensor, step: Tensor, misfit: float) -> tuple[float, float]:
        """The largest of 1, 1/2, 1/4 ... of a step that lowers the misfit, and the misfit there; 0 if none does."""
        share = 1.0
        while share > LEAST_STEP:
            found = self.misfit(image + share * step)
            if found < misfit:
                return share, found
            share /= 2
        return 0.0, misfit

    def answer(self, image: Tensor, misfits: Sequence[float], *, settled: bool) -> Reconstruction:
        """The image with its misfit; vouched for where the rounding explains it and further steps hardly lower it.

        While they do, an explained misfit says little of the image: on int8 messages of one scale a parameter two of
        three photographs were at 22 and 23 dB with misfits of 0.5 and 1.04.
        """
        images, steps = self.observation.to_pixels(image).float(), len(misfits) - 1
        explained = misfits[-1] < EXPLAINED
        agrees = explained and settled
        diagnosis = ""
        if not explained:
            times = misfits[-1] ** 0.5
            diagnosis = f"the search ended {times:.1f} times further from the message than its rounding explains"
        elif not settled:
            diagnosis = (
                f"the rounding explains what is left of the message, but the search was ended after {steps} steps "
                "while it still came nearer (--steps gauss_newton=NUMBER for more)"
            )
        return Reconstruction(
            images=images,
            known=torch.full_like(images[:, :1], agrees, dtype=torch.bool),
            labels=self.label,
            diagnosis=diagnosis,
            details={"first_misfit": misfits[0], "misfit": misfits[-1], "steps": steps},
        )


class Linearised:
    """The whitened gradient around an image, with the products J v and J^T w.

    Attributes:
        residual: (t - g(x)) / sigma by parameter.
    """

    def __init__(self, message: Message, image: Tensor) -> None:
        simulation, self.message = message.simulation, message
        like = next(iter(simulation.weights.values()))
        self.image = image.to(like).requires_grad_()
        self.weights = [simulation.weights[name].detach().requires_grad_() for name in message.sent]
        with math_attention(), torch.enable_grad():
            known = simulation.weights | dict(zip(message.sent, self.weights, strict=True))
            loss = functional.cross_entropy(simulation.logits(known, self.image, None), message.label)
            self.slope, *self.gradients = torch.autograd.grad(loss, [self.image, *self.weights], create_graph=True)
        self.deviations = [message.deviations[name] for name in message.sent]
        pairs = zip(message.sent.values(), self.gradients, self.deviations, strict=True)
        self.residual = [(sent - found.detach().double()) / sigma for sent, found, sigma in pairs]

    def push(self, image: Tensor) -> list[Tensor]:
        """J v of (1, C, H, W), by parameter."""
        found = torch.autograd.grad(
            self.slope, self.weights, image.to(self.slope), retain_graph=True, allow_unused=True
        )
        pairs = zip(found, self.deviations, strict=True)
        return [torch.zeros_like(sigma) if g is None else g.double() / sigma for g, sigma in pairs]

    def pull(self, entries: Sequence[Tensor]) -> Tensor:
        """J^T w of whitened entries by parameter, (1, C, H, W) float64."""
        scaled = [(w / sigma).to(self.slope) for w, sigma in zip(entries, self.deviations, strict=True)]
        return torch.autograd.grad(self.gradients, self.image, scaled, retain_graph=True)[0].double()

    def preconditioner(self, probes: int, damping: float, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Product with the inverse of damping D (x) I + A (x) B."""
        tokenizer = self.message.tokenizer
        rows = columns = 0.0
        for _ in range(probes):
            signs = [torch.randint(0, 2, s.shape, generator=generator).to(s) * 2 - 1 for s in self.deviations]
            drawn = tokenizer.patchify(self.pull(signs))[0]  # (N, P)
            rows, columns = rows + drawn @ drawn.T / probes, columns + drawn.T @ drawn / probes
        rows = _lifted(rows / columns.trace())
        inverse = torch.linalg.inv(torch.linalg.cholesky(rows))
        known, left = torch.linalg.eigh(inverse @ (damping * self.message.precision) @ inverse.T)
        left = inverse.T @ left  # A-orthonormal, and diagonalises D
        felt, right = torch.linalg.eigh(_lifted(columns))

        def precondition(x: Tensor) -> Tensor:
            """The product."""
            turned = left.T @ tokenizer.patchify(x)[0] @ right / (known[:, None] + felt)
            return tokenizer.unpatchify((left @ turned @ right.T)[None])

        return precondition


def _lifted(moments: Tensor) -> Tensor:
    return moments + LEAST_EIGENVALUE * moments.diagonal().mean() * torch.eye(len(moments)).to(moments)


def _deviation(observation: Observation, name: str, sent: Tensor) -> Tensor:
    """Of every entry, by the message's precision and the client's arithmetic."""
    arithmetic = FLOAT32_ERROR * sent.square().mean().sqrt()
    return (
        (error_bounds(observation, name).square() / 3 + arithmetic**2).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    )


def _label(gradients: dict[str, Tensor], simulation: Simulation) -> Tensor:
    weight = gradients.get(f"{simulation.head}.weight")
    bias = head_bias(gradients, simulation.head)
    return bias.argmin()[None] if weight is None else infer_sparse_label(weight, bias)


def _precision(observation: Observation, tokenizer: Tokenizer) -> Tensor:
    """D, (N, N): what dL/dE = G^T X says of combinations of patches, by the errors of both, and a pixel's own."""
    of_rows, of_products = bounds_of_update(observation, tokenizer)
    rows = position_gradient(observation, tokenizer)[tokenizer.prefix :].double()  # (N, D)
    variances = (of_products.square().mean(dim=1) + of_rows.square().sum(dim=0)) / 3  # (D,), pixels of variance 1
    own = PIXEL_PRECISION * torch.eye(len(rows)).to(rows)
    return own + (rows / variances.clamp(min=torch.finfo(torch.float64).tiny)) @ rows.T
