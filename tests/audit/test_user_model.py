"""A user's own model and a user's own Flower app, audited in a few lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import timm
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.nn import functional

from attacks import Capability, ThreatModel, UsageError
from attacks.linear.image_prior import VectorialVariation
from attacks.mjp.subspace import MJPSubspace
from attacks.tokenizer import logits_of
from fedmjp.audit import Watcher, audit_gradient
from fedmjp.audit.verdict import Answer
from fedmjp.federation import TapGrid
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.metrics import psnr
from fedmjp.records.failures import load_failures
from fedmjp.records.rows import load_rows
from tests.attacks.models import (
    ReleasedMJP,
    hugging_face_deit,
    hugging_face_vit,
    timm_vit,
    torchvision_vit,
)
from tests.conftest import observe, photographs

CLOSED = ("patch_embedding", "april", "mjp_subspace", "unmix")
HALF = [0.5, 0.5, 0.5]


def gradients_of(model: nn.Module, images: Tensor, labels: list[int], std: float = 1.0) -> dict[str, Tensor]:
    """What a client would send for one step on images (B, C, H, W), less `std` and divided by it if not 1."""
    inputs = images if std == 1.0 else (images - std) / std
    loss = functional.cross_entropy(logits_of(model(inputs)), torch.tensor(labels))
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: g for n, g in zip(names, found, strict=True) if g is not None}


def trained_torchvision_vit() -> nn.Module:
    model = torchvision_vit()
    nn.init.normal_(model.heads[0].weight)
    return model


@pytest.mark.parametrize("make", [timm_vit, trained_torchvision_vit, hugging_face_vit, hugging_face_deit, ReleasedMJP])
def test_own_model(make) -> None:
    torch.manual_seed(0)
    model, images = make(), photographs(32, 1)
    audit = audit_gradient(model, images, gradients_of(model, images, [1]), attacks=CLOSED)
    table = audit.table.set_index("attack")
    assert table.loc["patch_embedding", "psnr"] > 50
    assert table.loc["patch_embedding", "certified"]
    assert "APRIL's equation does not hold" in audit.diagnoses["april"]
    assert psnr(audit.images["patch_embedding"], images)[0] > 50
    assert (audit.verdict.answer, audit.verdict.attack) == (Answer.LEAKS, "patch_embedding")
    assert [finding.name for finding in audit.findings] == ["guesses"]


def test_torchvision_as_it_comes_lets_nothing_through() -> None:
    """Its classifier starts at zero: the audit says so and does not call the update safe."""
    torch.manual_seed(0)
    model, images = torchvision_vit(), photographs(32, 1)
    audit = audit_gradient(model, images, gradients_of(model, images, [1]), attacks=("patch_embedding",))
    assert "a classifier that starts at zero lets nothing through" in audit.diagnoses["patch_embedding"]
    assert audit.verdict.answer is Answer.NOT_TESTED


def test_the_suite_runs_by_default_and_names_what_it_left_out(mini) -> None:
    images = photographs(64, 1)
    audit = audit_gradient(mini.module, images, observe(mini, images).gradients, mean=mini.mean, std=mini.std, budget=1)
    assert "patch_embedding" in audit.images
    assert "normalises its input" in audit.not_run["april"]
    assert "beyond the budget of 1 s" in audit.not_run["gradvit"]
    assert audit.verdict.not_run == audit.not_run
    assert set(audit.table["attack"][:2]) == {"mean_image", "other_image"}
    assert audit.table["psnr"][:2].between(3, 20).all()


def test_attacks_with_settings_of_their_own(mini, tmp_path) -> None:
    images, prior = photographs(64, 1), VectorialVariation(strength=1.0, iterations=3)
    gradients = observe(mini, images).gradients
    given = ["april", MJPSubspace(prior=prior), MJPSubspace()]
    table = audit_gradient(mini.module, images, gradients, mean=mini.mean, std=mini.std, attacks=given).table[2:]
    assert list(table["attack"]) == ["mjp_subspace", "mjp_subspace_2", "april"]
    assert [p["prior"]["strength"] for p in table["attack_parameters"][:2]] == [1.0, 10.0]
    with pytest.raises(UsageError, match="did you mean 'april'"):
        audit_gradient(mini.module, images, gradients, attacks="aprl")
    with pytest.raises(UsageError, match="attacks is empty"):
        audit_gradient(mini.module, images, gradients, attacks=())
    without = ThreatModel(frozenset({Capability.MODEL_WEIGHTS}))
    with pytest.raises(UsageError, match="needs position_gradient"):
        audit_gradient(mini.module, images, gradients, attacks=[MJPSubspace()], threat_model=without)


def test_the_answer_is_printed_and_saved_as_a_page(tmp_path) -> None:
    torch.manual_seed(0)
    model, images = timm_vit(), photographs(32, 2)
    audit = audit_gradient(model, images, gradients_of(model, images, [1, 2]), attacks=("patch_embedding",))
    text = str(audit)
    assert text.startswith("Not tested: the assumptions of 1 attack (patch_embedding) failed on every update.")
    assert "the batch holds 2 images" in text
    assert list(audit.table.columns[:4]) == ["attack", "image", "psnr", "ssim"]
    assert len(audit.table) == 6
    assert repr(audit) == f"Audit({audit.verdict.headline()!r})"
    assert audit.verdict.answer is Answer.NOT_TESTED
    page = audit.save(tmp_path / "answer")
    rows = load_rows(tmp_path / "answer" / "rows.jsonl")
    pd.testing.assert_series_equal(rows["psnr"], audit.table["psnr"])
    run = json.loads((tmp_path / "answer" / "run.json").read_text())
    assert run["finished"]
    assert run["ran"] == {"as_given": ["mean_image", "other_image", "patch_embedding"]}
    assert "image 1" in page.read_text()
    assert len(list((tmp_path / "answer" / "images").glob("*/*_patch_embedding.png"))) == 2
    with pytest.raises(UsageError, match="holds results already"):
        audit.save(tmp_path / "answer")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        audit.save(tmp_path / "file" / "answer")


def test_own_model_that_is_no_vit() -> None:
    with pytest.raises(UsageError, match="Vision Transformer"):
        audit_gradient(timm.create_model("resnet18"), photographs(32, 1), {})


def own_app(
    rate: float = 1.0,
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    decay: float = 0.0,
    spoil=lambda state, partition: state,
    batches=(0,),
    make=timm_vit,
    momentum: float = 0.0,
) -> ClientApp:
    """Clients that take a step on each of some photographs, by number, and return weights.

    Of its optimiser's state each keeps what it has until its next round, where `momentum` is not 0.
    """
    app, kept = ClientApp(), {}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        mine = make()
        mine.load_state_dict(message.content["arrays"].to_torch_state_dict())
        options = {"momentum": momentum} if momentum else {}
        optimiser = kind(mine.parameters(), lr=rate, weight_decay=decay, **options)
        if momentum and context.node_config["partition-id"] in kept:
            optimiser.load_state_dict(kept[context.node_config["partition-id"]])
        for number in batches:
            optimiser.zero_grad()
            image = photographs(32, 2)[number : number + 1]
            functional.cross_entropy(mine((image - 0.5) / 0.5), torch.tensor([2])).backward()
            optimiser.step()
        kept[context.node_config["partition-id"]] = optimiser.state_dict()
        state = spoil(dict(mine.state_dict()), context.node_config["partition-id"])
        content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return app


def watch(app: ClientApp, out: Path, rounds: int = 1, make=timm_vit, **options) -> tuple[Watcher, TapGrid]:
    torch.manual_seed(0)
    model = make()
    options = {"mean": HALF, "std": HALF, "learning_rate": 1.0, "attacks": ("patch_embedding",)} | options
    watcher = Watcher(model, image_shape=(3, 32, 32), out=out, **options)
    grid = TapGrid(LocalGrid(app, 2), watcher)
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    return watcher, grid


def test_own_flower_app(tmp_path) -> None:
    """Flower's FedAvg over clients that return weights: the tap recovers the photograph, named by round and node."""
    given = {"optimiser": "sgd", "weight_decay": 0.0, "batch_size": 1, "local_steps": 1}
    watcher, grid = watch(own_app(), tmp_path / "leaks", rounds=2, **given)
    assert watcher.assumptions == watcher.problems == []
    assert len(watcher.found) == 4
    assert all(float(psnr(r.images, photographs(32, 1))[0]) > 30 for _, _, r in watcher.found[:2])
    names = {path.name for path in (tmp_path / "leaks" / "images").iterdir()}
    nodes = list(grid.get_node_ids())
    assert names == {f"round{r:03d}_node{n}_image0_patch_embedding.png" for r in (1, 2) for n in nodes}
    page = watcher.finish()
    assert page == tmp_path / "leaks" / "report.html"
    assert "reconstructions.png" in {path.name for path in (tmp_path / "leaks").iterdir()}
    assert len(load_rows(tmp_path / "leaks" / "rows.jsonl")) == 4
    verdict = watcher.verdict()
    assert verdict.answer is Answer.LEAKS
    assert re.match(r"leaks: \d of 4 images certified, they reproduce the update", verdict.headline())
    assert any("april" in line and "not among --attacks" in line for line in verdict.details())


