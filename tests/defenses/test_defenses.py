"""Every defence: options, hooks, and what the model sees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from attacks import UsageError
from attacks.registry import Registry
from fedmjp.cli import parse
from fedmjp.config import RunConfig, from_flat
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.defenses.options import defense_options, option_names, require_used
from fedmjp.models import build_model
from fedmjp.training import TrainConfig
from tests.conftest import photographs


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def mjp_model():
    return build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="linear")


@pytest.mark.parametrize("name", list(DEFENSES))
def test_hooks_keep_shapes_and_repeat(name: str, mjp_model) -> None:
    defense = DEFENSES.get(name)()
    defense.validate()
    images = photographs(64, 3)
    first, second = (defense.on_input(images, mjp_model, draw(), 1) for _ in range(2))
    assert first.images.shape == images.shape
    assert torch.equal(first.images, second.images)
    update = {"pos_embed": torch.randn(1, 65, 4), "w": torch.randn(7)}
    sent, again = (defense.message({n: t.clone() for n, t in update.items()}, draw(), {})[0] for _ in range(2))
    assert all(torch.equal(sent[n], again[n]) and sent[n].shape == update[n].shape for n in update)


def test_none_changes_nothing(mjp_model) -> None:
    images = photographs(64, 2)
    seen = DEFENSES.get("none")().on_input(images, mjp_model, draw(), 1)
    assert seen.images is images
    assert seen.position_mask is None


def test_mjp_shows_the_same_patches_elsewhere(mjp_model) -> None:
    images = photographs(64, 3)
    seen = DEFENSES.get("mjp")(gamma=0.5).on_input(images, mjp_model, draw(), 1)
    before, after = (F.unfold(x, 8, stride=8) for x in (images, seen.images))
    visible = ~seen.position_mask
    assert (visible.sum(dim=1) == 32).all()
    assert torch.equal(before.transpose(1, 2)[visible], after.transpose(1, 2)[visible])
    assert not torch.equal(before, after)
    torch.testing.assert_close(before.sum(dim=2), after.sum(dim=2))


def test_mjp_one_mask_for_the_batch(mjp_model) -> None:
    seen = DEFENSES.get("mjp")(gamma=0.5, jigsaw_per="batch").on_input(photographs(64, 3), mjp_model, draw(), 1)
    assert (seen.position_mask == seen.position_mask[0]).all()


def test_mjp_warmup_and_probability(mjp_model) -> None:
    images = photographs(64, 1)
    mjp = DEFENSES.get("mjp")(jigsaw_warmup=2, jigsaw_probability=0.5)
    assert mjp.on_input(images, mjp_model, draw(), 2).position_mask is None
    hidden = [mjp.on_input(images, mjp_model, draw(s), 3).position_mask is not None for s in range(200)]
    assert 70 < sum(hidden) < 130


@pytest.mark.parametrize("name", ["vit_mini_64_nope", "resnet50"])
def test_mjp_without_positions_only_jigsaws(name: str) -> None:
    model = build_model(name, num_classes=8, weights="random")
    images = photographs(model.image_size, 1)
    seen = DEFENSES.get("mjp")(gamma=0.9).on_input(images, model, draw(), 1)
    assert seen.position_mask is None
    assert not torch.equal(seen.images, images)


@pytest.mark.parametrize(
    ("given", "trained"),
    [("deit_s", "deit_s_mjp"), ("deit_s_nope", "deit_s_nope"), ("deit_s_mjp", "deit_s_mjp"), ("swin_t", "swin_t")],
)
def test_mjp_picks_the_model(given: str, trained: str) -> None:
    assert DEFENSES.get("mjp")().model_name(given) == trained


@pytest.mark.parametrize(
    ("options", "given", "trained"),
    [
        ({"positions": "own", "dal": "none"}, "deit_s", "deit_s"),
        ({"positions": "own"}, "deit_s", "deit_s_mjp"),
        ({"positions": "own", "dal": "none"}, "swin_t", "swin_t"),
        ({"positions": "index"}, "deit_s", "deit_s_idx"),
        ({"positions": "index"}, "deit_s_idx", "deit_s_idx"),
        ({"positions": "index"}, "deit_s_nope", "deit_s_nope"),
        ({"positions": "index"}, "deit_s_mjp", "--positions index trains deit_s_idx; pass --model deit_s"),
        ({"positions": "unknown"}, "deit_s_idx", "--positions unknown trains deit_s_mjp; pass --model deit_s"),
    ],
)
def test_mjp_positions_pick_the_model(options: dict, given: str, trained: str) -> None:
    mjp = DEFENSES.get("mjp")(**options)
    if trained.startswith("--"):
        with pytest.raises(UsageError, match=trained):
            mjp.model_name(given)
    else:
        assert mjp.model_name(given) == trained


@pytest.mark.parametrize(
    ("positions", "name", "arguments"),
    [
        ("unknown", "vit_micro_32_mjp", {"position_mask"}),
        ("own", "vit_micro_32_mjp", set()),
        ("own", "vit_micro_32", set()),
        ("index", "vit_micro_32_idx", {"origins"}),
        ("index", "resnet_micro_32", set()),
    ],
)
def test_mjp_passes_the_model_the_arguments_it_accepts(positions: str, name: str, arguments: set) -> None:
    """The jigsaw is the same for all values of `positions`; only the model's arguments differ."""
    model = build_model(name, num_classes=8, weights="random")
    images = photographs(32, 2)
    seen = DEFENSES.get("mjp")(gamma=0.5, positions=positions).on_input(images, model, draw(), 1)
    plain = DEFENSES.get("mjp")(gamma=0.5).on_input(images, model, draw(), 1)
    assert set(seen.forward_kwargs()) == arguments
    assert torch.equal(seen.images, plain.images)


