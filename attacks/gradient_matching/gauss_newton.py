"""The image whose whole gradient equals a rounded message to its own precision: maximum a posteriori by Gauss-Newton.

`patch_embedding` solves dL/dE = G^T X with G an unknown that was sent with errors. On float16 messages it ends at the
Cramer-Rao bound of these equations (benchmarks/experiments/message_precision/bounds.py): nothing more can be had from
the two gradients alone. A server that knows the weights also knows G as a function of the image, and so every other
gradient. With g(x) the client's gradient, t the message and sigma the deviation of every entry, as it is read from the
message (`attacks.linear.intervals`), let m_p be the mean of ((g_e(x) - t_e) / sigma_e)^2 over the n_p entries of
parameter p, its misfit: about 1 where the rounding explains what is left. The search minimises

    sum_p n_p f(m_p(x)) + 2 V(x),        f(m) = m - 1 below 1, log m above,

V the total variation of `attacks.linear.image_prior`. That is the likelihood of normal errors whose size in parameter p
is unknown, but at least that of the rounding: as long as the image is far off, each parameter counts as much as it
fits, so that those that are least linear in the image do not lead the search astray. A step solves

    (J^T J + K^T W K + damping D) d = J^T r - K^T W K x,        D = sum_d G_d G_d^T / s_d

by conjugate gradients. J is the derivative of g in units of the errors found, K^T W K the quadratic that touches V at
the present image (iterative reweighting), and D the precision of the closed form's answer, channel by channel: a
damped step moves along the combinations of patches that the closed form knows least (Levenberg 1944, Marquardt 1963).
Neither J nor J^T J is formed: with u = dL/dx, J v is the derivative of <u, v> by the weights, and J^T w that of <g, w>
by the image, and both come from one graph. The preconditioner is C (x) I + A (x) B, with C made of D and the mean of
K^T W K, and the second moments A of rows and B of columns of J^T e, e random signs (Hutchinson 1990): E J^T e (J^T e)^T
= J^T J. It is inverted exactly by two generalised eigendecompositions.

Once the rounding explains the misfit, what is left are the combinations of pixels that the message tells least, and
steps take more iterations. A search can settle beside the image; then g(x) is not what was rounded. Rounding g(x) says
how large the squared errors would be if it were. Nothing is vouched for before the search has settled at that level.
Then the deviation of each patch is that of draws from the normal distribution with the precision J^T J + K^T W K:
solutions for a right side with that covariance ("perturb and maximise", Papandreou and Yuille 2010). They start from
draws of the preconditioner, made wider, so that what the iterations leave unsolved does not count as known.

Gradient matching (Zhu, Liu and Han 2019) minimises the same difference with one weight for all entries and first
derivatives alone.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.linear.image_prior import TouchingQuadratic, VectorialVariation, conjugate_gradients
from attacks.linear.intervals import COARSE, coarseness, error_bounds, spacing
from attacks.linear.position_rows import bounds_of_update, position_gradient
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Precision of a normalised pixel by itself, the error that the image prior leaves where nothing is known (0.6), and
# the error of a float32 gradient relative to the rms entry of its parameter.
PIXEL_PRECISION, FLOAT32_ERROR = 1 / 0.6**2, 2e-7
# Mean misfit that the rounding alone explains, with what is left to converge; steps below it have so many times the
# iterations, because what is left are the combinations of pixels that the message tells least.
EXPLAINED, CLOSER = 1.5, 4
# The search has settled where a step lowers an explained objective by less than this for each value of a pixel.
SETTLED = 1.0
# What squared residuals may exceed those of rounding by, for each value of a pixel. Photographs themselves have -1 to 2
# in int8 and float16 on vit_mini_32; where a search settled beside one it was 8.
BESIDE = 3.0
# Deviations of draws are too small by up to this factor where the gradient is far from linear, or total variation
# smooths what is none.
CAUTION = 3.0
# Smallest part of a step that is tried, and what the damping is multiplied by after a step was cut, and after a whole.
LEAST_STEP, MORE_DAMPING, LESS_DAMPING = 1e-2, 4.0, 0.25
# Damping of the first step, and how much wider than the preconditioner says draws start.
FIRST_DAMPING, WIDER = 100.0, 2.0
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
        prior: of the image.
        steps: most Gauss-Newton steps.
        iterations: of conjugate gradients in a step, before the misfit is explained.
        probes: random signs for the preconditioner, anew in each step.
        draws: for the deviations of the patches, once the search has settled.
        seed: of both.
    """

    start: PatchEmbedding = field(default_factory=PatchEmbedding)
    prior: VectorialVariation = field(default_factory=VectorialVariation)
    steps: int = 24
    iterations: int = 60
    probes: int = 20
    draws: int = 4
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
        """See `Attack.reconstruct`; vouches for patches once the search has settled.

        `details` holds the mean misfit at the start and at the end.
        """
        target = observations[-1]
        tokenizer = check(target)
        first = self.start.reconstruct(observations)
        if first.images is None:
            return first
        message = Message(target, tokenizer, self.prior)
        at, generator = message.linearise(message.normalised(first.images)), torch.Generator().manual_seed(self.seed)
        damping, misfits = FIRST_DAMPING, [at.misfit]
        for _ in range(self.steps):
            iterations = self.iterations * (CLOSER if at.misfit < EXPLAINED else 1)
            share, reached = message.search(at, self._step(at, damping, iterations, generator))
            damping *= LESS_DAMPING if share == 1 else MORE_DAMPING
            gained, at = at.objective - reached.objective, reached
            misfits.append(at.misfit)
            if share and at.misfit < EXPLAINED and gained < SETTLED * at.image.numel():
                sure = at.excess() < BESIDE
                return message.answer(at, misfits, self._deviations(at, generator) if sure else None, settled=True)
        return message.answer(at, misfits, None, settled=False)

    def _step(self, at: Linearised, damping: float, iterations: int, generator: torch.Generator) -> Tensor:
        """The solution of the linearised problem, (1, C, H, W) float64."""
        message, precondition = at.message, at.preconditioner(self.probes, damping, generator)

        def hessian(x: Tensor) -> Tensor:
            """Product with J^T J + K^T W K + damping D."""
            return at.times(x) + damping * message.damp(x)

        target = at.pull(at.residual) - at.prior.times(at.image)
        return conjugate_gradients(hessian, target, torch.zeros_like(target), precondition, iterations, TOLERANCE)

    def _deviations(self, at: Linearised, generator: torch.Generator) -> Tensor:
        """(N,) rms deviation of a pixel of each patch, in units of [0, 1], by draws around the image."""
        precondition, found = at.preconditioner(self.probes, 0.0, generator), []
        for _ in range(self.draws):
            noise = [torch.randn(s.shape, generator=generator, dtype=torch.float64).to(s) for s in at.deviations]
            start, iterations = WIDER * precondition.draw(generator), CLOSER * self.iterations
            target = at.pull(noise) + at.prior.draw(generator)
            found.append(conjugate_gradients(at.times, target, start, precondition, iterations, TOLERANCE))
        squares = at.message.in_pixels(torch.cat(found)).square().mean(dim=0, keepdim=True)
        return at.message.tokenizer.patchify(squares)[0].mean(dim=1).sqrt()


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

    def __init__(self, observation: Observation, tokenizer: Tokenizer, prior: VectorialVariation) -> None:
        self.observation, self.tokenizer, self.prior = observation, tokenizer, prior
        update = extract_matched_update(observation)
        self.simulation, target = build_simulation(observation, [update], 1, exact=True)
        self.sent = {name: values[0].double() for name, values in target.values.items()}
        self.arithmetic = {n: FLOAT32_ERROR * float(sent.square().mean().sqrt()) for n, sent in self.sent.items()}
        self.deviations = {n: _deviation(error_bounds(observation, n), own) for n, own in self.arithmetic.items()}
        self.spacings = {name: spacing(observation, name) for name in self.sent}
        self.label = observation.labels if observation.labels is not None else _label(update.gradients, self.simulation)
        self.precision = _precision(observation, tokenizer)

    def normalised(self, images: Tensor) -> Tensor:
        """Images in [0, 1] as the model's input, float64."""
        mean, std = (torch.tensor(v).double().view(1, -1, 1, 1) for v in (self.observation.mean, self.observation.std))
        return (images.double() - mean) / std

    def in_pixels(self, images: Tensor) -> Tensor:
        """Differences of normalised images in units of [0, 1]."""
        return images * images.new_tensor(self.observation.std).view(1, -1, 1, 1)

    def damp(self, image: Tensor) -> Tensor:
        """D x, (1, C, H, W)."""
        return self.tokenizer.unpatchify((self.precision @ self.tokenizer.patchify(image)[0])[None])

    def linearise(self, image: Tensor) -> Linearised:
        """The simulated gradient around an image."""
        return Linearised(self, image)

    def search(self, at: Linearised, step: Tensor) -> tuple[float, Linearised]:
        """The largest of 1, 1/2, 1/4 ... of a step that lowers the objective, and what is there; 0 if none does."""
        share = 1.0
        while share > LEAST_STEP:
            found = self.linearise(at.image + share * step)
            if found.objective < at.objective:
                return share, found
            share /= 2
        return 0.0, at

    def answer(
        self, at: Linearised, misfits: Sequence[float], deviations: Tensor | None, *, settled: bool
    ) -> Reconstruction:
        """The image with its misfit, and patches vouched for by their deviations.

        Args:
            deviations: (N,) of the patches, in units of [0, 1]; none where the search has not settled at the level of
                rounding: an explained misfit alone says little (int8 images of 23 and 25 dB had 0.50 and 1.06).
        """
        images, steps = self.observation.to_pixels(at.image).float(), len(misfits) - 1
        sure = at.image.new_zeros(self.tokenizer.num_patches, dtype=torch.bool)
        diagnosis = ""
        if misfits[-1] >= EXPLAINED:
            times = misfits[-1] ** 0.5
            diagnosis = f"the search ended {times:.1f} times further from the message than its rounding explains"
        elif deviations is None and settled:
            diagnosis = (
                "the search ended beside the image: rounding its gradient leaves smaller errors than the message"
            )
        elif deviations is None:
            diagnosis = (
                f"the rounding explains what is left of the message, but the search was ended after {steps} steps "
                "while it still came nearer (--steps gauss_newton=NUMBER for more)"
            )
        else:
            sure = CAUTION * deviations < VOUCHED_DEVIATION
        known = self.tokenizer.unpatchify(sure[None, :, None].expand(1, -1, self.tokenizer.patch_dim))[:, :1]
        return Reconstruction(
            images=images,
            known=known,
            labels=self.label,
            diagnosis=diagnosis,
            details={"first_misfit": misfits[0], "misfit": misfits[-1], "steps": steps},
        )


