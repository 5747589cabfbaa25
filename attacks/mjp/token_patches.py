"""From what the tokens bring to the first MLP to their patches and places, by linear equations for each token alone.

`attacks.mjp.mlp_tokens` gives every token up to a factor and a constant: y_i = (a_i - beta) / gamma of the second norm
is C (z_i + t_i) / s_i, C = I - 1 1^T / D, with z_i the token at the first block, t_i what attention adds to it, and
s_i > 0 unknown. Both summands are known up to few numbers:

    z_i = base_p + c_i B E^T    at place p, with what linear equations leave of its patch, x = rows_p + c B
                                (`KnownPatches`; places that no update shows are alike, and so are all of them on a
                                model without position embedding);
    t_i = W o_i + bias          o_i in the span of the inputs of the attention's output projection, which the rows of
                                its gradient give, with the size of each direction.

So C (base_p + c B E^T + t) = s y_i are D - 1 equations for k + r + 1 unknowns, r the dimension of the attentions that
occur: linear, for every token and place alone. The softmax is not needed, so nothing couples the tokens. Coefficients
of attention are taken for normal; their variances start in proportion to the squared singular values and are
re-estimated from the solution (EM for variance components, Dempster, Laird and Rubin 1977). What is left of the
equations says which place a token has: an assignment of tokens to places.

Patches that agree up to the noise of the message are found as one token. How often it occurs is linear, too: with
kernel values k_ij of the first attention and values v_j, sum_j m_j k_ij (v_j - o_i) = 0 for all tokens i and heads.
Copies fill all places for which no token was found, because the missing tokens mostly agree with others: 42 updates of
vit_mini_64 at gamma 0.9 with missing tokens gave 39.1 dB on average, and 25.0 with the prior's guess in these places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import scipy.optimize
import torch
from torch import Tensor

from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.linear.input_spans import span_of_inputs
from attacks.linear.position_rows import projection_products
from attacks.mjp.mlp_spans import FirstBlock
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

REESTIMATES = 2
# Variances of the coefficients of attention start so much above what the mean suggests: the re-estimation lowers what
# is too large within a step, and raises what is too small by a few per cent a step.
VAGUE = 100.0
LEAST_ERROR = 1e-9  # standard, of the y_i, whose entries have size 1
TINY = 1e-300


@dataclass(frozen=True)
class KnownPatches:
    """What linear equations give of the patches, before tokens are singled out.

    Attributes:
        rows: (N, P) float64 normalised pixels; the unseen patches' rows are alike.
        basis: B, (k, P) orthonormal, the directions left unknown.
        masked: (N,) bool, places whose tokens bear the shared embedding in the update whose gradients are read.
        unseen: (N,) bool, places that no update shows: any of the unseen patches may be there.
        noisy: an update that gave the equations holds more than round-off explains, or may.
    """

    rows: Tensor
    basis: Tensor
    masked: Tensor
    unseen: Tensor
    noisy: bool = False

    @property
    def apart(self) -> bool:
        """Whether linear equations tell the patches apart; where not, tokens alone say which patch is where."""
        return not bool((self.rows == self.rows[0]).all())


def known_span(observation: Observation, tokenizer: Tokenizer) -> KnownPatches:
    """The affine span of all patches, from the gradient of the patch projection alone; no place is known.

    Raises:
        UsageError: the update lacks that gradient or the bias', or it is zero.
    """
    n, p = tokenizer.num_patches, tokenizer.patch_dim
    products = projection_products(observation, tokenizer)  # (D, P + 1)
    if products.shape[1] == p:
        raise UsageError("the update holds no gradient of the patch projection's bias: the patches' span has no origin")
    span = span_of_inputs(products, n, observation.gradients[tokenizer.weight].dtype)
    directions, constant = span.directions[: span.rank, :p], span.directions[: span.rank, p]
    weighted = span.sizes[: span.rank] * constant
    centre = weighted @ directions / (weighted @ constant)  # (P,)
    spread = directions - constant[:, None] * centre
    basis = torch.linalg.svd(spread, full_matrices=False).Vh[: min(n - 1, p)]
    everywhere = torch.ones(n, dtype=torch.bool, device=basis.device)
    return KnownPatches(centre.expand(n, p).clone(), basis, ~everywhere, everywhere)


@dataclass(frozen=True)
class PlacedPatches:
    """Patches of the tokens that were found.

    Attributes:
        patches: (N, P) normalised pixels; NaN where no token was found, and no copy of one can be.
        deviation: (N,) expected rms error of a pixel; infinite where no token was found.
        found: (N,) bool; copies of one that was found do not count.
        misfit: (N,) squared residual of the equations over their number, in units of the error of the y_i; 0 of copies,
            which have no equations of their own and are preferred to a guess.
    """

    patches: Tensor
    deviation: Tensor
    found: Tensor
    misfit: Tensor

    @classmethod
    def none(cls, known: KnownPatches) -> PlacedPatches:
        """No patch is found."""
        infinite = torch.full_like(known.rows[:, 0], torch.inf)
        return cls(torch.full_like(known.rows, torch.nan), infinite, infinite < 0, infinite)

    def extended(self, places: Tensor, patches: Tensor, deviation: Tensor, misfit: Tensor) -> PlacedPatches:
        """With patches (S, P) at places (S,) that were found, too."""
        new = (patches, deviation, torch.ones_like(places, dtype=torch.bool), misfit)
        old = (self.patches, self.deviation, self.found, self.misfit)
        return PlacedPatches(*(a.index_put((places,), b) for a, b in zip(old, new, strict=True)))

    def without(self, places: Tensor) -> PlacedPatches:
        """Without the patches at these places (S,)."""
        lost = torch.zeros_like(self.found).index_fill(0, places, True)
        return PlacedPatches(
            self.patches.masked_fill(lost[:, None], torch.nan),
            self.deviation.masked_fill(lost, torch.inf),
            self.found & ~lost,
            self.misfit.masked_fill(lost, torch.inf),
        )

    def doubted(self, places: Tensor) -> PlacedPatches:
        """With too great an expected error to be vouched for at these places (N,) bool."""
        return replace(self, deviation=torch.where(places, self.deviation.clamp(min=VOUCHED_DEVIATION), self.deviation))

    def in_range(self, scale: Tensor, shift: Tensor) -> PlacedPatches:
        """With errors no smaller than what lies outside [0, 1], where the pixels of every photograph are.

        The projection onto a convex set that holds the truth is nearer to it, so a patch is wrong by at least its own
        distance from there. Where that exceeds what is vouched for and nothing certifies it, it is dropped.

        Args:
            scale, shift: (P,) pixels are normalised ones times the scale plus the shift.
        """
        pixels = self.patches * scale + shift
        outside = (pixels - pixels.clamp(0, 1)).square().mean(dim=1).sqrt()  # NaN of a missing patch
        bounded = replace(self, deviation=self.deviation.fmax(outside))
        return bounded.without((~self.found & (outside > VOUCHED_DEVIATION)).nonzero()[:, 0])

    def completed(self, other: PlacedPatches, unseen: Tensor) -> PlacedPatches:
        """With what another search found where this one did not.

        Args:
            unseen: (N,) bool, places that every search fills in an order of its own: there each patch of the other
                search stands for the one here that it is assigned to, by the least sum of distances.
        """
        result = self.replaced(other.found & ~self.found & ~unseen, other)
        theirs, places = (unseen & other.found).nonzero()[:, 0], unseen.nonzero()[:, 0]
        distances = torch.cdist(other.patches[theirs], self.patches[places])
        distances = distances.nan_to_num(float(distances.nan_to_num(0.0).sum()) + 1.0)  # nothing is here
        one, another = scipy.optimize.linear_sum_assignment(distances.cpu().numpy())
        theirs, places = theirs[torch.as_tensor(one)], places[torch.as_tensor(another)]
        new = ~self.found[places]
        theirs, places = theirs[new], places[new]
        return result.extended(places, *(part[theirs] for part in (other.patches, other.deviation, other.misfit)))

    def replaced(self, take: Tensor, other: PlacedPatches) -> PlacedPatches:
        """With the patches of another search at the places of `take` (N,) bool."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return PlacedPatches(*(torch.where(take[:, None] if a.ndim > 1 else take, b, a) for a, b in pairs))


