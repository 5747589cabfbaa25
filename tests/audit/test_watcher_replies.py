"""What a Watcher makes of replies that differ from what was stated: exempt parameters, half precision; its page."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

from fedmjp.audit import Watcher
from fedmjp.audit.folder import AuditFolder
from fedmjp.audit.verdict import Answer
from fedmjp.federation import TapGrid
from fedmjp.federation.local_grid import LocalGrid
from tests.attacks.models import timm_vit
from tests.audit.test_user_model import HALF, own_app, watch


class WithoutDecay(torch.optim.SGD):
    """Decay in matrices alone, as timm and others group parameters."""

    def __init__(self, parameters, weight_decay: float, **options) -> None:
        own = list(parameters)
        exempt = [p for p in own if p.dim() < 2 or p.dim() == 3]  # biases, norms, class token and positions
        kept = [p for p in own if not any(p is other for other in exempt)]
        groups = [{"params": exempt, "weight_decay": 0.0}, {"params": kept, "weight_decay": weight_decay}]
        super().__init__(groups, **options)


def test_a_stated_decay_is_not_taken_from_parameters_that_were_exempt(tmp_path) -> None:
    app = own_app(rate=0.01, decay=0.05, kind=WithoutDecay)
    watcher, _ = watch(app, tmp_path, learning_rate=0.01, weight_decay=0.05, batch_size=1, local_steps=1)
    assert watcher.verdict().answer is Answer.LEAKS


def test_weights_that_were_sent_in_half_precision_round_no_reply(tmp_path) -> None:
    """The server sends float16, the client trains and returns float32."""
    torch.manual_seed(0)
    model = timm_vit()
    given = {"learning_rate": 0.01, "batch_size": 1, "local_steps": 1, "attacks": ("patch_embedding",)}
    watcher = Watcher(model, image_shape=(3, 32, 32), mean=HALF, std=HALF, out=tmp_path, **given)
    grid = TapGrid(LocalGrid(own_app(rate=0.01), 2), watcher)
    half = {name: value.half() for name, value in model.state_dict().items()}
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(half), num_rounds=1)
    assert watcher.problems == []
    assert "noise" not in watcher.findings
    assert watcher.verdict().answer is Answer.LEAKS


def test_the_page_of_a_watcher_hatches_what_is_not_vouched_for(tmp_path, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(AuditFolder, "finish", lambda self, panels, **_: shown.extend(panels))
    watcher, _ = watch(own_app(decay=0.05), tmp_path)
    (node, _, found), *_ = watcher.found
    panel = next(p for p in shown if f"node {node}," in p.title)
    assert torch.equal(panel.reconstructions["patch_embedding"].known, found.known[0])