class Linearised:
    """The gradient around an image, in units of the errors that are found there, with the products J v and J^T w.

    Attributes:
        image: (1, C, H, W) float64, normalised.
        misfit: the mean of ((t - g(x)) / sigma)^2 over all entries.
        objective: what the search minimises.
        deviations: of entries by parameter, sigma times the square root of its misfit where that exceeds 1.
        residual: t - g(x) in these units, by parameter.
        prior: of the image.
    """

    def __init__(self, message: Message, image: Tensor) -> None:
        simulation, self.message = message.simulation, message
        like = next(iter(simulation.weights.values()))
        self.image, self.fed = image, image.to(like, copy=True).requires_grad_()
        self.weights = [simulation.weights[name].detach().requires_grad_() for name in message.sent]
        with math_attention(), torch.enable_grad():
            known = simulation.weights | dict(zip(message.sent, self.weights, strict=True))
            loss = functional.cross_entropy(simulation.logits(known, self.fed, None), message.label)
            self.slope, *self.gradients = torch.autograd.grad(loss, [self.fed, *self.weights], create_graph=True)
        whitened = [d / message.deviations[name] for name, d in zip(message.sent, self.differences(), strict=True)]
        sizes = torch.tensor([w.numel() for w in whitened], dtype=torch.float64)
        misfits = torch.stack([w.square().mean() for w in whitened]).to(sizes)
        more = misfits.clamp(min=1)
        self.prior = TouchingQuadratic(message.prior, image, message.observation.std)
        self.misfit = float(sizes @ misfits / sizes.sum())
        self.objective = float(sizes @ (misfits.clamp(max=1) - 1 + more.log())) + 2 * self.prior.penalty
        roots = [float(root) for root in more.sqrt()]
        self.residual = [w / root for w, root in zip(whitened, roots, strict=True)]
        self.deviations = [message.deviations[n] * root for n, root in zip(message.sent, roots, strict=True)]

    def differences(self) -> list[Tensor]:
        """t - g(x), by parameter."""
        pairs = zip(self.message.sent.values(), self.gradients, strict=True)
        return [sent - found.detach().double() for sent, found in pairs]

    def excess(self) -> float:
        """What the squared residuals exceed those of rounding g(x) itself by, in sigma^2, for each value of a pixel.

        To the nearest number, or at random to one of both neighbours: whichever explains the residuals better.
        """
        message, nearest, random = self.message, 0.0, 0.0
        for name, left in zip(message.sent, self.differences(), strict=True):
            gap, sigma = message.spacings[name], message.deviations[name]
            found = (message.sent[name] - left) / gap.clamp(min=torch.finfo(torch.float64).tiny)
            off = torch.where(gap > 0, found - found.round(), 0.0).abs()
            left = left.square() - message.arithmetic[name] ** 2
            nearest += float(((left - (off * gap).square()) / sigma.square()).sum())
            random += float(((left - (off * (1 - off)) * gap.square()) / sigma.square()).sum())
        return min(nearest, random, key=abs) / self.image.numel()

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
        return torch.autograd.grad(self.gradients, self.fed, scaled, retain_graph=True)[0].double()

    def times(self, image: Tensor) -> Tensor:
        """(J^T J + K^T W K) x of (1, C, H, W)."""
        return self.pull(self.push(image)) + self.prior.times(image)

    def preconditioner(self, probes: int, damping: float, generator: torch.Generator) -> Preconditioner:
        """C (x) I + A (x) B, with C = damping D + the mean of K^T W K."""
        tokenizer, precision = self.message.tokenizer, self.message.precision
        rows = columns = 0.0
        for _ in range(probes):
            signs = [torch.randint(0, 2, s.shape, generator=generator).to(s) * 2 - 1 for s in self.deviations]
            drawn = tokenizer.patchify(self.pull(signs))[0]  # (N, P)
            rows, columns = rows + drawn @ drawn.T / probes, columns + drawn.T @ drawn / probes
        known = damping * precision + self.prior.typical * torch.eye(len(precision)).to(precision)
        return Preconditioner(tokenizer, known, rows / columns.trace(), columns)


