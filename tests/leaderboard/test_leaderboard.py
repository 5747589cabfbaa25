"""The leaderboard: a plug-in defence added, verified and tampered with; its protocol; the page."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from attacks import ATTACKS, ThreatModel, UsageError
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.leaderboard import measure, page, protocol, schema
from fedmjp.leaderboard.cli import main
from fedmjp.leaderboard.images import DIGESTS, digests, fixed_images
from fedmjp.leaderboard.listing import submissions
from fedmjp.leaderboard.reidentification import lineup_of, random_crops, same_picture
from fedmjp.leaderboard.tiers import PASSIVE, PLAIN, TIERS
from fedmjp.leaderboard.verify import ROUNDINGS
from fedmjp.records.images import save_image
from fedmjp.records.rows import load_rows
from tests.conftest import photographs
from tests.leaderboard.test_submissions import rows_beside

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "toy:gamma=0.5"


@pytest.fixture(scope="module")
def toy():
    """The toy defence of tests/extension, registered for the time of these tests."""
    folder = str(ROOT / "tests" / "extension" / "toy_defense")
    sys.path.insert(0, folder)
    from toy_defense import Sparse

    DEFENSES.register("toy")(Sparse)
    yield
    sys.path.remove(folder)
    for table in (DEFENSES._sources, DEFENSES._entries):
        del table["toy"]


@pytest.fixture(scope="module")
def added(toy, tmp_path_factory) -> Path:
    """The file of the toy defence on the trial track."""
    folder = tmp_path_factory.mktemp("board")
    options = ["--track", "trial", "--results", str(folder / "results"), "--work", str(folder / "work")]
    assert main(["add", ENTRY, *options]) == 0
    return folder / "results" / "toy-gamma_0.5@trial.json"


def test_a_plugin_is_measured_and_can_be_taken_up(added: Path, capsys) -> None:
    document = schema.read(added)
    assert (document["entry"], document["comparable"]) == (ENTRY, False)
    assert document["parameters"] == {"gamma": 0.5, "rescale": False}
    assert document["defences"][0]["paper"].startswith("A defence in a package of its own")
    assert document["adaptive"] == "no adaptive attack"
    assert list(document["data"]["images"]) == list(DIGESTS)[:2]
    run = ["passive_one", "passive_several", "active_parameters", "active_architecture", "aggregate_only"]
    assert [r["tier"] for r in document["results"]] == run
    left = {n["tier"]: n["reason"] for n in document["not_covered"]}
    assert left == {"passive_auxiliary": "no attack that knows the defence makes use of auxiliary data"}
    results = {r["tier"]: r for r in document["results"]}
    lines = {line["attack"]: line for line in results["passive_one"]["attacks"]}
    assert lines["mean_image"]["guess"]
    assert lines["patch_embedding"]["count"] == 2
    assert (lines[protocol.SEARCH]["count"], lines[protocol.SEARCH]["passes"]) == (1, 2)
    active = {line["attack"]: line["count"] for line in results["active_parameters"]["attacks"]}
    batch = ("mean_image", "other_image", "fishing", "feature_fishing", "token_bins")
    assert active == dict.fromkeys(batch, 2)  # images of one client, one row of each attack
    assert not results["active_parameters"]["not_run"].keys() & active.keys()
    assert results["active_parameters"]["worst"]["images"] == 2  # photographs, not photographs times federations
    assert results["active_architecture"]["grants"][0] == "active_architecture"
    assert results["aggregate_only"]["grants"][0] == "aggregate_only"
    assert document["cost"]["bits"] == document["cost"]["bits_none"] > 0
    assert document["cost"]["peak_bytes"] >= document["cost"]["peak_bytes_none"] > 1e6
    before = added.read_bytes()
    work = added.parent.parent / "work"
    options = ["--track", "trial", "--results", str(added.parent), "--work", str(work)]
    assert main(["add", ENTRY, *options]) == 0
    assert "finished before" in capsys.readouterr().out
    assert added.read_bytes() == before


NEWER = ("token_bins", "imprint")


def test_an_older_submission_gets_what_the_protocol_has_gained(added: Path, tmp_path, capsys) -> None:
    """Without some rows the file says so; from the finished federations it becomes what it was."""
    shutil.copytree(added.parent, tmp_path / "results")
    path = tmp_path / "results" / added.name
    document = schema.read(path)
    rows = rows_beside(path, document)
    kept = [json.loads(line) for line in measure_lines(rows)]
    own = [row for row in kept if row["attack"] not in NEWER and row["tier"] != "active_architecture"]
    with_rows(document, rows, own)
    path.write_text(json.dumps(document))
    assert [one.attack for _, one, _ in protocol.missing(document)] == list(NEWER)
    reasons = {one["tier"]: one["reason"] for one in protocol.not_covered(document)}
    assert reasons["active_parameters"] == f"{protocol.LACKING} (token_bins)"
    assert reasons["active_architecture"] == protocol.LACKING
    assert page.attacked(document) == "5 of 7"
    work = added.parent.parent / "work"
    options = ["--track", "trial", "--results", str(path.parent), "--work", str(work)]
    assert main(["add", ENTRY, "--only-missing", *options]) == 0
    again, before = schema.read(path), schema.read(added)
    assert {**again, "rows": {}} == {**before, "rows": {}}
    assert again["rows"]["count"] == before["rows"]["count"]
    rows.write_bytes(rows.read_bytes() + b"\0")
    assert main(["add", ENTRY, "--only-missing", *options]) == 2
    assert "is not the file that toy-gamma_0.5@trial.json names" in capsys.readouterr().err


def test_a_slow_defence_may_be_added_tier_by_tier(added: Path, tmp_path, capsys) -> None:
    work = added.parent.parent / "work"
    options = ["--track", "trial", "--results", str(tmp_path), "--work", str(work)]
    assert main(["add", ENTRY, *options, "--tiers", "passive_one", "aggregate_only"]) == 0
    part = schema.read(tmp_path / added.name)
    assert [result["tier"] for result in part["results"]] == ["passive_one", "aggregate_only"]
    assert page.attacked(part) == "2 of 7"
    assert protocol.LACKING in {one["reason"] for one in part["not_covered"]}
    assert main(["add", ENTRY, *options, "--tiers", "passive_one"]) == 2
    assert "holds aggregate_only too: pass --only-missing" in capsys.readouterr().err
    assert main(["add", ENTRY, *options, "--only-missing"]) == 0
    whole, before = schema.read(tmp_path / added.name), schema.read(added)
    assert [whole[name] for name in ("results", "worst", "cost")] == [
        before[name] for name in ("results", "worst", "cost")
    ]


def test_verify_runs_a_tenth_again(added: Path, capsys) -> None:
    """With this seed, of the federation that `feature_fishing` prepares."""
    assert main(["verify", str(added), "--seed", "9", "--record"]) == 0
    printed = capsys.readouterr().out
    assert "again: active on parameters, vit_mini_32" in printed
    assert "2 of 48 rows run again (seed 9)" in printed
    assert schema.read(added)["rerun"]["seed"] == 9


def shift_every_row(document: dict, rows: Path) -> None:
    """Rows 3 dB lower, with figures and digest that follow from them: only a re-run notices."""
    lines = [json.loads(line) for line in measure_lines(rows)]
    for line in lines:
        line["psnr"] = None if line["psnr"] is None else line["psnr"] - 3
    with_rows(document, rows, lines)


def with_rows(document: dict, rows: Path, lines: list[dict]) -> None:
    """Write other rows, with figures and digest that follow from them."""
    write_lines(rows, lines)
    loaded = load_rows(rows, measure.ROWS)
    from fedmjp.leaderboard.submission import results_of

    not_run = {(r["tier"], r["model"]): r["not_run"] for r in document["results"]}
    document["results"] = results_of(loaded, not_run)
    worst = measure.worst_of(document["results"])
    document["worst"] = {"tier": worst["tier"], "model": worst["model"], **worst["worst"]}
    document["rows"] |= {"sha256": hashlib.sha256(rows.read_bytes()).hexdigest(), "count": len(loaded)}


def better_figure(document: dict, rows: Path) -> None:
    """A figure that does not follow from the rows."""
    document["results"][0]["attacks"][-1]["psnr_median"] -= 1


def other_worst(document: dict, rows: Path) -> None:
    """Another answer in the worst case."""
    document["worst"]["answer"] = "no leak shown"


def other_rows(document: dict, rows: Path) -> None:
    """Rows of another file."""
    rows.write_bytes(rows.read_bytes() + b"\0")


def without_a_photograph(document: dict, rows: Path) -> None:
    """No row of one photograph where one update is seen."""
    lines = [json.loads(line) for line in measure_lines(rows)]
    own = [line for line in lines if line["tier"] == "passive_one"]
    lines = [line for line in lines if line not in own or line["image_id"] != own[0]["image_id"]]
    with_rows(document, rows, lines)


def without_an_attack(document: dict, rows: Path) -> None:
    """No row of an attack that the suite chose: only a re-run notices."""
    lines = [json.loads(line) for line in measure_lines(rows)]
    with_rows(document, rows, [line for line in lines if line["attack"] != "patch_embedding"])


def measure_lines(rows: Path) -> list[str]:
    import gzip

    return gzip.decompress(rows.read_bytes()).decode().splitlines()


def write_lines(rows: Path, lines: list[dict]) -> None:
    import gzip

    rows.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0))


@pytest.mark.parametrize(
    ("tamper", "noticed"),
    [
        (better_figure, "do not follow from the rows"),
        (other_worst, "the worst case does not follow"),
        (other_rows, "is not the file of the submission"),
        (shift_every_row, "psnr is "),
        (without_a_photograph, "passive_one on vit_mini_32, mean_image: rows are missing, of client"),
        (without_an_attack, "patch_embedding: the submission lacks this row"),
    ],
)
def test_verify_notices_a_tampered_copy(
    added: Path, tmp_path, capsys, monkeypatch, tamper: Callable, noticed: str
) -> None:
    """Other numbers of threads are asked for, and not given: more than there are cores wait for one another."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    shutil.copytree(added.parent, tmp_path / "results")
    path = tmp_path / "results" / added.name
    document = schema.read(path)
    tamper(document, path.parent / document["rows"]["file"])
    path.write_text(json.dumps(document))
    # The seed chooses a federation in which the suite chose an attack that ends below 60 dB.
    assert main(["verify", str(path), "--seed", "2"]) == 1
    assert noticed in capsys.readouterr().err
    expected = {shift_every_row: [1, *ROUNDINGS], without_an_attack: [1]}
    assert list(dict.fromkeys(asked)) == expected.get(tamper, [])


