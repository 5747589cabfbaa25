"""examples/deployment: credentials and bundle here; the whole deployment on loopback by `make deployment-test`.

That part starts a SuperLink and SuperNodes with TLS and keys and takes minutes; it runs where FEDMJP_DEPLOYMENT is set.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from fedmjp.records.failures import load_failures
from fedmjp.records.rows import load_rows

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "deployment"
BIN = Path(sys.executable).parent
NODES = 2


def credentials(folder: Path, port: int = 8000) -> subprocess.CompletedProcess:
    options = [folder, "--nodes", NODES + 1, "--host", "127.0.0.1", "--host", "localhost", "--port", port]
    command = [sys.executable, EXAMPLE / "credentials.py", *options]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)


def test_credentials(tmp_path: Path) -> None:
    assert credentials(tmp_path / "new").returncode == 0
    authority, server = (
        x509.load_pem_x509_certificate((tmp_path / "new" / f"{name}.crt").read_bytes()) for name in ("ca", "server")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    keys = [tmp_path / "new" / name for name in ("server.key", "node0", "node1", "node2")]
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert len({key.read_bytes() for key in keys}) == 4
    again = credentials(tmp_path / "new")
    assert again.returncode == 2
    assert "is not empty; pass a new folder" in again.stderr


def test_the_bundle_holds_no_code() -> None:
    """Flower drops weights from bundles, so that code in it would find none; nodes run what is installed there."""
    load_and_validate(ROOT / "pyproject.toml")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(ROOT))) as packed:
        assert set(packed.namelist()) == {"pyproject.toml", "LICENSE", ".info/CONTENT"}


def test_no_service_of_the_compose_file_is_insecure() -> None:
    services = yaml.safe_load((EXAMPLE / "compose.yml").read_text(encoding="utf-8"))["services"]
    assert set(services) == {"superlink", "node0", "node1"}
    for name, service in services.items():
        assert "--insecure" not in service["command"]
        needed = {"--enable-supernode-auth"} if name == "superlink" else {"--auth-supernode-private-key"}
        assert needed <= set(service["command"])


class Deployment:
    """A SuperLink and SuperNodes on loopback; all processes end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.processes = folder, folder / "keys", {}
        self.port, *self.node_ports = free_ports(1 + 12)
        assert credentials(self.keys, self.port).returncode == 0
        self.environment = os.environ | {
            "FLWR_HOME": str(self.keys / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def kill(self, name: str) -> None:
        """SIGKILL to the process and all that it started."""
        self.signal(name, signal.SIGKILL)
        self.processes.pop(name).wait(timeout=30)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        os.killpg(self.processes[name].pid, number)

    def link(self) -> None:
        tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        tls = [word if word.startswith("--") else str(self.keys / word) for word in tls]
        options = ["--enable-supernode-auth", "--disable-runtime-dependency-installation", "--port", str(self.port)]
        self.start("superlink", ["flower-superlink", *tls, *options, "--database", str(self.folder / "link.db")])
        wait_until(lambda: listens(self.port), 120, "the SuperLink does not listen")

    def node(self, name: str, partition: int, *, key: str | None, tls: bool = True) -> None:
        command = ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--port", str(self.node_ports.pop())]
        command += ["--root-certificates", str(self.keys / "ca.crt")] if tls else ["--insecure"]
        command += ["--auth-supernode-private-key", str(self.keys / key)] if key else []
        command += ["--max-wait-time", "600", "--node-config", f"partition-id={partition} num-partitions={NODES}"]
        self.start(name, command)

    def flwr(self, *arguments: str, timeout: float = 120) -> str:
        done = subprocess.run(
            ["flwr", *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.stdout + done.stderr

    def online(self) -> int:
        found = json.loads(self.flwr("supernode", "list", "deployment", "--format", "json"))
        return sum(node["status"] == "online" for node in found["nodes"])

    def run(self, out: Path, timeout: float = 420, **options: object) -> str:
        """What `flwr run` streams until the run has ended."""
        given = {"model": "vit_mini_32", "rounds": 2, "test_limit": 4, "budget": "1s", "defense": "none", "out": out}
        plain = {
            name: value if isinstance(value, (int, float)) else str(value) for name, value in (given | options).items()
        }
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in plain.items())
        return self.flwr("run", ".", "deployment", "--stream", "--run-config", words, timeout=timeout)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(done: Callable[[], bool], seconds: float, words: str) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, words
        time.sleep(0.5)


def rounds_done(out: Path) -> int:
    """Lines of rounds.csv after its header, one a finished round and one before the first."""
    file = out / "rounds.csv"
    return max(0, len(file.read_text(encoding="utf-8").splitlines()) - 1) if file.exists() else 0


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    found = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        found.link()
        for number in range(NODES):
            assert '"success": true' in found.flwr(
                "supernode", "register", str(found.keys / f"node{number}.pub"), "deployment", "--format", "json"
            )
            found.node(f"node{number}", number, key=f"node{number}")
        wait_until(lambda: found.online() == NODES, 180, "the registered nodes are not online")
        yield found
    finally:
        found.close()


def in_thread(work: Callable[[], str]) -> Callable[[], str]:
    """Start `work`; the function returned waits for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future.result


def begun(deployment: Deployment, out: Path, **options: object) -> Callable[[], str]:
    """Start a run and wait for its first round; the function returned waits for what it streams."""
    streamed = in_thread(lambda: deployment.run(out, **options))
    wait_until(lambda: rounds_done(out) >= 2, 240, "no round was finished")
    return streamed


whole = pytest.mark.skipif(not os.environ.get("FEDMJP_DEPLOYMENT"), reason="takes minutes: make deployment-test")


@whole
def test_nodes_without_a_registered_key_or_tls_are_refused(deployment) -> None:
    deployment.node("unregistered", 1, key=f"node{NODES}")
    deployment.node("keyless", 1, key=None)
    deployment.node("plain", 1, key="node1", tls=False)
    time.sleep(45)
    assert deployment.online() == NODES
    for name in ("unregistered", "keyless", "plain"):
        assert "ctivated" not in deployment.log(name)
        deployment.kill(name)


@whole
def test_a_run_has_trained_weights_and_no_token_in_its_records(deployment, tmp_path) -> None:
    streamed = deployment.run(tmp_path / "out")
    assert "report:" in streamed, streamed[-2000:]
    rows = load_rows(tmp_path / "out" / "rows.jsonl")
    assert set(rows["weights"]) == {"shipped vit_mini_32.safetensors (head random)"}
    assert not set(rows["commit"]) & {"unknown"}
    for file in ("run.json", "report.html"):
        text = (tmp_path / "out" / file).read_text(encoding="utf-8")
        assert set(re.findall(r"--token (\S+)", html.unescape(text))) <= {"'***'"}


@whole
def test_a_killed_node_is_named_then_left_out_then_taken_back(deployment, tmp_path) -> None:
    """Three runs: it stops by the client's name, goes on without it, and has it again."""
    out = tmp_path / "stops"
    streamed = begun(deployment, out, rounds=50, round_timeout=90)
    deployment.kill("node1")
    assert re.search(r"round \d+: client 1 (sent no reply|failed)", streamed())
    out = tmp_path / "goes_on"
    deployment.node("node1", 1, key="node1")
    wait_until(lambda: deployment.online() == NODES, 180, "the killed node is not online again")
    streamed = begun(deployment, out, rounds=4, round_timeout=90, least_share=0.5)
    deployment.kill("node1")
    assert "report:" in streamed()
    assert "client 1" in (out / "report.html").read_text(encoding="utf-8")
    deployment.node("node1", 1, key="node1")
    wait_until(lambda: deployment.online() == NODES, 180, "the killed node is not online again")


@whole
def test_a_slow_node_is_waited_for_and_then_left_out(deployment, tmp_path) -> None:
    """One run waits for a node that stands still for 20 s, one with a shorter timeout goes on without it."""
    out = tmp_path / "waits"
    streamed = begun(deployment, out, rounds=4, round_timeout=300)
    deployment.signal("node1", signal.SIGSTOP)
    time.sleep(20)
    deployment.signal("node1", signal.SIGCONT)
    assert "report:" in streamed()
    assert load_failures(out) == []
    out = tmp_path / "goes_on"
    streamed = begun(deployment, out, rounds=4, round_timeout=25, least_share=0.5)
    deployment.signal("node1", signal.SIGSTOP)
    try:
        assert "report:" in streamed()
    finally:
        deployment.signal("node1", signal.SIGCONT)
    assert {failure["client"] for failure in load_failures(out)} == {1}
    wait_until(lambda: deployment.online() == NODES, 180, "the slow node is not online again")


@whole
def test_a_run_is_resumed_after_the_superlink_was_killed(deployment, tmp_path) -> None:
    out = tmp_path / "out"
    streamed = begun(deployment, out, rounds=4)
    deployment.kill("superlink")
    streamed()
    done = rounds_done(out)
    assert not (out / "report.html").exists()
    deployment.link()
    wait_until(lambda: deployment.online() == NODES, 180, "the nodes did not come back to the restarted SuperLink")
    assert "report:" in deployment.run(out, rounds=4, resume=True)
    rows = load_rows(out / "rows.jsonl")
    assert done >= 2
    assert rounds_done(out) == 5
    assert not rows.duplicated(["round", "client", "image_id", "attack"]).any()
    assert sorted(rows["round"].unique()) == [1, 2, 3, 4]