class TokenPatches:
    """The equations between tokens at the second norm and patches at their places.

    Args:
        block: the first block.
        known: of the patches.
        scales: (P,) what a normalised pixel is in units of [0, 1].
    """

    def __init__(self, block: FirstBlock, known: KnownPatches, scales: Tensor) -> None:
        self.block, self.known, self.scales = block, known, scales
        self.prefix = len(block.prefix)
        self.base = block.tokens(known.rows, known.masked)  # (N', D)
        self.directions = known.basis @ block.projection.T  # (k, D)
        span = block.attention
        self.mixed, self.constant = span.directions[:, :-1], span.directions[:, -1]  # (N', D), (N',)
        self.branch = block.attention_branch(self.mixed)  # (N', D)
        self.bias = block.attention_bias

    def solve(self, y: Tensor, errors: Tensor) -> PlacedPatches:
        """Place tokens and solve for their patches.

        Args:
            y: (S, D), each of mean 0 and length D^1/2.
            errors: (S,) mean squared error of an entry of each.
        """
        variance, error = self._first_variance(), max(float(errors.median()), LEAST_ERROR**2)
        for last in (False,) * REESTIMATES + (True,):
            model = _Equations(self, variance, error)
            misfit, factor = model.misfits(y)  # (S, N')
            cost = misfit.clamp(min=TINY).log()
            tokens, places = scipy.optimize.linear_sum_assignment(cost.clamp(max=1e6).cpu().numpy())
            tokens, places = (torch.as_tensor(i, device=y.device) for i in (tokens, places))
            own = torch.maximum(misfit[tokens, places] / model.degrees, errors[tokens] / error)
            solved = y[tokens] * factor[tokens, places, None]
            coefficients, attention, spread = model.coefficients(solved, places)
            if not last:
                variance = attention.square().mean(dim=0) + spread
        return self._result(model, places, coefficients, attention, own, (y, misfit, factor))

    def _first_variance(self) -> Tensor:
        """Of the coefficients along the rows of the attention's span, (N',)."""
        sizes = self.block.attention.sizes
        weighted = sizes * self.constant
        mean = weighted / (weighted @ self.constant)
        return sizes * float(VAGUE * mean.square().sum() / sizes.sum())

    def _result(
        self,
        model: _Equations,
        places: Tensor,
        coefficients: Tensor,
        attention: Tensor,
        own: Tensor,
        every: tuple[Tensor, Tensor, Tensor],
    ) -> PlacedPatches:
        known, p, (y, everywhere, factor) = self.known, self.prefix, every
        patches = torch.full_like(known.rows, torch.nan)
        deviation, misfit = (torch.full_like(patches[:, 0], torch.inf) for _ in range(2))
        mine = places >= p
        at = places[mine] - p
        patches[at] = known.rows[at] + coefficients[mine] @ known.basis
        pixels = known.basis * self.scales
        expected = ((model.covariance @ pixels) * pixels).sum() / len(self.scales)
        deviation[at], misfit[at] = (expected * own[mine].clamp(min=1.0)).sqrt(), own[mine]
        found = deviation.isfinite()
        missing = known.unseen & ~found
        if missing.any() and (known.unseen & found).any():
            tokens = self.base[places].clone()
            tokens[mine] += coefficients[mine] @ self.directions
            copied = torch.zeros(len(places), dtype=torch.bool, device=places.device)
            copied[mine] = known.unseen[at]
            times = self._multiplicities(tokens, attention @ self.mixed, copied, int(missing.sum()))
            patches[missing], misfit[missing] = patches[places - p][times], 0.0
        rest = (~known.unseen & ~found).nonzero()[:, 0]
        if len(rest):  # their tokens agree with others' up to the noise
            nearest = everywhere[:, rest + p].argmin(dim=0)
            scaled = y[nearest] * factor[nearest, rest + p, None]
            patches[rest] = known.rows[rest] + model.coefficients(scaled, rest + p)[0] @ known.basis
        return PlacedPatches(patches, deviation, found, misfit)

    def _multiplicities(self, tokens: Tensor, mixed: Tensor, copied: Tensor, missing: int) -> Tensor:
        """Which tokens (S, D) occur once more, (missing,) indices among those that are `copied` (S,).

        Args:
            mixed: o_i, (S, D).
        """
        query, key, value = self.block.heads(tokens)  # (heads, S, D / heads)
        weights = (query @ key.transpose(1, 2)).softmax(dim=-1)  # (heads, S, S)
        own = mixed.reshape(len(mixed), len(query), -1).transpose(0, 1)  # (heads, S, D / heads)
        terms = weights[..., None] * (value[:, None] - own[:, :, None])  # (heads, S, S, D / heads)
        system = terms.permute(0, 1, 3, 2).reshape(-1, len(tokens))
        matrix = system[:, copied]
        # Least squares for more = m - 1 >= 0 with a heavy equation for their sum.
        heavy = 1e3 * matrix.norm()
        gram = matrix.T @ matrix + heavy**2
        right = -matrix.T @ system.sum(dim=1) + heavy**2 * missing
        root = torch.linalg.cholesky(gram + 1e-12 * gram.diagonal().mean() * torch.eye(len(gram)).to(gram))
        target = torch.linalg.solve_triangular(root, right[:, None], upper=False)[:, 0]
        more = torch.as_tensor(scipy.optimize.nnls(root.T.cpu().numpy(), target.cpu().numpy())[0])
        whole = more.floor().long()
        left = missing - int(whole.sum())
        if left > 0:
            whole[(more - whole).topk(min(left, len(more))).indices] += 1
        indices = copied.nonzero()[:, 0].cpu().repeat_interleave(whole)
        return torch.cat([indices, indices[:1].expand(missing)])[:missing].to(tokens.device)


