"""What an objective keeps beside the model over rounds: on each client, or on the server for all."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from attacks.registry import UsageError
from fedmjp import simulate
from fedmjp.before_start import check_resumable
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.federation import ENGINES, run_rounds
from fedmjp.objectives.distillation import Teacher, momentum_at
from tests.federation.conftest import changed, stop_in_round

MST = "mst:outputs=6,hidden=5,bottleneck=4,local_crops=1,momentum=0.5,teacher={}"


def federation(small: RunConfig, teacher: str, **options) -> RunConfig:
    return changed(small, model="vit_micro_32", weights="random", objective=MST.format(teacher), **options)


def follow(config: RunConfig, engine: str = "local"):
    """(state by round, what the server kept by round) of a run."""
    states, kept = {}, {}

    def note(number, state) -> None:
        parts = (state.weights, state.kept)
        states[number], kept[number] = ({n: t.clone() for n, t in part.items()} for part in parts)

    def run(grid) -> None:
        run_rounds(grid, ClientTask(config, "none"), "none", on_update=lambda view: None, on_round=note)

    ENGINES.get(engine)(run, config.federation.clients, config.client_entropy())
    return states, kept


@pytest.fixture
def received(monkeypatch) -> dict:
    """(client, round) -> (kept that the client was given, weights that it was given, kept that it returned)."""
    found, update = {}, ClientTask.update

    def noted(self, client, round, weights, source=None, kept=None):
        before = None if kept is None else {n: t.clone() for n, t in kept.items()}
        given = {n: t.clone() for n, t in weights.items()}
        result = update(self, client, round, weights, source, kept)
        found[client, round] = before, given, result.kept
        return result

    monkeypatch.setattr(ClientTask, "update", noted)
    return found


def mixed(teacher: dict, student: dict, momentum: float) -> dict:
    """The moving average in float64, by the teacher's names."""
    names = {n: n.removeprefix("network.").replace("pretext.", "pretext.projection.") for n in teacher}
    return {n: momentum * t.double() + (1 - momentum) * student[names[n]].double() for n, t in teacher.items()}


def assert_close(found: dict, wanted: dict) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("update", ["gradient", "weights"])
def test_the_servers_teacher_follows_the_global_weights(small, received, update: str) -> None:
    config = federation(small, "server", update=update, rounds=3, learning_rate=0.5)
    states, kept = follow(config)
    first = {n: t.clone() for n, t in Teacher(ClientTask(config, "none").model.module).state_dict().items()}
    assert_close(kept[0], first)
    for number in (1, 2, 3):
        assert_close(kept[number], mixed(kept[number - 1], states[number], momentum_at(0.5, (number - 1) / 3)))
        assert any((kept[number][n] - t).abs().max() > 1e-5 for n, t in kept[number - 1].items())
        for client in range(3):
            before, _, after = received[client, number]
            assert_close(before, kept[number - 1])  # sent, and the same for all
            assert after == {}  # and not returned


def test_a_clients_teacher_follows_the_weights_it_is_sent(small, received) -> None:
    """With gradients, the client takes no step of its own: the server's is the teacher's."""
    _, kept = follow(federation(small, "client", rounds=2, learning_rate=0.5))
    assert set(map(len, kept.values())) == {0}
    for client in range(3):
        (none, first, began), (before, second, after) = received[client, 1], received[client, 2]
        assert none is None
        assert_close(began, mixed(began, first, 0.5))  # equal to the weights that it was sent first
        assert_close(before, began)
        assert_close(after, mixed(before, second, momentum_at(0.5, 0.5)))


def test_a_clients_teacher_follows_its_own_steps(small, received) -> None:
    follow(federation(small, "client", rounds=2, learning_rate=0.5, update="weights", local_steps=2, batch_size=2))
    teachers = [received[client, 2][2] for client in range(3)]
    assert any((teachers[0][n] - t).abs().max() > 1e-6 for n, t in teachers[1].items())
    for client in range(3):
        assert_close(received[client, 2][0], received[client, 1][2])


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.parametrize("teacher", ["client", "server"])
def test_ray_gives_identical_states(small, teacher: str) -> None:
    config = federation(small, teacher)
    (here, ours), (there, theirs) = follow(config), follow(config, "ray")
    assert all(torch.equal(here[2][n], there[2][n]) for n in here[2])
    assert all(torch.equal(ours[2][n], theirs[2][n]) for n in ours[2])