@dataclass(frozen=True)
class Flattens(Defense):
    """A defence that changes shapes."""

    def on_update(self, update, generator):
        """Every tensor as one row."""
        return {name: tensor.flatten() for name, tensor in update.items()}


def test_a_defence_must_keep_names_and_shapes() -> None:
    update = {"head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)}
    with pytest.raises(UsageError, match=r"Flattens must send .* head\.weight is \(2, 3\), and .* is \(6,\)"):
        Flattens().message(update, torch.Generator(), {})
    sent, _ = Defense().message(update, torch.Generator(), {})
    assert sent.keys() == update.keys()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["add", "nonsense"], "unknown defense 'nonsense'"),
        (["add", "mjp:gam=1"], "has no setting 'gam'"),
        (["add", "mjp:gamma=2"], "must lie in [0, 1]"),
        (["add", "mjp+mjp"], "names mjp twice"),
        (["add", "../none"], "unknown defense '../none'"),
        (["add", "none", "--track", "big"], "unknown track 'big'; choose from: small, full, trial"),
        (["add", "none", "--tiers", "passive"], "unknown tier 'passive'; choose from: passive_one, passive_several"),
        (["add", "none", "--images", "nowhere"], "--images nowhere is no folder"),
        (["verify", "nowhere.json"], "no submission nowhere.json"),
        (["list", "--results", "nowhere"], "no submission in nowhere"),
        (["render", "--pages", "nowhere.md"], "nowhere.md is no page with the lines"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments: list[str], complaint: str, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert complaint in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_too_few_images_is_refused(tmp_path, capsys) -> None:
    for number, image in enumerate(photographs(32, 10)):
        path = tmp_path / "images" / f"class{number}" / "one.png"
        path.parent.mkdir(parents=True)
        save_image(image, path)
    options = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    assert main(["add", "none", "--images", str(tmp_path / "images"), *options]) == 2
    assert "gives 8 training images, and the small track needs 24" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_other_pixels_than_the_lists_are_refused(monkeypatch) -> None:
    assert fixed_images(8) == dict(list(DIGESTS.items())[:8])
    assert digests(32) == DIGESTS
    monkeypatch.setitem(DIGESTS, "coffee/train/0", "0" * 16)
    with pytest.raises(UsageError, match="coffee/train/0 has other pixels here"):
        fixed_images(8)


def test_tiers_are_nested_and_each_grants_what_its_attacks_need() -> None:
    grants = [set(tier.grants) for tier in PASSIVE]
    assert grants == sorted(grants, key=len)
    assert all(a <= b for a, b in zip(grants, grants[1:], strict=False))
    for tier in TIERS:
        named = (*tier.attacks, *([protocol.SEARCH] if tier.searched else []))
        needs = {name: tier.grants for name in named if name in ATTACKS}
        needs |= {one.attack: (*PLAIN, *one.grants) for one in tier.prepared}
        for name, granted in needs.items():
            ATTACKS.get(name)().require(ThreatModel(frozenset(granted)), name)
            assert set(granted) <= set(tier.grants)


def test_an_original_is_found_among_candidates_and_noise_is_not() -> None:
    ids = list(DIGESTS)[:4]
    originals = photographs(32, 4)
    assert ids == ["astronaut/train/0", "chelsea/train/0", "coffee/train/0", "rocket/train/0"]
    lineup = lineup_of(32, 60)
    assert lineup.ranks(originals, originals, ids) == [1, 1, 1, 1]
    assert lineup.ranks(originals, originals.roll(1, dims=0), ids) != [1, 1, 1, 1]
    noise = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert min(lineup.ranks(originals, noise, ids)) > 1


def test_crops_are_squares_of_the_photograph_and_overlap_is_by_area() -> None:
    crops = random_crops(40)
    assert len(set(crops)) == 40
    assert crops == random_crops(60)[:40]
    one = crops[0]
    left, top, right, bottom = one.box
    assert right - left == bottom - top
    side = right - left
    shifted = [one._replace(box=(left + step, top, right + step, bottom)) for step in (side // 4, side // 2)]
    assert [same_picture(one, other) for other in (one, *shifted)] == [True, True, False]  # 1, 0.6 and 0.33
    assert not same_picture(one, crops[1])


@pytest.mark.parametrize("change", ["schema", "missing", "unknown", "type"])
def test_a_file_that_is_not_of_the_schema_is_refused(added: Path, change: str) -> None:
    document = copy.deepcopy(schema.read(added))
    if change == "schema":
        document["schema"] = 0
    elif change == "missing":
        del document["results"][0]["attacks"][0]["lpips"]
    elif change == "unknown":
        document["note"] = ""
    else:
        document["cost"]["ratio"] = "1"
    with pytest.raises(UsageError):
        schema.check(document, "x.json")


def test_the_page_is_the_same_twice_and_names_every_submission(added: Path, tmp_path) -> None:
    shutil.copytree(added.parent, tmp_path / "results")
    path = tmp_path / "results" / added.name
    document = schema.read(path)
    again = {"rerun": {"share": 0.1, "seed": 3, "commit": "abc1234", "rows": 6, "undetermined": 0}}
    path.write_text(json.dumps(document | {"comparable": True, "track": "small"} | again))
    plain = document | {"comparable": True, "track": "small", "entry": "none", "name": "none", "known_by": []}
    plain |= {"rerun": None}
    (tmp_path / "results" / "none.json").write_text(json.dumps(plain))
    text = page.leaderboard(tmp_path / "results")
    assert text == page.leaderboard(tmp_path / "results")
    assert [one["entry"] for one in submissions(tmp_path / "results")] == ["none", ENTRY]
    assert text.count("\n### ") == text.count("<g data-y=") == 2
    assert "[toy, gamma 0.5](#toy-gamma-05)" in text
    assert "### toy, gamma 0.5" in text
    assert "updates of 1 of the 2 submissions was run again here" in text
    assert text.count("; 10% of its updates run again here, at commit abc1234.") == 1
    assert "**No adaptive attack:**" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    target = tmp_path / "page.md"
    target.write_text(
        "a\n<!-- leaderboard_small -->\n<!-- /leaderboard_small -->\n<!-- other -->\nkept\n<!-- /other -->\n"
    )
    assert page.render(tmp_path / "results", [target]) == [f"{target}, block leaderboard_small"]
    assert page.render(tmp_path / "results", [target]) == []
    assert "| none |" in target.read_text()
    assert "kept" in target.read_text()
