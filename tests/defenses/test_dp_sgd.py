"""DP-SGD: per-image gradients against a loop, the noise's size, and epsilon against other accountants."""

from __future__ import annotations

import json
import math

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from attacks import ATTACKS, Observation, UsageError
from fedmjp.before_start import check_before_start
from fedmjp.client import ClientTask, shared_task
from fedmjp.config import DataConfig, ModelConfig, RunConfig
from fedmjp.defenses import ClientInput
from fedmjp.defenses.dp_sgd import DPSGD, norms, per_image_gradients
from fedmjp.defenses.privacy import Schedule, epsilon_by_sampling, epsilon_in_epochs, noise_for
from fedmjp.defenses.step import LocalStep
from fedmjp.federation_options import FederationConfig, LocalConfig
from fedmjp.metrics import psnr
from fedmjp.objectives import OBJECTIVES
from fedmjp.records.run_folder import IF_DEALT_OUT, RunFolder
from fedmjp.training import TrainConfig


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def task_of(defense: str, model: str = "vit_micro8_32", weights: str = "random", **options) -> ClientTask:
    federation = {"clients": 1, "rounds": 1, "batch_size": 5} | options
    config = RunConfig(
        defense=(defense,),
        federation=FederationConfig(**federation),
        model=ModelConfig(model, weights),
        data=DataConfig(train_limit=10, test_limit=2),
    )
    return ClientTask(config, defense)


def step_of(task: ClientTask) -> LocalStep:
    batch, draws = task.batch(0, 1, 0), task._draws(0, 1, 0)
    return task.learner.step(task._views(batch, draws, 1), batch.targets, draws)


def loop(step: LocalStep) -> list[dict[str, torch.Tensor]]:
    """Each image's gradient by autograd, an image at a time."""
    found = []
    for i in range(len(step.labels)):
        seen = step.views[0]
        tensors = (seen.images, seen.position_mask, seen.origins)
        one = ClientInput(*(None if t is None else t[i : i + 1] for t in tensors))
        loss = step.loss_of((one,), step.labels[i : i + 1])
        gradients = torch.autograd.grad(loss, list(step.trained.values()), allow_unused=True)
        pairs = zip(step.trained.items(), gradients, strict=True)
        found.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs})
    return found


CHAINS = [
    "dp_sgd",
    "mjp:gamma=0.5,dal=linear+dp_sgd",
    "mjp:gamma=0.5,positions=index+dp_sgd",
    "frozen_positions+dp_sgd",
]


@pytest.mark.parametrize("chain", CHAINS)
def test_per_image_gradients_are_those_of_a_loop(chain: str) -> None:
    step = step_of(task_of(chain))
    parts = [gradients for gradients, _ in per_image_gradients(step, at_once=2)]
    fast = {name: torch.cat([part[name] for part in parts]) for name in step.trained}
    slow = loop(step)
    mean = step.gradients()
    for name, own in fast.items():
        by_hand = torch.stack([gradients[name] for gradients in slow])
        torch.testing.assert_close(own, by_hand, rtol=1e-5, atol=1e-5 * float(by_hand.abs().max()))
        torch.testing.assert_close(own.mean(dim=0), mean[name], rtol=1e-4, atol=1e-5 * float(by_hand.abs().max()))
    if "mjp" in chain and "index" not in chain:
        assert step.views[0].position_mask.any()


@pytest.mark.parametrize("chain", CHAINS[:2])
def test_the_sum_is_clipped_by_image_and_divided_by_the_batch(chain: str) -> None:
    step = step_of(task_of(chain))
    slow = loop(step)
    sizes = norms({n: torch.stack([g[n] for g in slow]) for n in slow[0]})
    clip = float(sizes.median())  # some images are clipped, some are not
    sent = DPSGD(dp_clip_norm=clip, dp_noise_multiplier=0, dp_micro_batch=2).gradients(step, draw())
    for name in step.trained:
        parts = [g[name] * min(1, clip / float(size)) for g, size in zip(slow, sizes, strict=True)]
        by_hand = sum(parts) / len(slow)
        torch.testing.assert_close(sent[name], by_hand, rtol=1e-5, atol=1e-5 * float(by_hand.abs().max()))
    assert float(step.loss) == pytest.approx(float(step.loss_of(step.views, step.labels).detach()), rel=1e-5)


def test_noise_has_its_size_and_frozen_parameters_none() -> None:
    step = step_of(task_of("frozen_positions+dp_sgd"))
    clean, noised = (DPSGD(dp_clip_norm=0.5, dp_noise_multiplier=s).gradients(step, draw()) for s in (0.0, 2.0))
    noise = torch.cat([(noised[n] - clean[n]).flatten() for n in step.trained])
    assert float(noise.std()) == pytest.approx(2.0 * 0.5 / 5, rel=0.02)
    assert not noised["pos_embed"].any()