@pytest.mark.parametrize("given", [0.9, None])
def test_momentum_that_clients_keep_between_rounds(given: float | None, tmp_path) -> None:
    """Another photograph in each round, as clients with more than one have."""
    numbers = iter((0, 0, 1, 1))  # two clients a round
    app = own_app(rate=0.1, momentum=0.9, batches=_Next(numbers))
    watcher, _ = watch(app, tmp_path, rounds=2, momentum=given, learning_rate=0.1, batch_size=1, local_steps=1)
    second = [found for _, _, found in watcher.found[2:]]
    values = [float(psnr(found.images, photographs(32, 2)[1:])) for found in second]
    if given:
        assert "0.9 times its last update was subtracted" in watcher.findings["momentum"]
        assert min(values) > 50
    else:
        assert all("pass momentum=0.9" in found.diagnosis for found in second)
        assert max(values) < 40
        assert not any(found.known.any() for found in second)


@pytest.mark.parametrize("stated", [0.01, 0.0])
def test_the_first_step_of_adamw_is_undone(stated: float, tmp_path) -> None:
    app = own_app(rate=1e-3, decay=0.01, kind=torch.optim.AdamW)
    given = {"optimiser": "AdamW", "learning_rate": 1e-3, "weight_decay": stated, "batch_size": 1, "local_steps": 1}
    watcher, _ = watch(app, tmp_path, **given)
    assert watcher.assumptions == ["the clients' AdamW is taken to start anew in every round: its first step is undone"]
    words = "sign and a lower bound" if stated else "at that rate and weight decay"
    assert all(words in found.diagnosis for _, _, found in watcher.found)
    assert not any(found.known.any() for _, _, found in watcher.found)


