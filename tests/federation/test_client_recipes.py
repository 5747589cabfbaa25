"""What clients and server do beside plain SGD and the mean: against torch's optimisers and Flower's own strategies."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from attacks import ATTACKS, UsageError
from fedmjp.audit.observe import SentModels, observe_update
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.federation.client_app import app
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.federation.server_optimizer import ServerOptimizer
from fedmjp.federation_options import STRATEGIES, FedAvgM
from fedmjp.metrics import psnr
from fedmjp.simulate import main
from tests.federation.conftest import changed
from tests.federation.test_rounds import state_of, train

OPTIMISED = [name for name, kind in STRATEGIES.items() if kind.flower]


@pytest.fixture(autouse=True)
def _run_of_flower() -> None:
    """Flower's messages carry the id of a run, which a grid sets."""
    LocalGrid(app, 1)


def rounds_of(numbers: int = 3) -> list[list[torch.Tensor]]:
    """Weights that two clients return in each of some rounds, (n,) each."""
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(50, generator=generator) for _ in range(2)] for _ in range(numbers)]


@pytest.mark.parametrize("name", OPTIMISED)
def test_the_servers_optimiser_is_flowers_on_all_replies(name: str) -> None:
    """Flower's strategy gets both replies of a round, ours their mean."""
    settings = STRATEGIES[name]()
    theirs, ours = getattr(flower, settings.flower)(**vars(settings)), ServerOptimizer(settings)
    weights = torch.zeros(50)
    for number, returned in enumerate(rounds_of(), 1):
        record = ArrayRecord({"w": Array(weights.numpy())})
        theirs.current_arrays = record if name == "fedavgm" else {"w": weights.numpy()}
        replies = [
            Message(
                RecordDict({"a": ArrayRecord({"w": Array(r.numpy())}), "m": MetricRecord({"num-examples": 4})}),
                node,
                MessageType.TRAIN,
            )
            for node, r in enumerate(returned, 1)
        ]
        expected = torch.from_numpy(theirs.aggregate_train(number, replies)[0]["w"].numpy()).float()
        weights = ours.step(weights, torch.stack(returned).mean(dim=0), number)
        torch.testing.assert_close(weights, expected)


def test_momentum_of_the_server_is_torchs() -> None:
    ours, weights = ServerOptimizer(FedAvgM(0.5, 0.9)), torch.zeros(50)
    parameter = torch.nn.Parameter(torch.zeros(50))
    oracle = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    for number, returned in enumerate(rounds_of(), 1):
        mean = torch.stack(returned).mean(dim=0)
        weights = ours.step(weights, mean, number)
        parameter.grad = parameter.detach() - mean
        oracle.step()
        torch.testing.assert_close(weights, parameter.detach())


@pytest.mark.parametrize("name", OPTIMISED)
def test_the_servers_optimiser_goes_on_from_its_state(name: str) -> None:
    settings, (first, *later) = STRATEGIES[name](), [torch.stack(r).mean(dim=0) for r in rounds_of()]
    unbroken = ServerOptimizer(settings)
    weights = unbroken.step(torch.zeros(50), first, 1)
    resumed = ServerOptimizer(settings, unbroken.state())
    for number, mean in enumerate(later, 2):
        expected = unbroken.step(weights, mean, number)
        weights = resumed.step(weights, mean, number)
        assert torch.equal(weights, expected)


@pytest.mark.usefixtures("undrawn")
def test_a_run_with_server_momentum_resumes_to_the_same_rows(tmp_path, monkeypatch) -> None:
    from fedmjp.audited_federation import FederationAudit

    options = ["--model", "vit_micro_32", "--weights", "random", "--clients", "2", "--rounds", "3", "--test-limit", "8"]
    options += ["--strategy", "fedadam", "--attacks", "patch_embedding", "--threads", "1"]
    assert main([*options, "--out", str(tmp_path / "whole")]) == 0
    rounds, real = [], FederationAudit.on_round

    def stopping(self, number, state) -> None:
        real(self, number, state)
        rounds.append(number)
        if number == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FederationAudit, "on_round", stopping)
        assert main([*options, "--out", str(tmp_path / "broken")]) == 130
    assert main([*options, "--out", str(tmp_path / "broken"), "--resume"]) == 0
    scores = [
        [line.rsplit(",", 1)[0] for line in (tmp_path / run / "rounds.csv").read_text().splitlines()]
        for run in ("whole", "broken")
    ]
    assert scores[0] == scores[1]


LOCAL = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.05},
    "fedprox": {"strategy": "fedprox:proximal_mu=0.5"},
}


