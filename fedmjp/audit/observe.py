"""Build the `Observation` of an update, which an attack receives, from the messages that the server has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from attacks import Capability, Observation, ThreatModel, UsageError, find_tokenizer
from attacks.active.architecture import add_sent_layers, holds_added_layers
from attacks.adaptive_steps import undo_first_step
from attacks.findings import Finding
from attacks.fingerprints import minus_weights, repair
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.models import POSITION_TABLES
from fedmjp.objectives import Draws, Learner


class SentModels:
    """The models that clients were sent, built once for as long as the weights stay the same."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._last: tuple[Mapping[str, Tensor], nn.Module] | None = None

    def __call__(self, sent: Mapping[str, Tensor]) -> nn.Module:
        """A model in evaluation mode with the weights and buffers `sent`; it is shared and must not be changed."""
        if self._last is None or not _equal(self._last[0], sent):
            self._last = sent, model_as_sent(self.module, sent)
        return self._last[1]


UNDONE = Finding(
    "adaptive_steps",
    "the first step of Adam was undone: of entries far above its epsilon the digits of the weights show the sign and a "
    "lower bound only, so that pictures show outlines and nothing is vouched for",
    hinders=True,
)


def undo_adam(observation: Observation, epsilon: float = 1e-8) -> tuple[Observation, list[Finding]]:
    """The gradient behind the first step of Adam or AdamW (kind "gradient"), and what was noticed.

    Args:
        observation: returned weights after one step; decay that is not part of the gradient is subtracted.
        epsilon: of the optimiser (torch's default).

    Returns:
        the update as `attacks.fingerprints.repair` leaves it, and the reason, where it is no first step.
    """
    try:
        return undo_first_step(observation, epsilon), [UNDONE]
    except UsageError as error:  # later steps of a client that keeps its moments
        repaired, recognised = repair(observation)
        return repaired, [Finding(UNDONE.name, str(error), hinders=True), *recognised]


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def observe_update(
    task: ClientTask,
    threat_model: ThreatModel,
    *,
    model: nn.Module,
    round: int,
    client: int,
    sent: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
    labels: Tensor | None = None,
    clients: int = 1,
) -> Observation:
    """Build the `Observation` of one update of our own federation.

    Args:
        task: model and configuration of the federation.
        threat_model: determines whether position gradients and labels are included.
        model: with the weights that the client was sent (`SentModels`).
        round: number of the round, from 1.
        client: the client's number, from 0.
        sent: weights and buffers that the client was sent, by name.
        received: gradients, or weights, that the client returned, by parameter name; the server knows which of them
            its clients leave as they are, and the observation is without those.
        labels: (B * local steps,) int64 of the steps' batches in their order, included only if the threat model grants
            them.
        clients: whose mean `received` is (`fedmjp.audit.aggregate`); `client` is then the number of their group.
    """
    f, built = task.config.federation, task.model
    gradients = {n: t.to(task.device) for n, t in received.items() if not task.defense.freezes(n)}
    steps = task.steps(client)
    if f.update == "weights":
        gradients = {n: (sent[n].to(t) - t) / f.learning_rate for n, t in gradients.items()}
        gradients = without_decay(gradients, sent, task.config, steps)
    if Capability.POSITION_GRADIENT not in threat_model.grants:
        gradients = {n: g for n, g in gradients.items() if n not in POSITION_TABLES}
    first, later = None, []
    if labels is not None and Capability.LABELS in threat_model.grants:
        first, *later = labels.to(task.device).chunk(steps)
    return Observation(
        gradients=gradients,
        model=model,
        num_examples=clients * f.batch_size * task.learner.objective.whole_views,
        image_shape=(3, built.image_size, built.image_size),
        mean=tuple(built.mean),
        std=tuple(built.std),
        kind=f.update,
        local_steps=steps,
        learning_rate=f.learning_rate,
        round=round,
        client=client,
        labels=first,
        later_labels=torch.cat(later) if later else None,
        objective=task.objective_name,
        weights_granted=Capability.MODEL_WEIGHTS in threat_model.grants,
        drops_patches=task.learner.objective.drops_patches,
    )


