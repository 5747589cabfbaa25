"""Attacks on many clients: rows, resumption, images that cannot be decoded, out of memory."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from attacks import ATTACKS, Attack, UsageError
from fedmjp.audit import campaign as campaign_module
from fedmjp.audit.campaign import Campaign
from fedmjp.audit.harness import scorer
from fedmjp.audit.per_image import observe_groups
from fedmjp.audit.suite import select_attacks
from fedmjp.audit.verdict import Answer, judge
from fedmjp.audit.victims import Setting, Subject, Victims, by_input
from fedmjp.data import load_gallery
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from fedmjp.records import provenance
from fedmjp.records.rows import BASELINES, RowLog

ORIGINAL = Setting("a", defended=False, hidden=False, against="seen")
SEEN = Setting("b", defended=True, hidden=True, against="seen")
BARE = Setting("c", defended=True, hidden=False, against="seen")
BACK = Setting("d", defended=True, hidden=True, against="original")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def subject():
    return Subject(build_model("vit_mini_64_mjp", num_classes=8, weights="random"))


def victims_of(place: str = "photos", limit: int | None = 5, warnings: list | None = None, seed: int = 0) -> Victims:
    gallery = load_gallery(place, size=64, limit=limit)
    warn = (warnings if warnings is not None else []).append
    return Victims(gallery, DEFENSES.get("mjp")(gamma=0.5), seed=seed, device=CPU, warn=warn)


def build_attacks(*names: str) -> dict[str, Attack]:
    return {name: ATTACKS.get(name)() for name in names}


def campaign_on(victims: Victims, rows: RowLog, batch_size: int = 3, **changes) -> Campaign:
    options = {
        "defense": "mjp",
        "attacks": build_attacks("patch_embedding", "april"),
        "rows": rows,
        "columns": {"run_id": "test", **provenance.columns(CPU)},
        "score_images": scorer(8, None),
        "batch_size": batch_size,
        "on_batch": lambda count, psnr: None,
    }
    return Campaign(victims, **(options | changes))


def test_the_update_to_choose_attacks_by_is_of_the_first_client_that_can_be_read(subject, tmp_path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a.jpg", "b.jpg"):
        Image.fromarray(rng.integers(0, 255, (200, 200, 3), dtype=np.uint8)).save(tmp_path / name)
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) // 2])
    warnings: list[str] = []
    victims = victims_of(str(tmp_path), warnings=warnings)
    view = victims.sample(subject, SEEN)[0]
    assert len(warnings) == 1
    chosen = select_attacks(["auto"], [view], subject.threat_model, budget=1.0).chosen
    assert set(chosen) == {"patch_embedding", "mjp_subspace"}  # half of the positions are hidden
    bare = victims.sample(subject, ORIGINAL)
    assert set(select_attacks(["auto"], bare, subject.threat_model, budget=1.0).chosen) == {"patch_embedding"}
    (tmp_path / "b.jpg").unlink()
    assert victims_of(str(tmp_path)).sample(subject, SEEN) == []


def rows_of(rows: RowLog) -> list[dict]:
    """All rows in a fixed order, without the column that differs between equal campaigns."""
    kept = [{k: v for k, v in row.items() if k != "seconds"} for row in rows.rows()]
    return sorted(kept, key=lambda r: (r["setting"], r["attack"], r["image_id"]))


def psnr(rows: RowLog, setting: str, attack: str, metric: str = "psnr") -> list[float]:
    return [r[metric] for r in rows.rows() if (r["setting"], r["attack"]) == (setting, attack)]


def test_settings_with_the_same_model_input_share_their_gradients() -> None:
    assert by_input([ORIGINAL, SEEN, BARE, BACK]) == [[ORIGINAL], [SEEN, BACK], [BARE]]


def test_every_setting_attack_and_image_has_a_row(tmp_path, subject) -> None:
    with RowLog(tmp_path / "rows.jsonl") as rows:
        campaign = campaign_on(victims_of(), rows)
        campaign.attack(subject, [ORIGINAL, SEEN, BARE, BACK])
        campaign.baselines("a")
        assert len(rows.rows()) == 5 * (4 * 2 + 2)
        assert min(psnr(rows, "a", "patch_embedding")) > 60
        assert min(psnr(rows, "c", "patch_embedding")) > 60  # without the shared embedding nothing is hidden
        assert median(psnr(rows, "b", "patch_embedding")) < 15
        # Hidden patches are reconstructed as one colour, so a permutation among them does not change the MSE.
        assert psnr(rows, "d", "patch_embedding") == pytest.approx(psnr(rows, "b", "patch_embedding"), abs=0.01)
        assert psnr(rows, "d", "patch_embedding", "ssim") != psnr(rows, "b", "patch_embedding", "ssim")
        assert all(6 < p < 25 for p in psnr(rows, "a", "mean_image"))


def test_the_guesses_beside_a_single_image_are_not_that_image(tmp_path, subject) -> None:
    warnings: list[str] = []
    with RowLog(tmp_path / "rows.jsonl") as rows:
        campaign = campaign_on(victims_of(limit=1, warnings=warnings), rows)
        campaign.attack(subject, [ORIGINAL])
        campaign.baselines("a")
        assert all(3 < p < 25 for name in BASELINES for p in psnr(rows, "a", name))
        assert judge(pd.DataFrame(rows.rows())).answer is Answer.LEAKS
    assert "because those of a single image would be the image itself" in warnings[-1]


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_the_rows_do_not_depend_on_the_batch_size(tmp_path, subject, batch_size: int) -> None:
    with RowLog(tmp_path / "one.jsonl") as one, RowLog(tmp_path / "two.jsonl") as two:
        campaign_on(victims_of(), one, 3).attack(subject, [SEEN])
        campaign_on(victims_of(), two, batch_size).attack(subject, [SEEN])
        for a, b in zip(rows_of(one), rows_of(two), strict=True):
            assert a["image_id"] == b["image_id"]
            # On masked updates the systems that these attacks solve are ill-posed and amplify round-off.
            assert a["psnr"] == pytest.approx(b["psnr"], abs=0.3)


def test_existing_rows_are_not_computed_again(tmp_path, subject, monkeypatch) -> None:
    with RowLog(tmp_path / "rows.jsonl") as rows:
        april = build_attacks("april")
        campaign_on(victims_of(limit=3), rows, batch_size=3, attacks=april).attack(subject, [ORIGINAL])
        sizes = []
        real = campaign_module.run_attacks

        def counting(victims, subject, settings, clients, originals, attacks, score_images, skip):
            sizes.append((len(clients), sorted(set(attacks) - set(skip))))
            return real(victims, subject, settings, clients, originals, attacks, score_images, skip)

        monkeypatch.setattr(campaign_module, "run_attacks", counting)
        campaign_on(victims_of(limit=5), rows, attacks=april).attack(subject, [ORIGINAL])
        campaign_on(victims_of(limit=5), rows).attack(subject, [ORIGINAL])
        assert sizes == [(2, ["april"]), (3, ["patch_embedding"]), (2, ["patch_embedding"])]
        assert len(rows.rows()) == 10


def test_another_seed_draws_another_mask_and_writes_separate_rows(tmp_path, subject) -> None:
    first, second = victims_of(seed=0), victims_of(seed=1)
    clients, images = first.decode([0, 1])
    masks = [v.seen(subject.built, SEEN, clients, images).position_mask for v in (first, second, first)]
    assert not masks[0].equal(masks[1])
    assert masks[0].equal(masks[2])
    assert not masks[0][0].equal(masks[0][1])
    with RowLog(tmp_path / "rows.jsonl") as rows:
        for victims in (first, second):
            campaign_on(victims, rows).attack(subject, [SEEN])
        assert len(rows.rows()) == 2 * 5 * 2


def out_of_memory_above(monkeypatch, most: int) -> None:
    from fedmjp.audit import victims

    real = victims.attacked_gradients

    def limited(built, images, *rest, **named):
        if len(images) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(built, images, *rest, **named)

    monkeypatch.setattr(victims, "attacked_gradients", limited)


def test_out_of_memory_halves_the_batch_and_continues(tmp_path, subject, monkeypatch) -> None:
    warnings = []
    with RowLog(tmp_path / "whole.jsonl") as whole, RowLog(tmp_path / "halved.jsonl") as halved:
        campaign_on(victims_of(), whole, 1).attack(subject, [ORIGINAL, SEEN, BACK])
        out_of_memory_above(monkeypatch, 1)
        campaign = campaign_on(victims_of(warnings=warnings), halved, 5)
        campaign.attack(subject, [ORIGINAL, SEEN, BACK])
        assert rows_of(halved) == rows_of(whole)
        assert campaign.batch_size == 1
    assert warnings == [
        "out of memory with 5 clients per batch; continuing with 2",
        "out of memory with 2 clients per batch; continuing with 1",
    ]


def test_out_of_memory_in_the_middle_of_a_batch_leaves_no_half_written_batch(tmp_path, subject, monkeypatch) -> None:
    real, calls = campaign_module.score_found, []

    def failing(attack, name, *rest):
        calls.append(name)
        if len(calls) == 2:  # the first attack of the batch is scored already
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(attack, name, *rest)

    monkeypatch.setattr(campaign_module, "score_found", failing)
    with RowLog(tmp_path / "rows.jsonl") as rows:
        campaign_on(victims_of(limit=4), rows, 4).attack(subject, [ORIGINAL])
        assert len(rows.rows()) == 4 * 2


def test_an_error_is_raised_if_a_single_image_does_not_fit_into_memory(tmp_path, subject, monkeypatch) -> None:
    out_of_memory_above(monkeypatch, 0)
    with (
        RowLog(tmp_path / "rows.jsonl") as rows,
        pytest.raises(UsageError, match=r"vit_mini_64_mjp does not fit into memory"),
    ):
        campaign_on(victims_of(limit=2), rows, 2).attack(subject, [ORIGINAL])


def write_difficult_images(root) -> None:
    """Write RGB, grey, tiny, 16-bit and palette images, a strip, an empty file, text, and a truncated image."""
    pixels = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    smooth = np.kron(pixels[::10, ::10], np.ones((10, 10, 1), dtype=np.uint8))
    Image.fromarray(smooth).save(root / "good.png")
    Image.fromarray(smooth[..., 0]).save(root / "grey.jpg")
    Image.fromarray(smooth[:2, :3]).save(root / "tiny.png")
    Image.fromarray(smooth[..., 0].astype(np.uint16) * 257).save(root / "deep.png")
    Image.fromarray(smooth).convert("P").save(root / "palette.gif")
    Image.fromarray(np.zeros((1, 60_000, 3), dtype=np.uint8)).save(root / "strip.png")
    (root / "empty.jpg").write_bytes(b"")
    (root / "text.png").write_text("not a picture")
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (200, 200, 3), dtype=np.uint8)).save(root / "cut.jpg")
    whole = (root / "cut.jpg").read_bytes()
    (root / "cut.jpg").write_bytes(whole[: len(whole) // 2])


def test_only_images_that_cannot_be_decoded_are_left_out(tmp_path, subject) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    write_difficult_images(folder)
    warnings: list[str] = []
    victims = victims_of(str(folder), None, warnings)
    assert {reason.split(":")[0] for reason in victims.gallery.skipped} == {"empty.jpg", "text.png"}
    with RowLog(tmp_path / "rows.jsonl") as rows:
        campaign = campaign_on(victims, rows, attacks=build_attacks("patch_embedding"))
        campaign.attack(subject, [ORIGINAL])
        campaign.baselines("a")
        found = {r["image_id"]: r["psnr"] for r in rows.rows() if r["attack"] == "patch_embedding"}
        assert set(found) == {"good.png", "grey.jpg", "tiny.png", "deep.png", "palette.gif"}
        assert min(found.values()) > 40
        assert len(rows.rows()) == 5 * 3
    assert [line.split("'")[1] for line in warnings] == ["cut.jpg", "strip.png"]


def test_float64_is_used_in_every_step(tmp_path) -> None:
    subject = Subject(build_model("vit_mini_64", num_classes=8, weights="random", block="april"), precision="float64")
    with RowLog(tmp_path / "rows.jsonl") as rows:
        campaign_on(victims_of(), rows, attacks=build_attacks("april")).attack(subject, [ORIGINAL])
        assert min(psnr(rows, "a", "april")) > 100
        assert {r["precision"] for r in rows.rows()} == {"float64"}


def test_accuracy_is_the_share_of_correct_predictions(subject) -> None:
    victims = victims_of()
    with torch.no_grad():
        clients, images = victims.decode(range(5))
        right = subject.built.module(subject.built.normalise(images)).argmax(dim=1)
    victims.gallery.images.labels[:3], victims.gallery.images.labels[3:] = right[:3], (right[3:] + 1) % 8
    assert victims.accuracy(subject, ORIGINAL, 2) == pytest.approx(3 / 5)
    victims.unreadable |= {0, 1}  # a whole batch of them
    assert 0 <= victims.accuracy(subject, ORIGINAL, 2) <= 1
    victims.unreadable |= set(range(len(victims)))
    assert math.isnan(victims.accuracy(subject, ORIGINAL, 2))


def test_clients_with_several_images(tmp_path, subject) -> None:
    gallery = load_gallery("photos", size=64, limit=5)
    defense = DEFENSES.get("mjp")(gamma=0.5)
    victims = Victims(gallery, defense, seed=0, device=CPU, warn=lambda line: None, group=2)
    assert len(victims) == 2  # the fifth image is left over
    with RowLog(tmp_path / "rows.jsonl") as rows:
        campaign = campaign_on(
            victims, rows, attacks={"inverting_gradients": ATTACKS.get("inverting_gradients")(steps=1)}
        )
        campaign.attack(subject, [ORIGINAL, BACK])
        campaign.baselines("a")
        written = rows.rows()
    assert len(written) == 4 * (2 + 2)
    assert {row["batch_size"] for row in written} == {2}
    own = [row for row in written if row["setting"] == "a" and row["attack"] == "inverting_gradients"]
    assert [(row["image"], row["image_id"]) for row in own] == list(
        zip([0, 1, 0, 1], gallery.images.ids[:4], strict=True)
    )
    assert all(row["details"]["label_accuracy"] == 1.0 for row in own)
    assert all(np.isfinite(row["psnr"]) for row in own)
    hidden = [row for row in written if row["setting"] == "d"]
    assert all("one_mask_assumed" in row["flags"] for row in hidden)


def test_whole_updates_equal_those_of_the_attacked_layers(subject) -> None:
    victims = victims_of(limit=2)
    clients, originals = victims.decode([0, 1])
    seen = victims.seen(subject.built, SEEN, clients, originals)
    few, every = (
        victims.observe(subject.built, seen, clients, build_attacks(name).values(), {"dal": 0.1})
        for name in ("patch_embedding", "inverting_gradients")
    )
    for part, whole in zip(few, every, strict=True):
        assert set(whole.gradients) == {name for name, _ in subject.built.module.named_parameters()}
        for name, gradient in part.gradients.items():
            torch.testing.assert_close(gradient, whole.gradients[name], atol=1e-6, rtol=1e-3)


def test_a_defence_of_updates_acts_on_the_whole_gradient(subject) -> None:
    noise = DEFENSES.get("noise")(clip_norm=1e-3, noise_multiplier=0.0)
    victims = Victims(load_gallery("photos", size=64, limit=2), noise, seed=0, device=CPU, warn=lambda line: None)
    clients, originals = victims.decode([0, 1])
    attacks = [ATTACKS.get("patch_embedding")()]
    seen = victims.seen(subject.built, SEEN, clients, originals)
    whole = observe_groups(subject.built, seen, victims.labels(subject.built, clients), 1)
    for sent, honest in zip(victims.observe(subject.built, seen, clients, attacks, update=0), whole, strict=True):
        assert sent.gradient_norm() == pytest.approx(1e-3, rel=1e-4)
        scale = 1e-3 / honest.gradient_norm()
        for name, tensor in honest.gradients.items():
            torch.testing.assert_close(sent.gradients[name], scale * tensor, rtol=1e-4, atol=1e-9)
    undefended = victims.observe(subject.built, seen, clients, attacks)
    assert undefended[0].gradient_norm() > 1e-2