def test_clients_send_it_and_a_chain_goes_on_with_it() -> None:
    own, sent = "dp_sgd:dp_clip_norm=0.1,dp_noise_multiplier=0", []
    for entry in (own, f"{own}+noise:clip_norm=0.01,noise_multiplier=0"):
        task = task_of(entry)
        weights = {n: p.detach().clone() for n, p in task.parameters.items()}
        sent.append(torch.cat([t.flatten() for t in task.update(0, 1, weights).tensors.values()]))
    alone, chained = sent
    assert 0.01 < float(alone.norm()) <= 0.1
    torch.testing.assert_close(chained, 0.01 * alone / alone.norm())


SCHEDULES = [
    (1.0, Schedule.of_epochs(64, 8, 80)),
    (4.0, Schedule.of_epochs(60_000, 600, 10_000)),
]


@pytest.mark.parametrize(("sigma", "schedule"), SCHEDULES)
def test_epsilon_agrees_with_other_accountants(sigma: float, schedule: Schedule) -> None:
    """In epochs: Balle and Wang's formula (2018). Sampled: opacus' PRV accountant; its RDP accountant bounds it."""
    mu, delta = schedule.uses**0.5 / sigma, 1e-5

    def excess(epsilon: float) -> float:
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)) - delta

    assert epsilon_in_epochs(sigma, schedule, delta) == pytest.approx(brentq(excess, 0, 1e4), rel=1e-3)
    accountants = pytest.importorskip("opacus.accountants")
    sampled = epsilon_by_sampling(sigma, schedule, delta)
    prv, rdp = accountants.PRVAccountant(), accountants.RDPAccountant()
    prv.history = rdp.history = [(sigma, schedule.rate, schedule.steps)]
    # PRV's own error is bounded by 0.01 (its eps_error) and not relative.
    assert sampled == pytest.approx(prv.get_epsilon(delta), rel=0.01, abs=0.011)
    assert sampled < rdp.get_epsilon(delta)


@pytest.mark.parametrize(("sigma", "schedule"), SCHEDULES)
def test_renyi_accountants_agree(sigma: float, schedule: Schedule) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    from dp_accounting import dp_event, rdp

    peer = accountants.RDPAccountant()
    peer.history = [(sigma, schedule.rate, schedule.steps)]
    step = dp_event.PoissonSampledDpEvent(schedule.rate, dp_event.GaussianDpEvent(sigma))
    ours = rdp.RdpAccountant().compose(dp_event.SelfComposedDpEvent(step, schedule.steps)).get_epsilon(1e-5)
    assert ours == pytest.approx(peer.get_epsilon(1e-5), rel=0.01)


def test_a_target_epsilon_is_met_and_not_by_far() -> None:
    schedule = Schedule.of_epochs(64, 8, 80)
    sigma = noise_for(3.0, schedule, 1e-5)
    assert 2.999 < epsilon_in_epochs(sigma, schedule, 1e-5) <= 3.0001
    found = DPSGD(dp_epsilon=3.0).scheduled(schedule)
    assert (found.dp_noise_multiplier, found.dp_epsilon) == (sigma, None)


def test_uses_are_counted_as_the_client_draws_them() -> None:
    """The schedule's bound against a count over the batches that a client takes."""
    for batch_size, steps in ((5, 3), (4, 6)):
        task = task_of("none", batch_size=batch_size, rounds=steps)
        uses = dict.fromkeys(range(len(task.data.train)), 0)
        for round in range(1, steps + 1):
            own = task.indices(0, round, 0)
            for index in set(own):
                uses[index] += own.count(index) ** 2
        assert max(uses.values()) <= task.privacy_schedule.uses
        if batch_size == 5:
            assert max(uses.values()) == task.privacy_schedule.uses == 2


def test_the_guarantee_names_epsilon_and_assumptions() -> None:
    words = task_of("mjp+dp_sgd:dp_epsilon=8").guarantee
    assert "epsilon 8 at delta 1e-05 for each image" in words
    assert "shuffled epochs" in words
    assert "Poisson" in words
    assert "above 1,000" in task_of("dp_sgd:dp_noise_multiplier=0").guarantee


