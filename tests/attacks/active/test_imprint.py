"""Imprint: which images a layer of bins keeps apart, what a bin with several images gives, and the peer's module."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks import Capability, Observation, Reconstruction, ThreatModel, UsageError
from attacks.active.architecture import change_layers
from attacks.active.bins import read_bins
from attacks.active.brightness import PUBLIC
from attacks.active.imprint import COARSE, GAIN, Imprint
from attacks.active.imprint_rows import read_rows
from attacks.active.token_bins import TokenBins
from attacks.memory import remember
from attacks.observation import ORDER_GUESSED
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.defenses.chain import read_defense
from fedmjp.defenses.masking import block_masks, jigsaw_order, move_patches
from fedmjp.metrics.pixel import psnr
from fedmjp.models import BuiltModel, build_model
from tests.attacks.active.contexts import before
from tests.conftest import observe, photographs, shared_file

SHAPE = (3, 32, 32)


def micro() -> BuiltModel:
    return build_model("vit_micro_32", num_classes=10, weights="random")


def sent_by(attack: Imprint | TokenBins, built: BuiltModel) -> BuiltModel:
    """The model as the client is sent it."""
    sending = attack.send(before(built, SHAPE))
    return replace(built, module=sending.model(built.module, SHAPE))


def closest(found: Tensor, originals: Tensor) -> Tensor:
    """(B,) dB of each original by the reconstruction that is nearest to it."""
    return torch.stack([psnr(found.to(one), one[None].expand_as(found)).max() for one in originals])


def test_bins_hold_what_a_slow_oracle_says() -> None:
    """Each image's own gradient by the model without the layer, one at a time in float64, sorted by its brightness."""
    built, images, attack = micro(), photographs(32, 12).double(), Imprint(bins=8)
    plain = built.module.double().eval()
    built = sent_by(attack, built)
    layer, labels = built.module.imprint, torch.arange(12) % 10
    place = torch.bucketize(images.mean(dim=(1, 2, 3)), attack.thresholds(8)) - 1
    inputs, squares, shares = torch.zeros(8, 3 * 32 * 32).double(), torch.zeros(8).double(), torch.zeros(8).double()
    written = GAIN * (images.mean(dim=(1, 2, 3)) - attack.thresholds(8)[place])
    for image, label, bin, added in zip(built.normalise(images), labels, place, written, strict=True):
        at_image = (image[None] + added).requires_grad_()
        (functional.cross_entropy(plain(at_image), label[None]) / 12).backward()
        own = layer.written[0].detach() * at_image.grad.sum()  # every pixel gets what the unit writes
        inputs[bin], shares[bin] = inputs[bin] + own * image.flatten(), shares[bin] + own
        squares[bin] += own * image.square().mean()
    found = read_rows(observe(built, images, labels), layer)
    held = place.unique()
    assert len(found.images) == len(held)
    assert 0 < len(held) < 8
    assert (place.bincount() > 1).any()
    torch.testing.assert_close(found.shares, shares[held], rtol=1e-6, atol=0)
    torch.testing.assert_close(found.images, inputs[held] / shares[held, None], rtol=1e-6, atol=1e-9)
    excess = found.images.square().mean(dim=1) - squares[held] / shares[held]
    torch.testing.assert_close(found.excess, excess, rtol=1e-6, atol=1e-9)
    assert (found.excess.abs() > found.explained).tolist() == (place.bincount()[held] > 1).tolist()


def test_most_of_a_batch_of_64_comes_back_and_mixtures_are_told_apart() -> None:
    built, images = micro(), photographs(32, 64)
    found = Imprint()([observe(sent_by(Imprint(), built), images, torch.arange(64) % 10)])
    known = found.known[:, 0, 0, 0]
    assert (closest(found.images[known], images) > 30).sum() >= 32
    assert closest(images, found.images[known]).min() > 50  # every one that is vouched for is an image of the batch
    mixed = int((~known).sum())
    assert mixed > 0
    assert found.diagnosis.startswith(f"{mixed} bin")
    assert "several images" in found.diagnosis