def test_mjp_origins_say_where_each_patch_came_from() -> None:
    model = build_model("vit_micro_32_idx", num_classes=8, weights="random")
    images = torch.rand(3, 3, 32, 32)
    seen = DEFENSES.get("mjp")(gamma=0.5, positions="index").on_input(images, model, draw(), 1)
    before, after = (F.unfold(x, 4, stride=4) for x in (images, seen.images))
    for b in range(3):
        for place in range(64):
            assert torch.equal(after[b, :, place], before[b, :, seen.origins[b, place]])
    assert (seen.origins != torch.arange(64)).any()


def test_mjp_index_of_the_place_says_nothing_of_the_jigsaw() -> None:
    """As released: row i of the table at place i, on the jigsawed image that the other reading gives, too."""
    model = build_model("vit_micro_32_idx", num_classes=8, weights="random")
    images = torch.rand(2, 3, 32, 32)
    place, origin = (
        DEFENSES.get("mjp")(gamma=0.5, positions="index", index_of=way).on_input(images, model, draw(), 1)
        for way in ("place", "origin")
    )
    assert torch.equal(place.images, origin.images)
    assert place.forward_kwargs() == {}
    model.module(place.images)[0, 0].backward()
    torch.testing.assert_close(model.module.idx_embed.grad[0], model.module.pos_embed.grad[0, 1:])


def test_mjp_masks_as_released_are_short_of_the_ratio() -> None:
    model = build_model("vit_micro_32_mjp", num_classes=8, weights="random")
    images = torch.rand(200, 3, 32, 32)
    seen = DEFENSES.get("mjp")(gamma=0.9, mask_sampler="released").on_input(images, model, draw(), 1)
    counts = seen.position_mask.sum(dim=1)
    assert counts.max() <= 57  # floor(0.9 * 64); exactly 58 by default
    assert counts.min() < 55  # ten misses in a row end a mask
    before, after = (F.unfold(x, 4, stride=4) for x in (images, seen.images))
    moved = (before != after).any(dim=1)
    assert not (moved & ~seen.position_mask).any()


def test_rows_from_before_an_option_stay_rows_of_the_same_case() -> None:
    plain = DEFENSES.get("mjp")(gamma=0.1)
    names = ["gamma", "jigsaw_probability", "jigsaw_warmup", "jigsaw_per", "positions", "dal", "dal_weight"]
    assert list(plain.parameters()) == names
    changed = dataclasses.replace(plain, mask_sampler="released")
    assert changed.parameters() == plain.parameters() | {"mask_sampler": "released"}
    assert DEFENSES.get("none")().parameters() == {}


def test_the_distance_of_equation_4_is_twice_the_mean_over_coordinates() -> None:
    model = build_model("vit_micro_32_mjp", num_classes=8, weights="random", dal="linear")
    positions = model.module.patch_positions()
    guess = model.module.dal.map(positions)  # (N, 2)
    places = torch.tensor([(i, j) for i in range(1, 9) for j in range(1, 9)])
    by_hand = 0.03 * (guess - places).abs().sum(dim=1).mean()  # lambda E |(i, j) - (i~, j~)|_1
    weight = DEFENSES.get("mjp")(dal="linear", dal_weight=0.03, dal_distance="sum").loss_weights()["dal"]
    torch.testing.assert_close(weight * model.module.dal(positions, model.grid), by_hand)
    assert DEFENSES.get("mjp")(dal_weight=0.03).loss_weights() == {"dal": 0.03}