class _Next:
    """The next number alone, whenever a client goes through its batches."""

    def __init__(self, numbers) -> None:
        self.numbers = numbers

    def __iter__(self):
        yield next(self.numbers)


def test_what_is_not_told_is_assumed_and_said(tmp_path) -> None:
    watcher = Watcher(timm_vit(), image_shape=(3, 32, 32), mean=HALF, std=HALF, optimiser="AdamW", out=tmp_path)
    words = " ".join(watcher.assumptions)
    for name in ("batch_size", "local_steps", "learning_rate", "weight_decay"):
        assert f"{name} was not given" in words
    assert "optimiser AdamW cannot be undone" in words
    sure = Watcher(
        timm_vit(),
        image_shape=(3, 32, 32),
        mean=HALF,
        std=HALF,
        sends="gradient",
        batch_size=1,
        local_steps=1,
        out=tmp_path,
    )
    assert sure.assumptions == []
    assert watcher.finish() is None  # no reply was seen
    with pytest.raises(UsageError, match="no update was attacked"):
        watcher.verdict()


@pytest.mark.parametrize("stated", [None, 0.05, 5.0])
def test_an_unknown_or_wrong_rate_is_read_from_the_update_and_said(stated: float | None, tmp_path) -> None:
    watcher, _ = watch(own_app(rate=0.5), tmp_path, learning_rate=stated)
    verdict = watcher.verdict()
    assert verdict.answer is Answer.LEAKS
    assert verdict.certified == 2
    said = f"the update is not one gradient step at the learning rate {stated or 1:g}"
    assert said in watcher.findings["learning_rate"]
    assert "one step at 0.5" in watcher.findings["learning_rate"]
    assert said in watcher.finish().read_text()


def narrow_vit() -> nn.Module:
    """64 patches in 48 channels: a closed form has a solution for any update, and no equation to check it by."""
    return timm.models.VisionTransformer(32, 4, embed_dim=48, depth=2, num_heads=2, num_classes=5)


@pytest.mark.parametrize("make", [timm_vit, narrow_vit])
@pytest.mark.parametrize("images", [(0, 1), (0, 0)])
def test_steps_that_nobody_told_of_are_found_and_nothing_is_vouched_for(make, images: tuple, tmp_path) -> None:
    """Two local steps, on different images or on one: never a vouching for an update that is not what was stated."""
    app = own_app(batches=images, make=make)
    watcher, _ = watch(app, tmp_path, make=make, batch_size=1, local_steps=1)
    verdict = watcher.verdict()
    assert verdict.answer is Answer.NOT_TESTED
    assert not any(found.known.any() or found.certified for _, _, found in watcher.found)
    assert "is not one gradient step of 1 image" in watcher.findings["several_steps"]
    assert all("is not one gradient step of 1 image" in found.diagnosis for _, _, found in watcher.found)