def masked_by_tokens(block: FirstBlock, known: KnownPatches, scales: Tensor, y: Tensor, errors: Tensor) -> Tensor:
    """Which positions an update masks, from its tokens alone: (N,) bool.

    A token's equations hold with the embedding that it bears: that of its place, or the one that masked positions
    share. Places that no token claims are masked.

    Args:
        known: of the patches; its masks do not matter.
        scales, y, errors: as `TokenPatches` takes them.
    """
    none = torch.zeros_like(known.masked)
    if block.unknown is None:
        return none
    error = max(float(errors.median()), LEAST_ERROR**2)
    own, shared = (
        _Equations(system, system._first_variance(), error).misfits(y)[0]
        for system in (TokenPatches(block, replace(known, masked=mask), scales) for mask in (none, ~none))
    )
    prefix = len(block.prefix)
    best = own[:, prefix:].min(dim=1)
    others = torch.cat([own[:, :prefix], shared[:, prefix:]], dim=1).amin(dim=1)
    masked = ~none
    masked[best.indices[best.values < others]] = False
    return masked


class _Equations:
    """The equations with given variances, whitened.

    Attributes:
        degrees: equations of a token less its unknowns.
        covariance: of the coefficients along B, (k, k).
    """

    def __init__(self, system: TokenPatches, variance: Tensor, error: float) -> None:
        self.system, width = system, system.base.shape[1]
        # Coefficients w of attention: normal with these variances, on condition that the constant input is 1.
        weighted = variance * system.constant
        self.mean = weighted / (weighted @ system.constant)  # (N',)
        self.prior = torch.diag(variance) - torch.outer(weighted, weighted) / (weighted @ system.constant)
        self.branch = _centred(system.branch)  # (N', D)
        noise = self.branch.T @ self.prior @ self.branch
        noise.diagonal().add_(error)
        self.root = torch.linalg.cholesky(noise)
        self.base = self._whitened(_centred(system.base + system.bias + self.mean @ system.branch))  # (N', D)
        directions = self._whitened(_centred(system.directions))  # (k, D)
        self.basis, factor = torch.linalg.qr(directions.T)  # (D, k), (k, k)
        self.solved = torch.linalg.pinv(factor)  # (k, k)
        self.covariance = self.solved @ self.solved.T
        self.degrees = max(width - 2 - len(directions), 1)

    def _whitened(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.root, rows.T, upper=False).T

    def misfits(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Squared residuals (S, N') of tokens y (S, D) at every place, infinite where s < 0, and s."""
        p, y = self.system.prefix, self._whitened(y)
        whole = y, self.base[:p]
        reduced = (rows - (rows @ self.basis) @ self.basis.T for rows in (y, self.base[p:]))
        parts = [_ray_distance(*whole), _ray_distance(*reduced)]
        return tuple(torch.cat(pair, dim=1) for pair in zip(*parts, strict=True))

    def coefficients(self, scaled: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """c (S, k) and w (S, N') of tokens s y (S, D) at their places (S,), and the variance (N',) of w."""
        system = self.system
        left = self._whitened(scaled) - self.base[places]
        along = left @ self.basis
        along[places < system.prefix] = 0
        c = along @ self.solved.T
        rest = torch.linalg.solve_triangular(self.root.T, (left - along @ self.basis.T).T, upper=True).T
        pull = self.prior @ self.branch  # (N', D)
        inner = torch.cholesky_solve(pull.T, self.root)  # (D, N')
        spread = self.prior.diagonal() - (pull * inner.T).sum(dim=1)
        return c, self.mean + rest @ pull.T, spread.clamp(min=0)


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(dim=-1, keepdim=True)


def _ray_distance(y: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances (S, M) of points `base` (M, D) from the rays s y, s > 0, (S, D), and s."""
    product, size = y @ base.T, y.square().sum(dim=1, keepdim=True)
    distance = base.square().sum(dim=1) - product.square() / size
    return torch.where(product > 0, distance.clamp(min=0), torch.inf), product / size