def test_without_the_accountant_one_line(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(UsageError, match=r"fedmjp\[privacy\]"):
        epsilon_in_epochs(1.0, SCHEDULES[0][1], 1e-5)


def test_a_run_records_what_it_guarantees(tmp_path) -> None:
    config = RunConfig(
        defense=("none", "dp_sgd:dp_epsilon=8"),
        federation=FederationConfig(clients=2, rounds=2),
        model=ModelConfig("vit_micro8_32", "random"),
        data=DataConfig(train_limit=8, test_limit=2),
        out=tmp_path / "run",
    )
    (sentence,) = check_before_start(config)
    assert "epsilon 8 at delta 1e-05" in sentence
    folder = RunFolder(config)
    for defense in config.defense:
        folder.note_task(shared_task(config.order(), defense, config.client_entropy()))
    assert json.loads((config.out / "run.json").read_text())["notes"] == [sentence]
    folder.note_task(shared_task(config.order(), config.defense[1], config.client_entropy()), simulated=False)
    assert json.loads((config.out / "run.json").read_text())["notes"][1] == f"{sentence} {IF_DEALT_OUT}"
    task = shared_task(config.order(), config.defense[1], config.client_entropy())
    assert task.defense.parameters()["dp_noise_multiplier"] > 0.5


def test_a_photograph_comes_back_where_the_noise_is_weak_and_not_at_the_default() -> None:
    found = {}
    for sigma in (1e-6, 1.0):
        task = task_of(f"dp_sgd:dp_noise_multiplier={sigma}", "vit_mini_32", weights="auto", batch_size=1)
        built, image = task.model, task.batch(0, 1, 0).images
        view = Observation(
            gradients=task.update(0, 1, {n: p.detach().clone() for n, p in task.parameters.items()}).tensors,
            model=built.module,
            num_examples=1,
            image_shape=(3, 32, 32),
            mean=tuple(built.mean),
            std=tuple(built.std),
        )
        found[sigma] = float(psnr(ATTACKS.get("noisy_rounds")()([view]).images, image))
    assert found[1e-6] > 30
    assert found[1.0] < 20


def test_objectives_say_whether_their_loss_is_one_of_single_images() -> None:
    assert {name: OBJECTIVES.get(name).per_image for name in ("supervised", "mp3", "droppos", "mst")} == {
        "supervised": True,
        "mp3": False,
        "droppos": False,
        "mst": False,
    }


BAD = [
    ("dp_sgd:dp_clip_norm=0", "--dp-clip-norm must be positive"),
    ("dp_sgd:dp_clip_norm=nan", "--dp-clip-norm must be positive"),
    ("dp_sgd:dp_noise_multiplier=-1", "--dp-noise-multiplier"),
    ("dp_sgd:dp_noise_multiplier=nan", "--dp-noise-multiplier"),
    ("dp_sgd:dp_epsilon=0", "--dp-epsilon must lie above 0"),
    ("dp_sgd:dp_epsilon=nan", "--dp-epsilon must lie above 0"),
    ("dp_sgd:dp_epsilon=1e9", "--dp-epsilon must lie above 0"),
    ("dp_sgd:dp_delta=1", "--dp-delta must lie in"),
    ("dp_sgd:dp_delta=0", "--dp-delta must lie in"),
    ("dp_sgd:dp_micro_batch=0", "--dp-micro-batch"),
]


@pytest.mark.parametrize(("entry", "words"), BAD)
def test_options_out_of_range(entry: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RunConfig(defense=(entry,)).validate()


def test_what_does_not_go_with_single_images_is_refused() -> None:
    deit = LocalConfig(augment="deit")
    with pytest.raises(UsageError, match="Mixup and CutMix"):
        RunConfig(defense=("dp_sgd",), local=deit, federation=FederationConfig(batch_size=2)).validate()
    with pytest.raises(UsageError, match="Mixup and CutMix"):
        TrainConfig(defense="mjp+dp_sgd").validate()
    with pytest.raises(UsageError, match="--objective supervised"):
        RunConfig(defense=("dp_sgd",), objective="mp3", model=ModelConfig("vit_micro8_32")).validate()
    with pytest.raises(UsageError, match="batch norms"):
        task_of("dp_sgd", model="resnet_micro_32")
    with pytest.raises(UsageError, match="statistics of the client's batch without noise"):
        task_of("mjp:dal=none+noise", model="resnet_micro_32")
    with pytest.raises(UsageError, match="needs a noise multiplier above"):
        task_of("dp_sgd:dp_epsilon=1e-6")
    with pytest.raises(UsageError, match="needs the schedule"):
        DPSGD(dp_epsilon=1.0).gradients(step_of(task_of("none")), draw())
    step = step_of(task_of("mjp:dal=pca+dp_sgd"))
    with pytest.raises(UsageError, match="the loss cannot be taken apart by image"):
        list(per_image_gradients(step, 2))