@pytest.mark.parametrize(("given", "name"), [({"weight_decay": 0.05}, None), ({}, "weight_decay")])
def test_weight_decay_is_removed_given_or_not(given: dict, name: str | None, tmp_path) -> None:
    watcher, _ = watch(own_app(decay=0.05), tmp_path, **given)
    assert all(float(psnr(r.images, photographs(32, 1))[0]) > 30 for _, _, r in watcher.found)
    assert list(watcher.findings) == ([name] if name else [])
    assert watcher.finish().exists()


def without_head(state: dict, partition: int) -> dict:
    return {n: t for n, t in state.items() if not n.startswith("head.")}


@pytest.mark.parametrize(("batches", "certified"), [((0,), 2), ((0, 1), 0)])
def test_what_cannot_be_checked_of_the_step_is_said_to_be_assumed(tmp_path, batches, certified: int) -> None:
    """Without a classifier the encoder's gradients bear out one step on one image, given the one at its output."""
    watcher, _ = watch(own_app(spoil=without_head, batches=batches), tmp_path, batch_size=1, local_steps=1)
    assert "one gradient step as stated is assumed" in watcher.findings["unchecked_step"]
    assert watcher.verdict().certified == certified


def without_positions(state: dict, partition: int) -> dict:
    return {n: t for n, t in state.items() if n != "pos_embed" or partition}


def renamed(state: dict, partition: int) -> dict:
    return state if partition else {f"other.{n}": t for n, t in state.items()}


def not_finite(state: dict, partition: int) -> dict:
    return state if partition else state | {"head.bias": state["head.bias"] * float("nan")}


def transposed(state: dict, partition: int) -> dict:
    return state if partition else state | {"pos_embed": state["pos_embed"].mT.contiguous()}


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (without_positions, "holds no gradient of pos_embed"),
        (renamed, "no name in gradients is a parameter"),
        (not_finite, "weight of head.bias holds NaN"),
        (transposed, "weight of pos_embed has the shape"),
    ],
)
def test_a_reply_that_cannot_be_read_is_a_problem_and_no_exception(spoil, problem: str, tmp_path) -> None:
    watcher = Watcher(
        timm_vit(), image_shape=(3, 32, 32), mean=HALF, std=HALF, attacks=("patch_embedding",), out=tmp_path
    )
    state = {n: t.detach() for n, t in timm_vit().state_dict().items()}
    sent = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord({"server-round": 5})})
    after = {n: t - 0.01 * torch.randn(t.shape) for n, t in state.items()}
    for partition in (0, 1):
        watcher(sent, RecordDict({"arrays": ArrayRecord(spoil(dict(after), partition))}), 40 + partition)
    assert any(text.startswith("round 5, node 40") and problem in text for text in watcher.problems)
    assert not any("node 41" in text for text in watcher.problems)
    assert {node for node, _, _ in watcher.found} >= {41}
    refused = [(row["round"], row["client"]) for row in load_failures(tmp_path)]
    assert refused == ([(5, 40)] if 40 not in {node for node, _, _ in watcher.found} else [])
    assert watcher.finish().exists()


def test_a_watcher_that_breaks_does_not_break_the_app(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fedmjp.audit.watcher.repair", lambda observation: 1 / 0)
    watcher, _ = watch(own_app(), tmp_path)
    assert len(watcher.problems) == 2
    assert "division by zero" in watcher.problems[0]


def test_results_of_an_earlier_watcher_are_kept(tmp_path) -> None:
    first, _ = watch(own_app(), tmp_path / "leaks")
    second, _ = watch(own_app(), tmp_path / "leaks")
    assert all(watcher.finish() for watcher in (first, second))
    assert (first.out.name, second.out.name) == ("leaks", "leaks-2")


AT_EXIT = """
import sys, torch
from flwr.app import ArrayRecord, RecordDict
from fedmjp.audit import Watcher
from tests.attacks.models import timm_vit
model, half = timm_vit(), [0.5] * 3
watcher = Watcher(model, image_shape=(3, 32, 32), mean=half, std=half, attacks="patch_embedding", out=sys.argv[1])
after = {n: t - 0.01 * torch.randn(t.shape) for n, t in model.state_dict().items()}
watcher(*(RecordDict({"arrays": ArrayRecord(s)}) for s in (dict(model.state_dict()), after)), 7)
"""


def test_the_page_is_written_when_the_app_ends(tmp_path) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path / "leaks")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "page: " in done.stderr
    assert "images" in (tmp_path / "leaks" / "report.html").read_text()
