"""Clients as the attack simulates them: candidate images and labels in, gradients out, differentiable in both.

Two engines with one interface. `OnePass` runs all lanes through one forward and one backward pass to the outputs of the
linear layers and norms; a layer's own gradient follows from what went in and what came back (`gradients.Product`), and
parameters that are added to tokens get a copy a lane. `Unrolled` differentiates by every weight, lane by lane, through
any number of local SGD steps: it takes every model, and is the oracle of the other. `simulate` picks.

Second derivatives need PyTorch's mathematical attention kernel, set here.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.gradient_matching.gradients import Part, Product, Target, Value
from attacks.gradient_matching.reading import Reading
from attacks.observation import Observation

# Relative difference of the two engines' gradients that round-off explains.
AGREE = 1e-3


class Simulation(ABC):
    """Simulated clients of one model, a lane each.

    Attributes:
        model: a copy of the sent model, in evaluation mode, without gradients.
        names: the parameters that images reach and the victims sent.
        head: name of the module whose output are the logits, or "".
        images: candidates a lane: the batch, or the batches of all local steps.
    """

    def __init__(self, observation: Observation, masks: Tensor | None) -> None:
        self.model = copy.deepcopy(observation.model).eval().requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.masks = masks
        self.batch, self.steps, self.rate = observation.num_examples, observation.local_steps, observation.learning_rate
        self.images = self.batch * self.steps
        self.names: tuple[str, ...] = ()

    @abstractmethod
    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Part]:
        """Gradients of the mean cross-entropy, summed over local steps.

        Args:
            images: (L, B, C, H, W) normalised, B = `images`.
            labels: (L, B) int64, or (L, B, K) probabilities.
        """

    def logits(self, weights: Mapping[str, Tensor], images: Tensor, masks: Tensor | None) -> Tensor:
        """(B, K) of normalised images (B, C, H, W) with masks (B, N) or None."""
        extra = {} if masks is None else {"position_mask": masks}
        output = functional_call(self.model, dict(weights), (images,), extra)
        return getattr(output, "logits", output)


class Unrolled(Simulation):
    """Lane by lane, through all local steps."""

    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Part]:
        """See `Simulation`."""
        lanes = [self._lane(index, x, y) for index, (x, y) in enumerate(zip(images, labels, strict=True))]
        if len(lanes) == 1:  # a view instead of a copy of every gradient
            return {name: Value(gradient[None]) for name, gradient in lanes[0].items()}
        return {name: Value(torch.stack([lane[name] for lane in lanes])) for name in self.names}

    def reached(self, images: Tensor, labels: Tensor) -> list[str]:
        """Parameters that images reach, by one lane (1, B, C, H, W)."""
        weights = {name: w.detach().requires_grad_() for name, w in self.weights.items()}
        found = torch.autograd.grad(
            self._loss(weights, 0, images[0], labels[0], 0), weights.values(), allow_unused=True
        )
        return [name for name, gradient in zip(weights, found, strict=True) if gradient is not None]

    def _lane(self, index: int, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weights = {name: w.detach() for name, w in self.weights.items()}
        weights |= {name: weights[name].requires_grad_() for name in self.names}
        total: dict[str, Tensor] = {}
        for step in range(self.steps):
            loss = self._loss(weights, index, images, labels, step)
            found = torch.autograd.grad(loss, [weights[name] for name in self.names], create_graph=True)
            for name, gradient in zip(self.names, found, strict=True):
                total[name] = total[name] + gradient if step else gradient
                weights[name] = weights[name] - self.rate * gradient
        return total

    def _loss(self, weights: Mapping[str, Tensor], index: int, images: Tensor, labels: Tensor, step: int) -> Tensor:
        part = slice(step * self.batch, (step + 1) * self.batch)
        masks = None if self.masks is None else self.masks[index].expand(self.batch, -1)
        return F.cross_entropy(self.logits(weights, images[part], masks), labels[part])


class OnePass(Simulation):
    """All lanes in one pass; for gradients of one step."""

    def __init__(self, observation: Observation, masks: Tensor | None) -> None:
        super().__init__(observation, masks)
        self.layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, (nn.Linear, nn.LayerNorm)) or _is_patch_projection(module)
        }
        self.copied: tuple[str, ...] = ()
        self.head = ""

    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Part]:
        """See `Simulation`."""
        lanes, batch = images.shape[:2]
        copies = {n: self.weights[n].detach().repeat(lanes * batch, 1, 1).requires_grad_() for n in self.copied}
        masks = None if self.masks is None else self.masks.repeat_interleave(batch, dim=0)
        with _recorded(self.layers) as seen:
            logits = self.logits(self.weights | copies, images.flatten(0, 1), masks)
        loss = F.cross_entropy(logits, labels.flatten(0, 1), reduction="sum") / batch
        outputs = [y for _, y in seen.values()]
        found = torch.autograd.grad(loss, [*copies.values(), *outputs], create_graph=True, allow_unused=True)
        parts: dict[str, Part] = {}
        for name, gradient in zip(copies, found[: len(copies)], strict=True):
            parts[name] = Value(gradient.unflatten(0, (lanes, batch)).sum(dim=1, keepdim=True))  # (L, 1, rows, D)
        for (name, (x, _)), delta in zip(seen.items(), found[len(copies) :], strict=True):
            if delta is not None:
                parts |= _layer_gradients(name, self.layers[name], x, delta, lanes)
        return {name: parts[name] for name in self.names}

    def cover(self, images: Tensor, labels: Tensor, reached: Sequence[str]) -> set[str]:
        """Find out which layers run once, which parameters need copies, and where the head is; the names covered."""
        with _recorded(self.layers) as seen:
            masks = None if self.masks is None else self.masks[:1].expand(images.shape[1], -1)
            logits = self.logits(self.weights, images[0], masks)
        self.layers = {name: self.layers[name] for name in seen}
        self.head = next((n for n, (_, y) in reversed(seen.items()) if y.shape == logits.shape and y.equal(logits)), "")
        own = {f"{name}.{kind}" for name in seen for kind in ("weight", "bias")}
        rest = [name for name in reached if name not in own]
        self.copied = tuple(n for n in rest if self.weights[n].dim() == 3 and len(self.weights[n]) == 1)
        return own | set(self.copied)


def simulate(observation: Observation, readings: Sequence[Reading], restarts: int) -> tuple[Simulation, Target]:
    """Simulated clients for victims of one model, and what they are held against.

    Args:
        observation: one of the victims' (they share model, batch size and local steps).
        readings: one a victim.
        restarts: lanes a victim.
    """
    masks = _masks(observation, readings)
    masks = None if masks is None else masks.repeat_interleave(restarts, dim=0)
    unrolled = Unrolled(observation, masks)
    probe, labels = _probe(observation, unrolled)
    with math_attention(), torch.enable_grad():
        reached = unrolled.reached(probe, labels)
        sent = set.intersection(*(set(reading.gradients) for reading in readings))
        names = unrolled.names = tuple(name for name in reached if name in sent)
        fast = OnePass(observation, masks)
        covered = fast.cover(probe[:, : unrolled.batch], labels[:, : unrolled.batch], reached)
        unrolled.head = fast.head
        fast.names = names
        chosen = fast if observation.local_steps == 1 and covered.issuperset(names) else unrolled
        if chosen is fast and not _agree(fast, unrolled, probe, labels):
            chosen = unrolled
    values = {n: torch.stack([r.gradients[n] for r in readings]).repeat_interleave(restarts, dim=0) for n in names}
    return chosen, Target.of(values)


@contextmanager
def math_attention():
    """Within it attention has second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _masks(observation: Observation, readings: Sequence[Reading]) -> Tensor | None:
    """(V, N) bool, or None where nobody hides anything."""
    known = [reading.mask for reading in readings if reading.mask is not None]
    if not known:
        return None
    return torch.stack([torch.zeros_like(known[0]) if r.mask is None else r.mask for r in readings])


