"""The image whose whole gradient equals a rounded message to its own precision: maximum a posteriori by Gauss-Newton.

`patch_embedding` solves dL/dE = G^T X with G an unknown that was sent with errors. On float16 messages it ends at the
Cramer-Rao bound of these equations (benchmarks/experiments/message_precision/bounds.py): nothing more can be had from
the two gradients alone. A server that knows the weights also knows G as a function of the image, and so every other
gradient. With g(x) the client's gradient, t the message and sigma the deviation of every entry, as it is read from the
message (`attacks.linear.intervals`), let the misfit m be the mean of ((g_e(x) - t_e) / sigma_e)^2 over all n entries:
about 1 where the rounding explains what is left. The search minimises

    n f(m(x)) + 2 w V(x),        f(m) = m - 1 below 1, log m above,

V the total variation of `attacks.linear.image_prior`. That is the likelihood of normal errors whose size is unknown,
but at least that of the rounding: as long as the image is far off, entries count as much as they fit. The prior's
weight w is 1, and less where m is large, where what is left is not the rounding. A step solves

    (J^T J + w K^T W K + damping D) d = J^T r - w K^T W K x,        D = sum_d G_d G_d^T / s_d

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

from attacks.base import Attack
from attacks.closed_form.patch_embedding import PatchEmbedding
from attacks.gradient_matching.rounded_message import Linearised, Message
from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.linear.image_prior import VectorialVariation, conjugate_gradients
from attacks.linear.intervals import COARSE, coarseness
from attacks.linear.position_rows import position_gradient
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Misfit that the rounding alone explains, with what is left to converge; steps below it have so many times the
# iterations, because what is left are the combinations of pixels that the message tells least.
EXPLAINED, CLOSER = 1.5, 4
# The search has settled where a step lowers an explained objective by less than this for each value of a pixel.
SETTLED = 1.0
# What squared residuals may exceed those of rounding by, for each value of a pixel. Photographs themselves have -1 to 1
# in int8 and float16 on vit_mini_32, 2 and 4 in bfloat16; where a search settled beside one it was 8.
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

        `details` holds the misfit at the start and at the end.
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
            share, reached = search(at, self._step(at, damping, iterations, generator))
            damping *= LESS_DAMPING if share == 1 else MORE_DAMPING
            gained, at = at.objective(at.relaxed) - reached.objective(at.relaxed), reached
            misfits.append(at.misfit)
            if share and at.misfit < EXPLAINED and gained < SETTLED * at.image.numel():
                sure = at.excess() < BESIDE
                return answer(at, misfits, self._deviations(at, generator) if sure else None, settled=True)
        return answer(at, misfits, None, settled=False)

    def _step(self, at: Linearised, damping: float, iterations: int, generator: torch.Generator) -> Tensor:
        """The solution of the linearised problem, (1, C, H, W) float64."""
        message, precondition = at.message, at.preconditioner(self.probes, damping, generator)

        def hessian(x: Tensor) -> Tensor:
            """Product with J^T J + K^T W K + damping D."""
            return at.times(x) + damping * message.damp(x)

        target = at.pull(at.residual) - at.relaxed * at.prior.times(at.image)
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


def search(at: Linearised, step: Tensor) -> tuple[float, Linearised]:
    """The largest of 1, 1/2, 1/4 ... of a step that lowers the objective, and what is there; 0 if none does."""
    share = 1.0
    while share > LEAST_STEP:
        found = at.message.linearise(at.image + share * step)
        if found.objective(at.relaxed) < at.objective(at.relaxed):
            return share, found
        share /= 2
    return 0.0, at


def answer(at: Linearised, misfits: Sequence[float], deviations: Tensor | None, *, settled: bool) -> Reconstruction:
    """The image with its misfit, and patches vouched for by their deviations.

    Args:
        deviations: (N,) of the patches, in units of [0, 1]; none where the search has not settled at the level of
            rounding: an explained misfit alone says little (int8 images of 23 and 25 dB had 0.50 and 1.06).
    """
    message, tokenizer, steps = at.message, at.message.tokenizer, len(misfits) - 1
    sure = at.image.new_zeros(tokenizer.num_patches, dtype=torch.bool)
    diagnosis = ""
    if misfits[-1] >= EXPLAINED:
        times = misfits[-1] ** 0.5
        diagnosis = f"the search ended {times:.1f} times further from the message than its rounding explains"
    elif deviations is None and settled:
        diagnosis = (
            "the search may have ended beside the image: rounding its gradient leaves smaller errors than the message"
        )
    elif deviations is None:
        diagnosis = (
            f"the rounding explains what is left of the message, but the search was ended after {steps} steps "
            "while it still came nearer (--steps gauss_newton=NUMBER for more)"
        )
    else:
        sure = CAUTION * deviations < VOUCHED_DEVIATION
    known = tokenizer.unpatchify(sure[None, :, None].expand(1, -1, tokenizer.patch_dim))[:, :1]
    return Reconstruction(
        images=message.observation.to_pixels(at.image).float(),
        known=known,
        labels=message.label,
        diagnosis=diagnosis,
        details={"first_misfit": misfits[0], "misfit": misfits[-1], "steps": steps},
    )