def test_spp_shuffles_patches_and_the_pixels_in_them() -> None:
    """Against a search: some patch of the image holds each shuffled patch's pixels, in one order an image."""
    model = build_model("vit_micro_32", num_classes=8, weights="random")
    images = torch.rand(2, 3, 32, 32)  # no two pixels are alike
    seen = DEFENSES.get("spp")(spp_probability=1.0).on_input(images, model, draw(), 1)
    assert seen.forward_kwargs() == {}
    orders, sources = [], []
    for b in range(2):
        before, after = (F.unfold(x[b : b + 1], 4, stride=4)[0].view(3, 16, 64) for x in (images, seen.images))
        found = set()
        for place in range(64):
            first = after[:, 0, place]
            pixel, patch = next(
                divmod(int(i), 64) for i in (before - first[:, None, None]).abs().sum(0).flatten().argsort()
            )
            order = [int((before[:, :, patch] - after[:, [j], place]).abs().sum(0).argmin()) for j in range(16)]
            assert torch.equal(before[:, order, patch], after[:, :, place])
            assert order[0] == pixel
            found.add(tuple(order))
            sources.append((b, patch))
        assert len(found) == 1
        orders += found
    assert len(set(sources)) == 128
    assert orders[0] != orders[1]


def test_spp_spares_steps() -> None:
    model = build_model("vit_micro_32", num_classes=8, weights="random")
    images = torch.rand(1, 3, 32, 32)
    spp = DEFENSES.get("spp")()
    shuffled = [not torch.equal(spp.on_input(images, model, draw(s), 1).images, images) for s in range(200)]
    assert 70 < sum(shuffled) < 130


def test_noise_clips_then_adds() -> None:
    noise = DEFENSES.get("noise")
    update = {"a": torch.full((3, 4), 2.0), "b": torch.full((5,), -1.0)}
    clipped = noise(clip_norm=0.5, noise_multiplier=0.0).on_update(update, draw())
    norm = torch.cat([t.flatten() for t in clipped.values()]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-5)
    many = noise(clip_norm=2.0, noise_multiplier=0.1).on_update({"a": torch.zeros(100_000)}, draw())
    assert float(many["a"].std()) == pytest.approx(0.2, rel=0.02)


def test_noise_in_units_of_the_updates_own_entries() -> None:
    """Whatever the update's norm, the same share of it; 10 % of the root mean square entry after the clip."""
    noise = DEFENSES.get("noise")(noise_multiplier=0.1, noise_unit="entry")
    whole = torch.randn(100_000, generator=draw(1))
    for scale in (1e-4, 1e-2, 1e4):  # norms of 0.03 and 3; the third is clipped to 1
        update = {"a": scale * whole}
        clean = update["a"] * min(1.0, 1.0 / float(update["a"].norm()))
        added = noise.on_update(update, draw())["a"] - clean
        assert float(added.std()) == pytest.approx(0.1 * float(clean.square().mean().sqrt()), rel=0.02)
    assert "noise_unit" not in DEFENSES.get("noise")().parameters()


def test_frozen_positions_sends_zeros() -> None:
    update = {name: torch.ones(2) for name in ("pos_embed", "unk_embed", "idx_embed", "w")}
    sent = DEFENSES.get("frozen_positions")().message(update, draw(), {})[0]
    assert not any(sent[name].any() for name in ("pos_embed", "unk_embed", "idx_embed"))
    assert sent["w"].all()