def _probe(observation: Observation, simulation: Simulation) -> tuple[Tensor, Tensor]:
    """Noise and labels for one lane: (1, B, C, H, W) and (1, B)."""
    generator = torch.Generator().manual_seed(0)
    like = next(iter(simulation.weights.values()))
    images = torch.randn(1, simulation.images, *observation.image_shape, generator=generator).to(like)
    return images.requires_grad_(), torch.zeros(1, simulation.images, dtype=torch.int64, device=like.device)


def _agree(fast: OnePass, oracle: Unrolled, images: Tensor, labels: Tensor) -> bool:
    """Whether both engines give the same gradients on one lane."""
    held = fast.masks, oracle.masks
    fast.masks, oracle.masks = (None if m is None else m[:1] for m in held)
    quick, slow = fast.gradients(images, labels), oracle.gradients(images, labels)
    fast.masks, oracle.masks = held
    expected = {name: part.value.detach() for name, part in slow.items()}
    gap = sum(part.gap(expected[name]) for name, part in quick.items())
    return bool(gap.sqrt() < AGREE * sum(part.square() for part in slow.values()).sqrt())


def _is_patch_projection(module: nn.Module) -> bool:
    square = isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and module.groups == 1
    return square and module.padding in ((0, 0), "valid") and module.dilation == (1, 1)


@contextmanager
def _recorded(layers: Mapping[str, nn.Module]):
    """Within it, layers note input and output by name, in the order of their calls; layers called twice drop out."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    calls: dict[str, int] = {}
    with ExitStack() as hooks:
        for name, module in layers.items():

            def note(_, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
                calls[name] = calls.get(name, 0) + 1
                seen[name] = (inputs[0], output)

            hooks.callback(module.register_forward_hook(note).remove)
        yield seen
    for name in [n for n, count in calls.items() if count > 1]:
        del seen[name]


def _layer_gradients(name: str, layer: nn.Module, x: Tensor, delta: Tensor, lanes: int) -> dict[str, Part]:
    """Gradients of one layer's weight and bias, a lane each.

    Args:
        x, delta: the layer's input and its output's gradient, (L B, ..., channels), or (L B, C, H, W) for a projection.
    """
    if isinstance(layer, nn.Conv2d):
        x, delta = F.unfold(x, layer.kernel_size, stride=layer.stride).mT, delta.flatten(2).mT
    found: dict[str, Part] = {}
    if isinstance(layer, nn.LayerNorm):
        if layer.weight is not None:
            x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
            found[f"{name}.weight"] = Value((x * delta).reshape(lanes, -1, delta.shape[-1]).sum(dim=1))
    else:
        tokens = (t.reshape(lanes, -1, t.shape[-1]) for t in (delta, x))
        found[f"{name}.weight"] = Product(*tokens)
    if layer.bias is not None:
        found[f"{name}.bias"] = Value(delta.reshape(lanes, -1, delta.shape[-1]).sum(dim=1))
    return found