@pytest.mark.parametrize("name", LOCAL)
def test_local_steps_are_a_plain_loop(small, name: str) -> None:
    config = changed(small, update="weights", local_steps=3, batch_size=2, rounds=1, clients=1, **LOCAL[name])
    _, states = train(config)
    task = ClientTask(config, "none")
    start, module, local = state_of(task), task.model.module, config.local
    rate = config.federation.learning_rate
    if local.optimizer == "adamw":
        optimiser = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=local.weight_decay)
    else:
        decay = {"momentum": local.momentum, "weight_decay": local.weight_decay}
        optimiser = torch.optim.SGD(module.parameters(), lr=rate, **decay)
    for step in range(3):
        batch = task.batch(0, 1, step)
        loss = torch.nn.functional.cross_entropy(module(task.model.normalise(batch.images)), batch.labels)
        if name == "fedprox":
            loss = loss + 0.25 * sum((p - start[n]).square().sum() for n, p in module.named_parameters())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for n, value in state_of(task).items():
        torch.testing.assert_close(states[1][n], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("decay", "momentum"), [(0.05, 0.0), (0.05, 0.9)])
def test_the_audit_takes_off_the_decay_that_the_server_ordered(small, decay: float, momentum: float) -> None:
    config = changed(small, update="weights", weight_decay=decay, momentum=momentum, rounds=1)
    task = ClientTask(config, "none")
    sent = state_of(task)
    batch, result = task.batch(0, 1, 0), task.update(0, 1, sent)
    view = observe_update(
        task,
        config.threat_model(),
        model=SentModels(task.model.module)(sent),
        round=1,
        client=0,
        sent=sent,
        received=result.tensors,
    )
    found = ATTACKS.get("patch_embedding")()([view])
    assert float(psnr(found.images, batch.images)) > 60


@pytest.mark.parametrize("augment", ["flip", "crop+flip", "colour", "mixup", "cutmix", "deit"])
def test_augmented_batches_repeat_and_leave_the_random_generators_alone(small, augment: str) -> None:
    config = changed(small, augment=augment, batch_size=2)
    task, plain = ClientTask(config, "none"), ClientTask(changed(small, batch_size=2), "none")
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first, again = task.batch(1, 1, 0), ClientTask(config, "none").batch(1, 1, 0)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.targets, again.targets)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()
    original = plain.batch(1, 1, 0)
    assert first.ids == original.ids
    assert torch.equal(first.labels, original.labels)
    drawn = [task.batch(1, number, 0) for number in range(1, 9)]
    assert any(not torch.equal(b.images, plain.batch(1, n, 0).images) for n, b in enumerate(drawn, 1))
    if augment == "flip":
        for number, batch in enumerate(drawn, 1):
            for image, source in zip(batch.images, plain.batch(1, number, 0).images, strict=True):
                assert torch.equal(image, source) or torch.equal(image, source.flip(-1))
    if augment in ("mixup", "cutmix", "deit"):
        assert first.targets.shape == (2, len(task.data.classes))
        torch.testing.assert_close(first.targets.sum(dim=1), torch.ones(2))


def test_an_augmented_image_is_what_the_attack_recovers(small) -> None:
    """The score is against the image that the client fed, not against its photograph."""
    config = changed(small, augment="crop+flip", rounds=1)
    task = ClientTask(config, "none")
    sent = state_of(task)
    result, fed = task.update(0, 1, sent), task.batch(0, 1, 0).images
    photograph = ClientTask(changed(small, rounds=1), "none").batch(0, 1, 0).images
    terms = {"sent": sent, "received": result.tensors, "model": SentModels(task.model.module)(sent)}
    view = observe_update(task, config.threat_model(), round=1, client=0, **terms)
    found = ATTACKS.get("patch_embedding")()([view])
    assert float(psnr(found.images, fed)) > 60
    assert float(psnr(found.images, photograph)) < 25
    assert task.setting == "federation, iid, crop+flip, scored against the image that the client fed"


def test_colour_mixup_and_cutmix_alone_are_what_they_say(small) -> None:
    """Colour keeps the place of every edge; a mixed image is a weighted mean of two, a cut one is of both."""
    batches = {
        name: ClientTask(changed(small, augment=name, batch_size=2), "none").batch(0, 1, 0)
        for name in ("none", "colour", "mixup", "cutmix")
    }
    one, two = batches["none"].images
    jittered = batches["colour"].images[0]
    places = torch.stack([one.mean(dim=0).flatten(), jittered.mean(dim=0).flatten()])
    assert not torch.equal(jittered, one)
    assert float(torch.corrcoef(places)[0, 1]) > 0.9
    mixed = batches["mixup"].images[0]
    share = float(((mixed - two) * (one - two)).sum() / (one - two).square().sum())
    torch.testing.assert_close(mixed, share * one + (1 - share) * two, atol=1e-4, rtol=0)
    assert 0 < share < 1
    cut = batches["cutmix"].images[0]
    from_one, from_two = ((cut - image).abs().amax(dim=0) < 1e-6 for image in (one, two))
    assert bool((from_one | from_two).all())
    assert bool(from_two.any())