class Preconditioner:
    """C (x) I + A (x) B on patches (N, P), by vectors that diagonalise C and A, and B."""

    def __init__(self, tokenizer: Tokenizer, known: Tensor, rows: Tensor, columns: Tensor) -> None:
        self.tokenizer = tokenizer
        inverse = torch.linalg.inv(torch.linalg.cholesky(_lifted(rows)))
        strengths, left = torch.linalg.eigh(inverse @ known @ inverse.T)
        self.left = inverse.T @ left  # A-orthonormal, and diagonalises C
        felt, self.right = torch.linalg.eigh(_lifted(columns))
        self.strengths = strengths[:, None] + felt  # (N, P)

    def __call__(self, image: Tensor) -> Tensor:
        """Product of the inverse with (1, C, H, W)."""
        turned = self.left.T @ self.tokenizer.patchify(image)[0] @ self.right / self.strengths
        return self.tokenizer.unpatchify((self.left @ turned @ self.right.T)[None])

    def draw(self, generator: torch.Generator) -> Tensor:
        """(1, C, H, W) with the inverse for its covariance."""
        drawn = torch.randn(self.strengths.shape, generator=generator, dtype=torch.float64).to(self.strengths)
        return self.tokenizer.unpatchify((self.left @ (drawn / self.strengths.sqrt()) @ self.right.T)[None])


def _lifted(moments: Tensor) -> Tensor:
    return moments + LEAST_EIGENVALUE * moments.diagonal().mean() * torch.eye(len(moments)).to(moments)


def _deviation(bounds: Tensor, arithmetic: float) -> Tensor:
    """Of every entry, by the message's precision and the client's arithmetic."""
    return (bounds.square() / 3 + arithmetic**2).sqrt().clamp(min=torch.finfo(torch.float32).tiny)


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