@pytest.mark.parametrize("amplify", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("levels", [1, 10])
def test_the_model_computes_what_it_did(amplify: float, levels: int) -> None:
    built, images = micro(), photographs(32, 4)
    inputs = built.normalise(images)
    change = sent_by(Imprint(amplify=amplify, levels=levels), built).module(inputs) - built.module.eval()(inputs)
    assert 0 < change.abs().max() < 5e-5 * levels


@pytest.mark.parametrize("withheld", [False, True])
@pytest.mark.parametrize("attack", [Imprint(), TokenBins()], ids=["imprint", "token_bins"])
def test_of_moved_patches_nothing_is_vouched_for(attack: Imprint | TokenBins, withheld: bool) -> None:
    """Nor where the positions' gradient, which shows that they are hidden, is not sent."""
    built, images = build_model("vit_micro_32_mjp", num_classes=10, weights="random"), photographs(32, 1)
    view = observe(sent_by(attack, built), images, mask=torch.arange(64)[None] < 16)
    if withheld:
        view = replace(view, gradients={n: g for n, g in view.gradients.items() if "pos_embed" not in n})
    found = attack([view])
    assert "the client hides positions (MJP)" in found.diagnosis
    assert found.details["single"] or found.details["single_patches"] == 48  # which it would vouch for
    assert not found.known.any()


@pytest.mark.parametrize(("count", "gamma", "least"), [(1, 0.9, 1), (6, 0.5, 4)])
def test_moved_patches_are_put_back_by_their_borders(count: int, gamma: float, least: int) -> None:
    """Every image of a batch has a mask of its own, and which it is stands nowhere in the update."""
    built, images = build_model("vit_mini_64_mjp", num_classes=10, weights="random"), photographs(64, 24)
    images = images[images.mean(dim=(1, 2, 3)).argsort()][12 // count :: 24 // count]  # of different brightness
    generator = torch.Generator().manual_seed(0)
    masks = torch.cat([block_masks(1, built.grid, gamma, generator) for _ in images])
    fed = torch.cat(
        [
            move_patches(image[None], jigsaw_order(mask[None], generator), built.patch_size)
            for image, mask in zip(images, masks, strict=True)
        ]
    )
    sent = replace(built, module=Imprint().send(before(built, (3, 64, 64))).model(built.module, (3, 64, 64)))
    found = Imprint()([observe(sent, fed, torch.arange(count), mask=masks)])
    assert int((closest(found.images, images) > 50).sum()) >= least
    assert (closest(fed, images) < 30).all()
    assert found.flags == (ORDER_GUESSED,)
    assert not found.known.any()


def test_calibration_needs_auxiliary_data() -> None:
    granted = ThreatModel.parse(["model_weights", "active_architecture", "auxiliary_data"])
    attack = Imprint().granted(granted)
    assert attack.calibrated
    assert Capability.AUXILIARY_DATA in attack.used()
    attack.require(granted, "imprint")
    with pytest.raises(UsageError, match="needs auxiliary_data, which the threat model does not grant"):
        attack.require(ThreatModel.parse(["model_weights", "active_architecture"]), "imprint")
    with pytest.raises(UsageError, match="needs active_architecture, which the threat model does not grant"):
        Imprint().require(ThreatModel(), "imprint")


def test_the_calibration_is_that_of_public_photographs() -> None:
    pandas, image = pytest.importorskip("pandas"), pytest.importorskip("PIL.Image")
    table = pandas.read_parquet(shared_file("data/cifar10/train-00000-of-00001.parquet"), columns=["img"])
    pictures = [image.open(io.BytesIO(entry["bytes"])).convert("RGB") for entry in table["img"][:500]]
    grey = torch.tensor([sum(one.resize((1, 1), image.BOX).getpixel((0, 0))) for one in pictures]) / (3 * 255)
    assert float(grey.mean()) == pytest.approx(PUBLIC.mean, abs=0.02)
    assert float(grey.std()) == pytest.approx(PUBLIC.stdev, abs=0.01)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("imprint=0", "unknown change of the architecture 'imprint=0'"),
        ("front=8", "this client builds imprint=NUMBER"),
        ("imprint=8x0", "imprint=BINSxLEVELS"),
    ],
)
def test_layers_that_a_client_does_not_know_are_refused(layers: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        change_layers(micro().module, SHAPE, layers)


def peers_images(block: nn.Module, gradients: list[Tensor], view: Observation) -> Tensor:
    """What the package breaching reads from the gradient of its own layer, (hits, C, H, W) in [0, 1]."""
    analytic = pytest.importorskip("breaching.attacks.analytic_attack")

    class Peer(analytic.ImprintAttacker):
        """The peer's attack without its loading of models."""

        def __init__(self) -> None:
            self.cfg = SimpleNamespace(sort_by_bias=False, breach_padding=False, breach_reduction=None)
            self.setup, self.data_shape = {"dtype": torch.float}, SHAPE
            self.dm, self.ds = (torch.tensor(part).view(1, 3, 1, 1) for part in (view.mean, view.std))

        def prepare_attack(self, payload, shared):
            """Nothing to prepare."""
            return [view.model], None, {}

    secrets = {"ImprintBlock": {"weight_idx": 0, "bias_idx": 1, "shape": SHAPE, "structure": block.structure}}
    shared = [{"gradients": gradients, "metadata": {"num_data_points": view.num_examples}}]
    payload = [{"metadata": SimpleNamespace(modality="vision")}]
    return view.to_pixels(Peer().reconstruct(payload, shared, secrets)[0]["data"])


def test_as_good_as_breaching_on_the_same_gradient() -> None:
    """The peer's module in front of the same model; both attacks read the same gradient of it."""
    imprint = pytest.importorskip("breaching.cases.malicious_modifications.imprint")
    built, images, labels = micro(), photographs(32, 16), torch.arange(16) % 10
    block = imprint.ImprintBlock(SHAPE, 128, connection="linear", linfunc="avg")
    view = observe(replace(built, module=nn.Sequential(block, built.module)), images, labels)
    weight, bias = (view.gradients[f"0.linear0.{part}"] for part in ("weight", "bias"))
    theirs = closest(peers_images(block, [weight, bias], view), images)
    bins = read_bins(weight[None], bias[None], 1e-6 * float(bias.abs().max()))
    ours = closest(view.to_pixels(bins.inputs.reshape(-1, *SHAPE)), images)
    assert (ours > 30).sum() >= 8
    torch.testing.assert_close(ours, theirs, atol=0.5, rtol=0)
    own = Imprint()([observe(sent_by(Imprint(bins=128, calibrated=True), built), images, labels)])
    single = closest(own.images[own.known[:, 0, 0, 0]], images) > 50
    assert single.sum() >= 8
    exact = 100  # dB, where float32 rounds
    assert (closest(own.images, images)[single] > theirs[single].clamp(max=exact) - 0.5).all()


def with_noise(view: Observation, level: float) -> Observation:
    generator = torch.Generator().manual_seed(0)
    return replace(
        view,
        gradients={n: g + level * torch.randn(g.shape, generator=generator) for n, g in view.gradients.items()},
    )


def test_better_than_breachings_sparse_layer_under_clipping_and_noise() -> None:
    """Its units saturate at the next threshold, so that an image is in one row there too."""
    imprint = pytest.importorskip("breaching.cases.malicious_modifications.imprint")
    built, images, labels = micro(), photographs(32, 8), torch.arange(8)
    block = imprint.SparseImprintBlock(SHAPE, 128, connection="linear", linfunc="avg")
    noise = DEFENSES.get("noise")(noise_multiplier=1e-4)

    def noised(module: nn.Module) -> Observation:
        view = observe(replace(built, module=module), images, labels)
        return replace(view, gradients=noise.on_update(dict(view.gradients), torch.Generator().manual_seed(0)))

    view = noised(nn.Sequential(block, built.module))
    peers = peers_images(block, [view.gradients[f"0.linear0.{part}"] for part in ("weight", "bias")], view)
    own = Imprint(calibrated=True)([noised(sent_by(Imprint(calibrated=True), built).module)])
    theirs, ours = closest(peers, images), closest(own.images, images)
    assert (ours > 30).sum() >= 6
    assert ours.median() > theirs.median() + 6


@pytest.mark.parametrize(("bins", "count", "level", "clear"), [(256, 3, 1e-2, 3), (256, 3, 5.0, 2), (2, 2, 1e-2, 2)])
def test_noise_fills_every_bin_and_images_come_back(bins: int, count: int, level: float, clear: int) -> None:
    """Images send 19, 52 and 69. Of two bins for two images none is empty: the classifier shows the noise."""
    images, attack = photographs(32, 3)[:count], Imprint(bins=bins)
    noisy = with_noise(observe(sent_by(attack, micro()), images), level)
    assert read_rows(noisy, noisy.model.imprint).noise == pytest.approx(level, rel=0.1)
    found = attack([noisy])
    assert len(found.images) == count
    assert int((closest(found.images, images) > 25).sum()) == clear
    vouched = found.images[found.known.flatten(1).all(dim=1)]
    assert all(psnr(one[None].expand_as(images), images).max() > 25 for one in vouched)
    assert len(vouched) == (count if level < 1 else 0)


def test_what_is_lost_in_noise_is_said() -> None:
    view = with_noise(observe(sent_by(Imprint(), micro()), photographs(32, 3)), 54.0)
    found = Imprint()([view])
    assert len(found.images) == 2
    assert "noise in the message hides what sends less than 3.1e+01 to the layer in front" in found.diagnosis
    assert not found.known.any()


def answer_to(attack: Imprint, defence: Defense) -> Reconstruction:
    """What comes of one update of one photograph."""
    view = observe(sent_by(attack, micro()), photographs(32, 1))
    sent = defence.on_update(dict(view.gradients), torch.Generator().manual_seed(0))
    return attack([replace(view, gradients=sent)])


@pytest.mark.parametrize(("noise", "level"), [(1e-4, 50), (1e-3, 30)])
def test_an_amplified_layer_takes_the_norm_that_an_update_is_clipped_to(noise: float, level: float) -> None:
    """A layer that sends little against the rest of the update is hidden by noise of that share of the norm."""
    defence, image = DEFENSES.get("noise")(noise_multiplier=noise), photographs(32, 1)
    assert answer_to(Imprint(amplify=1e-3), defence).images is None
    found = answer_to(Imprint(), defence)
    assert psnr(found.images, image) > level
    assert found.known.all()


def test_the_largest_entries_are_the_images() -> None:
    found = answer_to(Imprint(), DEFENSES.get("topk")(topk_share=0.01))
    assert psnr(found.images, photographs(32, 1)) > 100
    assert found.known.all()


SIGNS = DEFENSES.get("quantise")(quantise_format="sign")


def test_signs_say_where_pixels_lie_between_levels() -> None:
    """A pixel's error is that of the middle of a tenth of its range, of uniform distribution."""
    image = photographs(32, 1)
    for signs in (SIGNS, replace(SIGNS, quantise_per="row")):
        found = answer_to(Imprint(levels=10), signs)
        assert psnr(found.images, image) == pytest.approx(20 * math.log10(10 * math.sqrt(12)), abs=1.0)
        assert found.known.all()
        assert found.diagnosis == ""
        one = answer_to(Imprint(), signs)
        assert one.images is None
        assert "the layer measures a pixel against one level" in one.diagnosis


@pytest.mark.parametrize(
    "before_signs", ["noise:noise_multiplier=0.0001", "noise:noise_multiplier=0.01", "topk:topk_share=0.01"]
)
def test_signs_of_something_else_are_not_vouched_for(before_signs: str) -> None:
    defence, image = read_defense(f"{before_signs}+quantise:quantise_format=sign"), photographs(32, 1)
    view = observe(sent_by(Imprint(levels=10), micro()), image)
    sent, _ = defence.message(dict(view.gradients), torch.Generator().manual_seed(0), {})
    found = Imprint()([replace(view, gradients=sent)])
    assert "the signs of some rows contradict each other" in found.diagnosis
    assert found.known is None or not found.known.any()


def test_an_earlier_message_of_signs_brings_levels() -> None:
    """As a server keeps it, of a client that returns gradients or weights."""
    rate, view = 0.1, observe(micro(), photographs(32, 1))
    signs = replace(view, gradients=SIGNS.on_update(dict(view.gradients), torch.Generator()))
    weights = dict(view.model.named_parameters())
    moved = {n: (weights[n].detach() - (weights[n].detach() - rate * g)) / rate for n, g in signs.gradients.items()}
    returned = replace(signs, gradients=moved, kind="weights", learning_rate=rate)
    for history, layers in (([], "256"), ([view], "256"), ([view, signs], "64x10"), ([view, returned], "64x10")):
        context = replace(before(micro(), SHAPE), history=[remember(one) for one in history])
        assert Imprint().send(context).layers == f"imprint={layers}"


def test_a_kept_update_does_not_keep_the_added_layer() -> None:
    kept = remember(observe(sent_by(Imprint(), micro()), photographs(32, 1)))
    assert not any(module._forward_pre_hooks for module in kept.model.modules())


@pytest.mark.parametrize("defence", ["quantise", "quantise:quantise_format=int4", "quantise:quantise_format=bfloat16"])
def test_rounding_is_not_taken_for_several_images(defence: str) -> None:
    """One image alone is vouched for where it is right; of a batch nothing is, because a mixture would not show."""
    for count in (1, 8):
        images = photographs(32, count)
        view = observe(sent_by(Imprint(calibrated=True), micro()), images)
        sent, _ = read_defense(defence).message(dict(view.gradients), torch.Generator().manual_seed(0), {})
        found = Imprint()([replace(view, gradients=sent)])
        right = closest(found.images, images) > 25
        assert right.any()
        assert bool(found.known.any()) == (count == 1 and bool(right.all()))
        assert found.diagnosis == ("" if count == 1 else COARSE)


def test_images_that_send_little_beside_others_come_back() -> None:
    """In a model that is sure of one of two images."""
    built, images = micro(), photographs(32, 2)
    with torch.no_grad():
        built.module.head.bias[0] = 16.0
    found = Imprint()([observe(sent_by(Imprint(), built), images, torch.tensor([0, 1]))])
    assert (closest(found.images, images) > 60).all()


@pytest.mark.parametrize("lacking", ["measure", "anchor"])
def test_a_layer_of_which_a_part_is_frozen_is_named(lacking: str) -> None:
    view = observe(sent_by(Imprint(), micro()), photographs(32, 2))
    zeros = {n: g * (lacking not in n) for n, g in view.gradients.items()}
    found = Imprint()([replace(view, gradients=zeros)])
    assert found.images is None
    assert found.diagnosis.startswith("no image can be read: of the layer in front of the model")


def test_levels_keep_images_of_a_batch_apart_and_change_nothing_in_exact_updates() -> None:
    built, images, labels = micro(), photographs(32, 8), torch.arange(8)
    exact = observe(sent_by(Imprint(levels=10, calibrated=True), built), images, labels)
    found = Imprint()([exact])
    assert (closest(images, found.images[found.known[:, 0, 0, 0]]) > 60).all()
    assert int((closest(images, found.images) > 60).sum()) >= 4
    signs = Imprint()([replace(exact, gradients=SIGNS.on_update(dict(exact.gradients), torch.Generator()))])
    assert int((closest(images, signs.images) > 25).sum()) >= 4
    assert not signs.known.any()
    assert signs.diagnosis == "the message holds signs, which do not tell one image from several"


def test_a_model_of_half_precision_keeps_its_bins() -> None:
    built, images = micro(), photographs(32, 4)
    built.module.half()
    for image in images.split(1):  # of some, the squares of the gradients are below float16's numbers
        found = Imprint()([observe(sent_by(Imprint(), built), image.half())])
        assert psnr(found.images, image) > 50


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bins": 0}, "at least 1"),
        ({"levels": -1}, "must not be negative"),
        ({"amplify": 0.0}, "must be positive"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Imprint(**settings)


def test_an_update_of_noise_alone_says_so() -> None:
    view = observe(sent_by(Imprint(), micro()), photographs(32, 2))
    generator = torch.Generator().manual_seed(0)
    gradients = {n: torch.randn(g.shape, generator=generator) for n, g in view.gradients.items()}
    found = Imprint()([replace(view, gradients=gradients)])
    assert found.images is None or not found.known.any()
    assert "noise in the message" in found.diagnosis
