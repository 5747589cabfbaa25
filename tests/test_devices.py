"""What computes on an accelerator keeps its tensors there: attacks, audits, clients, metrics and a figure.

They run on CUDA where this machine has it, and elsewhere on a simulated accelerator (`tests/accelerator.py`); one
process cannot have both, because torch takes the simulated one for the machine's accelerator from then on.

- On the simulated one the answers of attacks are those of the CPU, bit for bit, because it computes there. Where torch
  takes another path for another device (attention, layers of a network), the last digits differ.
- On CUDA every sum is rounded otherwise, and answers agree as far as `agreement` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from experiments.adaptive import protocol
from experiments.adaptive.options import Options
from experiments.adaptive.table import round_by_round_figure
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from attacks import ATTACKS, Observation
from attacks.linear.image_prior import VectorialVariation
from attacks.mjp.known_attention import SweepSearch
from attacks.mjp.placement import Placement
from attacks.mjp.token_search import TokenSearch
from fedmjp.audit import Watcher, audit_gradient
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig, from_flat
from fedmjp.defenses import DEFENSES
from fedmjp.devices import usable_device
from fedmjp.metrics import psnr, score
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.low_rank import add_low_rank
from fedmjp.records import provenance
from tests.accelerator import NAME, DeviceMixed, simulated_accelerator
from tests.attacks import contract
from tests.attacks.active.contexts import before
from tests.attacks.linear.test_completed_spans import updates
from tests.attacks.models import timm_vit
from tests.conftest import observe, photographs

CUDA = "cuda"
HERE = CUDA if torch.cuda.is_available() else NAME


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    with simulated_accelerator() if HERE == NAME else nullcontext(torch.device(CUDA, 0)) as found:
        yield found
    torch.use_deterministic_algorithms(False)


def agreement(name: str) -> float:
    """dB between what an attack finds on CUDA and on the CPU, both in [0, 1]: least."""
    return 20.0 if name == "unmix" else 50.0  # stopped after a step, it is as far from its end as rounding takes it


def small(variant: str = "") -> BuiltModel:
    return build_model(f"vit_micro8_32{variant}", num_classes=8, weights="random")


def plain() -> list[Observation]:
    return [observe(small(), photographs(32, 1))]


def pairs_with_one_image() -> list[Observation]:
    """Three steps on pairs of photographs of which one is always the same."""
    model, images = small(), photographs(32, 4)
    return [observe(model, images[[0, other]], round=other) for other in (1, 2, 3)]


def rounded() -> list[Observation]:
    """An update in float16, with its label, which stays on the CPU."""
    (view,) = plain()
    sent = {n: g.half().float() for n, g in view.gradients.items()}
    return [dataclasses.replace(view, gradients=sent, labels=torch.tensor([0]))]


def masked() -> list[Observation]:
    """Two updates of one photograph, each with other hidden positions."""
    masks = torch.zeros(2, 1, 16, dtype=torch.bool)
    masks[0, 0, 2:7], masks[1, 0, 5:11] = True, True
    views = (observe(small("_mjp"), photographs(32, 1), mask=mask) for mask in masks)
    return [dataclasses.replace(view, round=number) for number, view in enumerate(views, 1)]


def noisy() -> list[Observation]:
    """The same under noise that hides which positions are masked."""
    noise, draws = DEFENSES.get("noise")(noise_unit="entry", noise_multiplier=0.03), torch.Generator().manual_seed(0)
    views = masked()
    return [dataclasses.replace(view, gradients=noise.on_update(dict(view.gradients), draws)) for view in views]


def without_positions() -> list[Observation]:
    """The position embedding's gradient is withheld."""
    view = plain()[0]
    return [dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if n != "pos_embed"})]


def ten_hidden() -> list[Observation]:
    """Of a model with more channels than tokens, whose spans `unmix` reads."""
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, 2:12] = True
    model = build_model("vit_mini_32_mjp", num_classes=8, weights="random")
    return [observe(model, photographs(32, 1), mask=mask)]