def without_decay(
    gradients: Mapping[str, Tensor], sent: Mapping[str, Tensor], config: RunConfig, steps: int
) -> dict[str, Tensor]:
    """An update less the share of the clients' weight decay, which the server knows because it orders the recipe.

    Exact for one step. Over several steps the weights of all of them are taken for those that were sent, which is right
    to first order in the learning rate. Under SGD with momentum m the decay of step s of k counts (1 - m^(k-s+1)) /
    (1 - m) times, because torch adds it to the gradient that the momentum carries on.

    Args:
        gradients: (sent - returned) / rate by name.
        sent: weights by name.
        config: holds the clients' recipe.
        steps: local steps.
    """
    local, rate = config.local, config.federation.learning_rate
    if not local.weight_decay:
        return dict(gradients)
    carried = [(1 - local.momentum**left) / (1 - local.momentum) for left in range(1, steps + 1)]
    factor = local.weight_decay * sum(carried)
    return {name: minus_weights(g, sent[name].to(g), factor, rate) for name, g in gradients.items()}


def model_as_sent(module: nn.Module, sent: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `module` in evaluation mode with the weights and buffers that were sent, by name.

    Layers that a server has added to what it sent (`attacks.active.architecture`) are part of it.

    Raises:
        UsageError: a name that neither the module nor such a layer has.
    """
    twin = copy.deepcopy(module)
    add_sent_layers(twin, sent)
    state = twin.state_dict()
    if unknown := [name for name in sent if name not in state]:
        raise UsageError(
            f"the model has nothing called {unknown[0]}, which was sent; pass the model that the client has"
        )
    for name, value in sent.items():
        state[name].copy_(value)
    return twin.eval()


def as_trained(model: nn.Module, gradients: Mapping[str, Tensor]) -> nn.Module:
    """The model, or a copy, whose parameters are trained where the update holds their gradient: a client may train what
    the auditor's own copy has frozen (`model.requires_grad_(False)`)."""
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad and n in gradients and gradients[n].any()]
    if not frozen:
        return model
    twin = copy.deepcopy(model)
    for name in frozen:
        twin.get_parameter(name).requires_grad_(True)
    return twin


def model_with_sent_layers(module: nn.Module, sent: Mapping[str, Tensor]) -> nn.Module:
    """`module` itself, or a copy with the layers that a server has added to what it sent, without their values."""
    if not holds_added_layers(sent):
        return module
    twin = copy.deepcopy(module)
    add_sent_layers(twin, sent)
    return twin


def observe_step(
    learner: Learner, images: Tensor, draws: Draws, labels: Tensor | None = None, *, round: int = 1, client: int = 0
) -> tuple[Observation, Tensor]:
    """The gradient of one step under an objective as the server sees it, with every capability granted but labels.

    The model is left in evaluation mode; what the objective keeps to itself is not changed.

    Args:
        learner: model, objective and defence.
        images: (B, C, H, W) in [0, 1].
        draws: of the step.
        labels: (B,) int64, for an objective that needs them.
        round: number of the round, from 1.
        client: the client's number.

    Returns:
        The observation, and the whole views that the model was fed, (B * whole_views, C, H, W) in [0, 1], view by view.
    """
    built, objective = learner.model, learner.objective
    built.module.train()
    buffers = {n: b.clone() for n, b in built.module.named_buffers()}
    with torch.enable_grad():
        views = learner.views(images, draws, round)
        names, parameters = zip(*built.module.named_parameters(), strict=True)
        found = torch.autograd.grad(learner.loss(views, labels, draws), parameters, allow_unused=True)
    for name, buffer in built.module.named_buffers():
        buffer.copy_(buffers[name])
    sent = zip(names, parameters, found, strict=True)
    observation = Observation(
        gradients={n: torch.zeros_like(p) if g is None else g for n, p, g in sent},
        model=built.module.eval(),
        num_examples=len(images) * objective.whole_views,
        image_shape=(images.shape[1], built.image_size, built.image_size),
        mean=tuple(built.mean),
        std=tuple(built.std),
        round=round,
        client=client,
        objective=type(objective).__name__.lower(),
        drops_patches=objective.drops_patches,
    )
    return observation, torch.cat([view.images for view in views[: objective.whole_views]])


def as_granted(observation: Observation, threat_model: ThreatModel) -> Observation:
    """A user's update without the gradients of its position embeddings, where the threat model does not grant them."""
    if Capability.POSITION_GRADIENT in threat_model.grants:
        return observation
    try:
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
    except UsageError:  # no ViT, so there is no such gradient
        return observation
    hidden = {tokenizer.positions, tokenizer.shared_position}
    return replace(observation, gradients={n: g for n, g in observation.gradients.items() if n not in hidden})
