"""Every closed form recovers a real image where its assumptions hold, and says why where they do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar

import pytest
import timm
import torch

from attacks import ATTACKS, Attack, Capability, Observation, Reconstruction, ThreatModel, UsageError, find_tokenizer
from attacks.active.base import ActiveAttack
from attacks.closed_form.patch_embedding import PatchEmbedding
from attacks.linear.image_prior import VectorialVariation
from attacks.mjp.known_attention import SweepSearch
from attacks.mjp.placement import Placement
from attacks.mjp.subspace import MJPSubspace
from attacks.mjp.token_search import TokenSearch
from attacks.registry import Registry
from fedmjp.metrics import score
from fedmjp.models import build_model
from tests.attacks import contract
from tests.attacks.contract import Traits, psnr, small
from tests.conftest import observe, photographs, shared_file

# Random weights. On the april block the position gradient's condition number is about 1e7, so float32 round-off
# decides: what float64 recovers to the last digit, float32 leaves below 20 dB (the published leakage of APRIL is about
# that).
STANDARD, APRIL = ("standard", torch.float32, 60.0), ("april", torch.float64, 100.0)
# The first attention's span is badly conditioned with random weights, and the refinement, which helps, takes seconds.
SPAN = ("standard", torch.float32, 20.0)
BRIEF = TokenSearch(rounds=1, steps=8)
BRIEF_PRIOR = VectorialVariation(strength=40.0, smoothing=(None, 0.01), iterations=20)
QUICK = {
    "noisy_rounds": {"prior": BRIEF_PRIOR},
    "known_draws": {"plain": PatchEmbedding(prior=BRIEF_PRIOR), "masked": MJPSubspace(prior=BRIEF_PRIOR)},
    "token_span": {"steps": 0},
    "position_head": {"steps": 40},
    "pixel_head": {"steps": 1},
    "token_inverse": {"search": BRIEF},
    "later_block": {"search": TokenSearch(rounds=2, steps=24), "steps": 10},
    "patch_set": {"search": BRIEF, "sweep": SweepSearch(rounds=1), "placement": Placement(restarts=1)},
    "batch_tokens": {"search": TokenSearch(rounds=1, steps=4)},
}
# What the client was sent decides before anything else does (active/).
ACTIVE = {
    "needs_positions": False,
    "needs_table": False,
    "single_image": False,
    "single_step": False,
    "reads_masks": True,
}
TRAITS = {
    "patch_embedding": Traits(exact_on=(STANDARD, APRIL), single_step=False),
    "known_draws": Traits(exact_on=(STANDARD, APRIL), single_step=False),
    "sparse_rounds": Traits(exact_on=(STANDARD, APRIL), single_step=False),
    "noisy_rounds": Traits(exact_on=(STANDARD,), reads_masks=True),
    # Of an image that the policy has made: others are no case for it.
    "undo_policy": Traits(single_step=False, own=contract.transformed),
    "april": Traits(exact_on=(APRIL,)),
    "batch_rounds": Traits(exact_on=(STANDARD,), needs_positions=False),
    # Batches of two alone: what stands in the way of those has tests of its own.
    "batch_tokens": Traits(single_image=False, needs_positions=False, needs_table=False, reads_masks=True, images=2),
    "token_span": Traits(exact_on=(("standard", torch.float64, 110.0), SPAN), needs_positions=False),
    "token_inverse": Traits(needs_positions=False, reads_masks=True, vouches=False, own=contract.projection_withheld),
    "later_block": Traits(needs_positions=False, reads_masks=True, own=contract.first_block_withheld),
    # Of a rank above the number of tokens one update is enough; rounds have tests of their own.
    "lora_span": Traits(
        needs_positions=False,
        needs_table=False,
        reads_masks=True,
        single_image=False,
        single_step=False,
        own=contract.low_rank,
    ),
    "position_head": Traits(
        needs_positions=False, needs_table=False, without_table=True, own=contract.places_predicted
    ),
    # Of a head of pixels alone: what stands in the way of reading one has tests of its own.
    "pixel_head": Traits(
        single_image=False, needs_positions=False, needs_table=False, reads_masks=True, own=contract.pixels_restored
    ),
    "patch_set": Traits(needs_positions=False, needs_table=False, without_table=True, vouches=False),
    "unmix": Traits(exact_on=(STANDARD,), needs_positions=False),
    "unmix_rounds": Traits(exact_on=(STANDARD,)),
    "mjp_subspace": Traits(exact_on=(STANDARD, APRIL)),
    "mjp_mixture": Traits(exact_on=(STANDARD, APRIL)),
    "mjp_rounds": Traits(exact_on=(STANDARD,), needs_positions=False),
    "fishing": Traits(**ACTIVE, own=lambda: contract.prepared_by("fishing", target=0)),
    "feature_fishing": Traits(**ACTIVE, own=lambda: contract.prepared_by("feature_fishing", target=7)),
    "imprint": Traits(**ACTIVE, own=lambda: contract.prepared_by("imprint")),
    "token_bins": Traits(**ACTIVE, own=lambda: contract.prepared_by("token_bins")),
    "adapter_trap": Traits(**ACTIVE, own=lambda: contract.prepared_by("adapter_trap", "adapters")),
    "lora_trap": Traits(**ACTIVE, own=lambda: contract.prepared_by("lora_trap", "lora")),
}
CASES = [(name, *case) for name, traits in TRAITS.items() for case in traits.exact_on]
STOPPED = [(name, make) for name, traits in TRAITS.items() for make, stops in contract.OBSTACLES if stops(traits)]
# What the built-in attacks say; another package's may use words of its own.
WORDS = {
    contract.no_positions: "no learnable position embedding",
    contract.withheld: "frozen or withheld",
    contract.masked: "20 of 64 position rows are exactly zero",
    contract.two_images: "the batch holds 2 images",
    contract.four_steps: "4 local steps",
    contract.vanished: "gradient norm is",
    contract.convolutional: "no patch projection",
}


def quick(name: str) -> Attack:
    """The attack with settings that suit a test that is run often."""
    return ATTACKS.get(name)(**QUICK.get(name, {}))


def test_every_attack_has_traits() -> None:
    """Attacks that match the whole update have tests of their own (gradient_matching/)."""
    built_in = [name for name in ATTACKS if ATTACKS.is_built_in(name)]
    assert set(TRAITS) == {name for name in built_in if not ATTACKS.get(name).reads_every_parameter}


@pytest.mark.parametrize(("name", "block", "precision", "threshold"), CASES)
def test_recovers_a_photograph(name: str, block: str, precision: torch.dtype, threshold: float) -> None:
    contract.check_recovers(quick(name), TRAITS[name], block, precision, threshold)


@pytest.mark.parametrize("name", TRAITS)
def test_repeats_itself(name: str) -> None:
    """Also on a model that holds the ViT as a part, but for attacks that choose what is sent."""
    again = {} if issubclass(ATTACKS.get(name), ActiveAttack) else {"again": contract.held}
    contract.check_repeats(quick(name), TRAITS[name], **again)


@pytest.mark.parametrize(("name", "make"), STOPPED)
def test_says_why_it_cannot_work(name: str, make) -> None:
    found = contract.check_obstacle(quick(name), make)
    assert WORDS[make] in found.diagnosis


@pytest.mark.parametrize("name", TRAITS)
def test_nan_gradient_is_an_error(name: str) -> None:
    contract.check_nan(quick(name))


@pytest.mark.parametrize("name", TRAITS)
def test_many_at_once_is_one_by_one(name: str) -> None:
    contract.check_many(quick(name))


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS.is_built_in(name)])
def test_a_second_table_is_refused(name: str) -> None:
    contract.check_second_table(ATTACKS.get(name)())


def test_april_refuses_to_vouch_on_a_pre_norm_block(mini) -> None:
    found = ATTACKS.get("april")()([observe(mini, photographs(64, 1))])
    assert "APRIL's equation does not hold" in found.diagnosis
    assert psnr(found, photographs(64, 1)) < 15


def test_threat_model_refuses_and_names_the_choices() -> None:
    with pytest.raises(UsageError, match="position_gradient"):
        ATTACKS.get("patch_embedding")().require(ThreatModel(frozenset()), "patch_embedding")
    with pytest.raises(UsageError, match="model_weights"):
        ThreatModel.parse(["everything"])
    assert ThreatModel.parse(["labels"]).grants == {Capability.LABELS}


OVER_ROUNDS = [name for name, traits in TRAITS.items() if ATTACKS.get(name).needs_one_of]


@pytest.mark.parametrize("name", OVER_ROUNDS)
def test_one_of_two_capabilities_is_enough(name: str) -> None:
    attack, rounds = ATTACKS.get(name)(), Capability.SEVERAL_ROUNDS
    for way in attack.needs_one_of:
        attack.require(ThreatModel(frozenset({rounds, way})), name)
    with pytest.raises(UsageError, match="needs model_weights or position_gradient, which"):
        attack.require(ThreatModel(frozenset({rounds})), name)
    assert attack.needs_in_words() == ["several_rounds", "model_weights or position_gradient"]


@pytest.mark.parametrize("name", OVER_ROUNDS)
def test_weights_that_are_not_granted_are_not_used(name: str) -> None:
    sent, kept = observe(small(), photographs(64, 1)), contract.withheld()
    blind = [dataclasses.replace(view, weights_granted=False) for view in (sent, kept)]
    assert quick(name)([blind[0]]).diagnosis == ""
    assert "needs the model's weights, which are not granted" in quick(name)([blind[1]]).diagnosis
    assert quick(name)([kept]).images is not None


def test_unknown_attack_names_the_choices() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'april'.*patch_embedding"):
        ATTACKS.get("aprill")


def test_deit_s_at_224_above_60_db() -> None:
    model = build_model("deit_s", num_classes=8, weights="random")
    values = [psnr224(model, image) for image in photographs(224, 8)]
    assert min(values) > 60, values


def test_trained_vit_ti_above_45_db() -> None:
    weights = shared_file("weights/vit_tiny_patch16_224.tiny_imagenet.safetensors")
    model = build_model("vit_ti", num_classes=200, weights=str(weights))
    values = [psnr224(model, image) for image in photographs(224, 4)]
    assert median(values) > 45, values
    assert min(values) > 40, values


def test_april_returns_what_the_patch_projection_keeps_of_the_image() -> None:
    model = build_model("deit_s", num_classes=8, weights="random", block="april")
    model.module.double()
    image = photographs(224, 1).double()
    found = ATTACKS.get("april")()([observe(model, image)])
    tokenizer = find_tokenizer(model.module, (3, 224, 224))
    projection = model.module.patch_embed.proj.weight.detach().flatten(1)  # (384, 768): half of a patch is lost
    kept = tokenizer.patchify(model.normalise(image)) @ torch.linalg.pinv(projection) @ projection
    std, mean = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (model.std, model.mean))
    limit = (tokenizer.unpatchify(kept) * std + mean).clamp(0, 1)
    assert float((found.images - limit).abs().max()) < 1e-3
    assert psnr224_of(found.images.double(), image) < 15


def psnr224(model, image) -> float:
    found = ATTACKS.get("patch_embedding")()([observe(model, image[None])])
    assert found.diagnosis == ""
    return psnr224_of(found.images, image[None])


def psnr224_of(images, originals) -> float:
    return float(score(images, originals, patch_size=16)["psnr"][0])


@dataclass(frozen=True, kw_only=True)
class Brittle(Attack):
    """Grey images, but an exception for clients of an odd number."""

    error: ClassVar[type[BaseException]] = ZeroDivisionError

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """Raise on odd clients."""
        if observations[-1].client % 2:
            raise self.error("no pivot\nin column 3")
        return Reconstruction(torch.full((1, 3, 64, 64), 0.5))


class Batched(Brittle):
    """The same for all cases at once: one that raises takes the others with it."""

    def reconstruct_many(self, cases: Sequence[Sequence[Observation]]) -> list[Reconstruction]:
        """All or none."""
        return [self.reconstruct(case) for case in cases]


@pytest.mark.parametrize("attack", [Brittle(), Batched()])
def test_an_attack_that_raises_is_a_diagnosis_of_its_case(attack: Attack, mini) -> None:
    cases = [[observe(mini, photographs(64, 1), client=client)] for client in range(3)]
    found = attack.attack_many(cases)
    assert [f.images is None for f in found] == [False, True, False]
    assert [f.diagnosis for f in found] == ["", "the attack failed: ZeroDivisionError: no pivot", ""]


def test_images_that_are_not_finite_are_a_diagnosis(mini) -> None:
    class Divides(Brittle):
        """By zero."""

        def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
            """One pixel is NaN."""
            images = torch.full((1, 3, 64, 64), 0.5)
            images[0, 0, 0, 0] /= images.new_zeros(()) / 0
            return Reconstruction(images, known=torch.ones(1, 1, 64, 64, dtype=torch.bool), diagnosis="coarse")

    found = Divides()([observe(mini, photographs(64, 1))])
    assert (found.images, found.known) == (None, None)
    assert found.diagnosis == "the images that were computed are not finite; coarse"


def test_one_image_that_is_not_finite_takes_no_other_with_it(mini) -> None:
    class Loses(Brittle):
        """The second of three images."""

        def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
            """One pixel is NaN."""
            images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 64, 64).clone() / 2
            images[1, 0, 0, 0] = torch.nan
            return Reconstruction(images, torch.ones(3, 1, 64, 64, dtype=torch.bool), labels=torch.arange(3))

    found = Loses()([observe(mini, photographs(64, 3))])
    assert found.images[:, 0, 0, 0].tolist() == [0.0, 1.0]
    assert found.known.shape == (2, 1, 64, 64)
    assert found.labels.tolist() == [0, 2]
    assert found.diagnosis == "1 of the 3 images that were computed are not finite"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("base", [Brittle, Batched])
def test_interrupts_and_want_of_memory_are_raised_on(base: type, error: type, mini) -> None:
    attack = type("Failing", (base,), {"error": error})()
    with pytest.raises(error):
        attack([observe(mini, photographs(64, 1), client=1)])


def test_registry_refuses_two_of_a_name_and_takes_a_class_defined_again() -> None:
    table = Registry("attack", {"april": "attacks.closed_form.april:April"}, group="fedmjp.nothing")
    table.register("mine")(Brittle)
    again = type("Brittle", (Attack,), {"__module__": Brittle.__module__})
    table.register("mine")(again)
    assert table.get("mine") is again
    with pytest.raises(
        ValueError, match=r"'april' is registered twice: attacks\.closed_form\.april:April and .*Brittle"
    ):
        table.register("april")(Brittle)
    assert table.names() == ["april", "mine"]
    assert table.name_of(ATTACKS.get("april")) == "april"
    assert table.name_of(Batched) is None


@pytest.mark.parametrize("name", ["noisy_rounds", "sparse_rounds", "batch_rounds", "mjp_rounds"])
def test_an_earlier_update_that_is_not_finite_is_left_out(name: str, mini) -> None:
    image = photographs(64, 1)
    good = [observe(mini, image, round=number) for number in (1, 3)]
    spoilt = {n: torch.full_like(g, torch.nan) if n == "pos_embed" else g for n, g in good[0].gradients.items()}
    between = replace(good[0], gradients=spoilt, round=2)
    found, expected = (ATTACKS.get(name)()(views) for views in ([good[0], between, good[1]], good))
    assert found.diagnosis == expected.diagnosis
    assert torch.equal(found.images, expected.images)


def test_april_vouches_for_no_patch_that_the_noise_spoils() -> None:
    """Float32 gradients of a model whose projection makes much of their noise, and the same in float64."""
    model, image = build_model("vit_mini_64", num_classes=8, weights="random", block="april"), photographs(64, 1)
    found = ATTACKS.get("april")()([observe(model, image)])
    right = psnr_of_patches(found.images, image, model.patch_size) > 25
    assert not found.known[..., :: model.patch_size, :: model.patch_size].flatten()[~right].any()
    model.module.double()
    exact = ATTACKS.get("april")()([observe(model, image.double())])
    assert bool(exact.known.all())


@pytest.mark.parametrize("width", [40, 48])
def test_what_the_prior_settles_alone_is_not_vouched_for(width: int) -> None:
    """64 patches in fewer channels: a quarter of their combinations and more are in no equation."""
    torch.manual_seed(0)
    module = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=width, depth=1, num_heads=4, num_classes=8
    )
    images = photographs(32, 1)
    loss = torch.nn.functional.cross_entropy(module(images), torch.tensor([1]))
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    found = ATTACKS.get("patch_embedding")()([Observation(gradients, module, 1, (3, 32, 32), (0.0,) * 3, (1.0,) * 3)])
    assert found.diagnosis == ""
    assert not found.known.any()


def psnr_of_patches(images: torch.Tensor, originals: torch.Tensor, size: int) -> torch.Tensor:
    """(N,) dB of each patch of one image."""
    errors = torch.nn.functional.avg_pool2d((images - originals).square().mean(dim=1, keepdim=True), size)
    return -10 * errors.flatten().log10()