def low_rank() -> list[Observation]:
    """The attention's first layer has factors (LoRA), whose spans `lora_span` reads."""
    built = small()
    add_low_rank(built.module, ["*attn.qkv"], rank=20, alpha=20.0)
    nn.init.normal_(built.module.blocks[0].attn.qkv.lora_B, std=0.1)
    return [observe(built, photographs(32, 1))]


def head_alone() -> list[Observation]:
    """The classifier's gradient of two images, whose features `feature_decoder` reads; labels are inferred."""
    view = observe(small(), photographs(32, 2), torch.tensor([1, 4]))
    return [dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if n.startswith("head.")})]


def prepared_by(name: str) -> list[Observation]:
    """The update of a model that an active server has sent."""
    built = small()
    sending = ATTACKS.get(name)().send(before(built, (3, 32, 32)))
    return [observe(dataclasses.replace(built, module=sending.model(built.module, (3, 32, 32))), photographs(32, 1))]


UNMIX = {
    "search": TokenSearch(rounds=1, steps=2),
    "sweep": SweepSearch(rounds=1, sweeps=1, starts=1, steps=1, start_steps=1),
    "placement": Placement(restarts=1),
}
CASES: list[tuple[str, Callable[[], Sequence[Observation]], dict]] = [
    ("patch_embedding", plain, {}),
    ("april", plain, {}),
    ("noisy_rounds", plain, {}),
    ("noisy_rounds", noisy, {"prior": VectorialVariation(smoothing=(None,))}),
    ("batch_rounds", plain, {}),
    ("batch_rounds", pairs_with_one_image, {}),
    ("token_span", without_positions, {"steps": 0}),
    ("position_head", lambda: [contract.places_predicted()], {"steps": 1}),
    ("mjp_subspace", masked, {}),
    ("mjp_mixture", masked, {}),
    ("mjp_rounds", masked, {}),
    ("mjp_rounds", lambda: updates(photographs(64, 1), 3), {"prior": VectorialVariation(smoothing=(None,))}),
    ("unmix", ten_hidden, UNMIX),
    ("inverting_gradients", plain, {"steps": 1}),
    ("gradvit", plain, {"steps": 1}),
    ("see_through_gradients", plain, {"steps": 1}),
    ("april_optimisation", plain, {"steps": 1}),
    ("dlg", plain, {"steps": 1}),
    ("gauss_newton", rounded, {"steps": 1, "iterations": 10, "probes": 4, "draws": 1}),
    ("sparse_rounds", plain, {}),
    ("feature_decoder", head_alone, {"images": 128}),
    ("lora_span", low_rank, {}),
    ("imprint", lambda: prepared_by("imprint"), {}),
    ("token_bins", lambda: prepared_by("token_bins"), {}),
    ("fishing", lambda: prepared_by("fishing"), {}),
]


def moved(view: Observation, device: torch.device) -> Observation:
    gradients = {name: gradient.to(device) for name, gradient in view.gradients.items()}
    return dataclasses.replace(view, gradients=gradients, model=deepcopy(view.model).to(device))


def test_the_device_refuses_what_cuda_refuses(device) -> None:
    refusal = DeviceMixed if device.type == NAME else RuntimeError
    there, here = torch.ones(3, device=device), torch.ones(3)
    assert (there + 1).device == device
    assert float(there @ there) == 3
    for mixed in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here[there.long()]):
        with pytest.raises(refusal):
            mixed()
    with pytest.raises(refusal, match="generator"):
        torch.rand(3, device=device, generator=torch.Generator())
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


@pytest.mark.parametrize(("name", "views", "settings"), CASES, ids=[name for name, *_ in CASES])
def test_attacks_stay_on_the_device(device, name: str, views: Callable, settings: dict) -> None:
    given, attack = views(), ATTACKS.get(name)(**settings)
    here, there = attack(given), attack([moved(view, device) for view in given])
    assert there.images.device == device
    if device.type == NAME:
        assert there.diagnosis == here.diagnosis
        if name == "feature_decoder":  # its forward passes of many images take another kernel of attention there
            torch.testing.assert_close(there.images.cpu(), here.images, atol=1e-4, rtol=0)
            return
        assert torch.equal(there.images.cpu(), here.images)
    else:
        assert float(psnr(there.images.cpu(), here.images).min()) > agreement(name)