BAD = [
    ("mjp", {"gamma": 1.5}, r"--gamma must lie in \[0, 1\]"),
    ("mjp", {"gamma": -0.1}, r"--gamma"),
    ("mjp", {"gamma": float("nan")}, r"--gamma"),
    ("mjp", {"jigsaw_probability": 2.0}, "--jigsaw-probability"),
    ("mjp", {"dal_weight": -1.0}, "--dal-weight"),
    ("noise", {"clip_norm": 0.0}, "--clip-norm"),
    ("noise", {"clip_norm": float("nan")}, "--clip-norm"),
    ("noise", {"noise_multiplier": float("nan")}, "--noise-multiplier"),
    ("spp", {"spp_probability": 1.5}, "--spp-probability"),
    ("topk", {"topk_share": 0.0}, r"--topk-share must lie in \(0, 1\], not 0.0"),
    ("topk", {"topk_share": 1.5}, "--topk-share"),
    ("topk", {"topk_share": float("nan")}, "--topk-share"),
    ("quantise", {"quantise_format": "int3"}, "is one of sign, int4, int8, float16, bfloat16, not 'int3'"),
    ("quantise", {"quantise_format": "sign", "quantise_rounding": "stochastic"}, "drop it for sign"),
    ("quantise", {"quantise_format": "float16", "quantise_per": "row"}, "drop it for float16"),
]


@pytest.mark.parametrize(("name", "options", "words"), BAD)
def test_options_out_of_range(name: str, options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DEFENSES.get(name)(**options).validate()


def test_built_in_options_have_plain_names() -> None:
    """They share one flat command line with each other and with all other options."""
    names = [f.name for name in DEFENSES if DEFENSES.is_built_in(name) for f in dataclasses.fields(DEFENSES.get(name))]
    assert len(names) == len(set(names))
    for config in (RunConfig, TrainConfig):
        assert set(names) <= set(defense_options(option_names(config)).places)


@dataclasses.dataclass(frozen=True)
class Quiet(Defense):
    """Options of --defense quiet."""

    gamma: float = 0.25
    """A gamma of its own."""
    rounds: tuple[int, ...] = (1, 2)
    """Rounds in which it acts."""
    volume: float = 2.0
    """A name that nobody else has."""


@pytest.fixture
def command(monkeypatch):
    """A command with two options of its own, where a defence with options of taken names is registered."""
    table = Registry("defense", {name: f"{t.__module__}:{t.__qualname__}" for name, t in DEFENSES.available().items()})
    table.register("quiet")(Quiet)
    monkeypatch.setattr("fedmjp.defenses.options.DEFENSES", table)
    options = defense_options(("rounds", "seed"))
    fields = [("rounds", int, 3), ("seed", int, 0), ("options", options, dataclasses.field(default_factory=options))]
    return dataclasses.make_dataclass("Command", fields, frozen=True)


def test_options_of_one_name_carry_their_defence(command) -> None:
    given = ["--gamma", "0.1", "--quiet.gamma", "0.2", "--rounds", "9", "--quiet.rounds", "5", "6", "--volume", "7"]
    found = parse(command, "command", "", given)
    assert (found.options.mjp.gamma, found.options.quiet.gamma, found.rounds) == (0.1, 0.2, 9)
    assert (found.options.quiet.rounds, found.options.quiet.volume) == ((5, 6), 7.0)
    assert isinstance(found.options.quiet, Quiet)
    assert parse(command, "command", "", []).options.quiet.gamma == 0.25


@pytest.mark.parametrize(
    ("entries", "name", "option"), [(["none"], "mjp", "gamma"), (["ats", "mjp+spp"], "lora", "lora_rank")]
)
def test_options_of_a_defence_that_does_not_run(entries: list[str], name: str, option: str) -> None:
    given = from_flat({option: 3}).options
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is an option of --defense {name}, which does"):
        require_used(given, entries)
    require_used(given, [*entries, f"noise+{name}"])
    require_used(RunConfig().options, ["none"])


def test_a_defence_registered_late_has_its_defaults(monkeypatch) -> None:
    table = Registry("defense", {"none": "fedmjp.defenses.base:Defense"})
    table.register("quiet")(Quiet)
    for module in ("fedmjp.config", "fedmjp.defenses.chain"):
        monkeypatch.setattr(f"{module}.DEFENSES", table)
    config = RunConfig(defense=("quiet",))
    config.validate()
    assert RunConfig.from_json(config.to_json()).defence("quiet") == Quiet()


def test_options_of_a_defence_that_is_not_installed() -> None:
    text = RunConfig(defense=("mjp",)).to_json().replace('"mjp": {', '"gone": {')
    with pytest.raises(UsageError, match="the configuration holds 'gone', which is unknown here"):
        RunConfig.from_json(text)


def test_help_of_options_of_one_name(command, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(command, "command", "", ["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())  # whatever the width of the columns
    assert "--quiet.gamma FLOAT A gamma of its own. (default: 0.25)" in text
    assert "--volume FLOAT" in text
    assert "--gamma FLOAT" in text