def command(out, teacher: str, *options: str) -> int:
    """Exit code of a run of three rounds."""
    given = ["--model", "vit_micro_32", "--weights", "random", "--clients", "2", "--rounds", "3", "--test-limit", "8"]
    given += ["--objective", MST.format(teacher), "--attacks", "patch_embedding", "--audit-clients", "0"]
    return simulate.main([*given, "--out", str(out), *options])


def interrupted(out, teacher: str, monkeypatch, *options: str) -> None:
    """A run that stops in its third round."""
    with monkeypatch.context() as patch:
        stop_in_round(3, patch)
        assert command(out, teacher, *options) == 130


def rounds_of(out) -> list[list[str]]:
    """Lines of rounds.csv without the seconds."""
    return [line.split(",")[:-1] for line in (out / "rounds.csv").read_text().splitlines()]


def rows_of(out) -> list[dict]:
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


FEEDBACK = ("--objective", "supervised", "--defense", "topk:topk_feedback=true")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("teacher", "options"),
    [
        ("server", ()),
        ("client", ("--audit-clients", "1")),
        ("client", ("--update", "weights")),
        ("client", FEEDBACK),
        ("client", (*FEEDBACK, "--clients", "3", "--clients-per-round", "2")),
    ],
)
def test_an_interrupted_run_goes_on_with_what_was_kept(tmp_path, monkeypatch, teacher: str, options) -> None:
    """Client 0 has finished the round that is run again: what it kept after it is dropped."""
    assert command(tmp_path / "whole", teacher, *options) == 0
    interrupted(tmp_path / "run", teacher, monkeypatch, *options)
    assert command(tmp_path / "run", teacher, *options, "--resume") == 0
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert rounds_of(tmp_path / "run") == rounds_of(tmp_path / "whole")
    assert not (tmp_path / "run" / "state").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_client_without_what_it_kept_does_not_go_on(tmp_path, monkeypatch, capsys) -> None:
    interrupted(tmp_path / "run", "client", monkeypatch, *FEEDBACK)
    (places,) = (tmp_path / "run" / "state").glob("*_clients")
    (arrays,) = json.loads((places / "1-2.json").read_text())["records"].values()
    array = places / next(iter(arrays.values()))[-1]
    whole = array.read_bytes()
    for content, words in ((whole[:-1] + b"x", "is damaged: it is not as it was written"), (None, "cannot be read")):
        array.unlink() if content is None else array.write_bytes(content)
        capsys.readouterr()
        assert command(tmp_path / "run", "client", *FEEDBACK, "--resume") == 2
        printed = capsys.readouterr().err.strip()
        assert f"{array} {words}" in printed
        assert "start it again in another --out" in printed
        assert printed.count("\n") == 0


def test_a_folder_without_what_clients_keep_is_refused(small) -> None:
    """Nodes keep it in memory, which ends with the run."""
    task = ClientTask(changed(small), "topk:topk_feedback=true")
    with pytest.raises(
        UsageError, match="round 3 needs what each client keeps under --defense topk:topk_feedback=true"
    ):
        check_resumable(task, "topk:topk_feedback=true", 3, simulated=False)
    check_resumable(task, "topk:topk_feedback=true", 3, kept=True, simulated=True)


@pytest.mark.usefixtures("undrawn")
def test_what_clients_keep_stays_in_its_federation(tmp_path) -> None:
    """The second defence of a run starts as it does alone: with no residuals of the first one."""
    one, two = (f"topk:topk_feedback=true,topk_share={share}" for share in (0.01, 0.02))
    given = ("--objective", "supervised", "--model", "vit_micro_32", "--attacks", "patch_embedding")
    assert command(tmp_path / "both", "client", *given, "--defense", one, two) == 0
    assert command(tmp_path / "alone", "client", *given, "--defense", two) == 0
    both, alone = (
        {(row["client"], row["round"], row["attack"]): (row["gradient_norm"], row["psnr"]) for row in rows}
        for rows in (
            [row for row in rows_of(tmp_path / "both") if row["defense_parameters"]["topk_share"] == 0.02],
            rows_of(tmp_path / "alone"),
        )
    )
    assert both == alone
    assert both


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("options", [("--refuse-suspicious",), ()])
def test_models_of_another_shape_follow_each_other(tmp_path, options: tuple[str, ...]) -> None:
    """Neither the teacher that clients keep nor the weights that they compare with are those of the first defence."""
    whole = MST.format("client").replace("local_crops=1", "local_crops=0")  # which a jigsaw can move
    given = ("--attacks", "patch_embedding", "--defense", "none", "mjp:dal=none", "--objective", whole, *options)
    given += ("--learning-rate", "0.001")  # at which no client refuses an honest server
    assert command(tmp_path / "run", "client", *given) == 0