def own_step(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    loss = functional.cross_entropy(model(images), torch.ones(len(images), dtype=torch.int64, device=images.device))
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_audit_gradient_scores_as_on_the_cpu(device, tmp_path) -> None:
    torch.manual_seed(0)
    model, images = timm_vit(), photographs(32, 1)
    attacks = ("april", "patch_embedding")
    here = audit_gradient(model, images, own_step(model, images), attacks=attacks)
    model, images = model.to(device), images.to(device)
    there = audit_gradient(model, images, own_step(model, images), attacks=attacks)
    assert there.diagnoses == here.diagnoses
    # Above 100 dB the error is the rounding of float32, which differs with the kernels that a processor runs.
    scores, expected = (found.table["psnr"].clip(upper=100).tolist() for found in (there, here))
    assert scores == pytest.approx(expected, abs=0.5)
    assert set(there.rows["device"]) == {provenance.device_name(device)}
    there.save(tmp_path / "audit")


def test_the_watcher_takes_messages_from_the_cpu(device, tmp_path) -> None:
    """Flower's arrays arrive on the CPU; the app's model may be anywhere."""

    class Sent(dict):
        """A record of arrays."""

    torch.manual_seed(0)
    model = timm_vit()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    after = {n: before[n] - 0.1 * g for n, g in own_step(model, photographs(32, 1)).items()}
    given = {"mean": [0.0] * 3, "std": [1.0] * 3, "learning_rate": 0.1, "batch_size": 1, "local_steps": 1}
    watcher = Watcher(
        model.to(device), image_shape=(3, 32, 32), attacks=["patch_embedding"], out=tmp_path / "leaks", **given
    )
    watcher({"arrays": Sent(before)}, {"arrays": Sent(after)}, 1)
    assert watcher.problems == []
    assert watcher.found[0][2].images.device == device
    assert watcher.save().exists()


@pytest.mark.parametrize("defense", ["mjp:gamma=0.3+noise", "dp_sgd"])
def test_clients_send_what_they_send_on_the_cpu(device, defense: str) -> None:
    options = {"model": "vit_micro8_32", "weights": "random", "clients": 1, "test_limit": 4, "batch_size": 2}
    sent = []
    for place in ("cpu", device.type):
        task = ClientTask(from_flat(options | {"device": place}, RunConfig()), defense)
        weights = {n: p.detach().clone().cpu() for n, p in task.parameters.items()}
        sent.append(task.update(0, 1, weights).tensors)
        assert next(task.model.module.parameters()).device.type == place
    for name, values in sent[0].items():
        torch.testing.assert_close(sent[1][name].cpu(), values)


def test_metrics_on_the_device(device) -> None:
    images = photographs(32, 2)
    here, there = (score(i.flip(0), i, patch_size=8) for i in (images, images.to(device)))
    for name, values in here.items():
        torch.testing.assert_close(torch.as_tensor(there[name]).cpu(), torch.as_tensor(values), equal_nan=True)


def test_a_benchmark_draws_its_last_figure(device, tmp_path: Path, undrawn, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "PICTURED", 1)
    monkeypatch.setattr(protocol, "PICTURED_UPDATES", (1,))
    given = {"model": "vit_micro8_32", "weights": "random", "gammas": (0.3,), "update_gammas": (0.3,)}
    run = protocol.Run(Options(num_images=1, out=tmp_path, device=device.type, **given), Console(quiet=True))
    pictures = run.pictures()
    round_by_round_figure(pictures, tmp_path / "round_by_round.png")
    assert (tmp_path / "round_by_round.png").exists()
    ((original, found),) = pictures.values()
    assert psnr(found[1][None], original[None]) > 15


def test_an_accelerator_gets_deterministic_algorithms(device) -> None:
    torch.use_deterministic_algorithms(False)
    usable_device("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    usable_device(device.type)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