@pytest.mark.parametrize("option", ["drop_path", "dropout"])
def test_blocks_and_activations_are_dropped_in_training_alone(small, option: str) -> None:
    skipping, plain = (ClientTask(changed(small, **{option: rate}), "none") for rate in (0.5, 0.0))
    weights = state_of(plain)
    state = torch.get_rng_state()
    losses = [skipping.update(0, number, weights).loss for number in (1, 1, 2)]
    assert torch.equal(state, torch.get_rng_state())
    assert losses[0] == losses[1]
    assert losses[0] != plain.update(0, 1, weights).loss
    assert skipping.evaluate(weights) == plain.evaluate(weights)


def test_local_epochs_are_passes_over_a_clients_own_images(small) -> None:
    config = changed(small, update="weights", local_epochs=2, batch_size=2, partition="dirichlet:0.5", rounds=1)
    task = ClientTask(config, "none")
    for client, part in enumerate(task.parts):
        assert task.steps(client) == len(part)  # two passes in batches of two
        seen = [i for step in range(task.steps(client)) for i in task.batch_ids(client, 1, step)]
        assert sorted(seen) == sorted(2 * [task.data.train.ids[i] for i in part])
        assert task.update(client, 1, state_of(task)).num_examples == 2 * len(part)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "fedmean"}, "unknown strategy 'fedmean'; choose from: fedavg, fedprox, fedavgm, fedadam"),
        ({"strategy": "fedadam:beta_1=1"}, "beta_1 of --strategy must lie in [0, 1), not 1.0"),
        ({"strategy": "fedavgm:server_learning_rate=0"}, "server_learning_rate of --strategy must be positive"),
        ({"strategy": "fedavgm:momentum=0.9"}, "did you mean 'server_momentum'"),
        ({"strategy": "fedprox"}, "--strategy fedprox needs --update weights"),
        ({"optimizer": "adamw"}, "--optimizer adamw needs --update weights"),
        ({"weight_decay": 0.1}, "--weight-decay needs --update weights"),
        ({"momentum": 1.0, "update": "weights"}, "--momentum must lie in [0, 1)"),
        ({"momentum": 0.9, "update": "weights", "optimizer": "adamw"}, "--momentum is sgd's"),
        ({"local_epochs": 1}, "--local-epochs needs --update weights"),
        ({"local_epochs": 1, "local_steps": 2, "update": "weights"}, "both say how long a client trains"),
        ({"augment": "mirror"}, "unknown augmentation --augment mirror; choose from: none, flip, crop+flip, colour, "),
        ({"augment": "deit"}, "mixes pairs of images: --batch-size is odd: 1"),
        ({"augment": "deit", "batch_size": 2, "objective": "mp3"}, "no labels to mix or smooth"),
        ({"augment": "mixup"}, "mixes pairs of images: --batch-size is odd: 1"),
        ({"drop_path": 1.0}, "--drop-path must lie in [0, 1), not 1.0"),
        ({"dropout": -0.1}, "--dropout must lie in [0, 1), not -0.1"),
        ({"dropout": 0.1, "model": "resnet50"}, "--dropout needs a plain ViT, not resnet50"),
        ({"drop_path": 0.1, "model": "resnet50"}, "--drop-path needs a plain ViT, not resnet50"),
        ({"learning_rate": float("inf")}, "--learning-rate must be positive"),
    ],
)
def test_what_cannot_be_is_one_line(small: RunConfig, options: dict, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        changed(small, **options).validate()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_masked_positions_are_seen_through_weight_decay(small) -> None:
    """Their rows hold nothing but decay, which leaves round-off when it is subtracted."""
    config = changed(small, defense="mjp", gamma=0.5, update="weights", weight_decay=0.05, rounds=1)
    task = ClientTask(config, "mjp")
    sent = state_of(task)
    terms = {"sent": sent, "received": task.update(0, 1, sent).tensors, "model": SentModels(task.model.module)(sent)}
    view = observe_update(task, config.threat_model(), round=1, client=0, **terms)
    mask = task.seen(task.batch(0, 1, 0), 0, 1, 0).position_mask[0]
    assert torch.equal((view.gradients["pos_embed"][0, 1:] == 0).all(dim=1), mask)
