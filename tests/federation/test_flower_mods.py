"""What the tap sees under Flower's own mods: the clipped or noised weights, by formulas written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower

from fedmjp.federation import TapGrid
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.federation.tap import WrappedGrid

SENT, STEP = np.zeros(20_000, np.float32), np.full(20_000, 0.05, np.float32)  # a step of norm 7.07


class Collected(WrappedGrid):
    """Gives replies as a list, as Flower's own grids do."""

    def send_and_receive(self, messages, *, timeout=None) -> list[Message]:
        return list(self._grid.send_and_receive(messages, timeout=timeout))


def seen_by_the_tap(mod, wrapper) -> list[np.ndarray]:
    """What two clients return in one round of the wrapped FedAvg, as the observer gets it."""
    app, seen = ClientApp(mods=[mod]), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        """A step that is the same for every client."""
        (weights,) = message.content["arrays"].to_numpy_ndarrays()
        arrays = ArrayRecord({"w": Array(weights - STEP)})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    grid = TapGrid(Collected(LocalGrid(app, 2)), lambda sent, received, node: seen.append(received))
    wrapper(flower.FedAvg(fraction_evaluate=0.0)).start(grid, ArrayRecord({"w": Array(SENT)}), num_rounds=1)
    return [record["arrays"].to_numpy_ndarrays()[0] for record in seen]


@pytest.mark.parametrize(
    ("mod", "wrapper"),
    [
        (fixedclipping_mod, lambda fed: flower.DifferentialPrivacyClientSideFixedClipping(fed, 0.1, 2.0, 2)),
        (
            adaptiveclipping_mod,
            lambda fed: flower.DifferentialPrivacyClientSideAdaptiveClipping(fed, 0.1, 2, initial_clipping_norm=2.0),
        ),
    ],
)
def test_central_mods_send_the_clipped_step_without_noise(mod, wrapper) -> None:
    """The direction is untouched, which is all that closed forms read; strategies that read replies twice work."""
    replies = seen_by_the_tap(mod, wrapper)
    assert len(replies) == 2
    for weights in replies:
        np.testing.assert_allclose(SENT - weights, STEP * 2.0 / np.linalg.norm(STEP), rtol=1e-5)


def test_local_noise_has_the_documented_deviation() -> None:
    """sensitivity sqrt(2 ln(1.25 / delta)) / epsilon on every weight, whatever the learning rate."""
    replies = seen_by_the_tap(LocalDpMod(100.0, 1.0, 50.0, 1e-5), lambda fed: fed)
    noise = np.concatenate([weights - (SENT - STEP) for weights in replies])
    assert noise.std() == pytest.approx((2 * np.log(1.25 / 1e-5)) ** 0.5 / 50, rel=0.03)
    assert abs(noise.mean()) < 4 * noise.std() / len(noise) ** 0.5


def test_the_tap_streams_where_its_grid_does() -> None:
    grid = TapGrid(LocalGrid(ClientApp(), 2), lambda sent, received, node: None)
    assert not isinstance(grid.send_and_receive([]), list)
    assert isinstance(TapGrid(Collected(LocalGrid(ClientApp(), 2)), print).send_and_receive([]), list)
