"""The federated system, and the only room that imports Flower.

Raises on import:
    MissingExtra: Flower is not installed.
"""

from fedmjp.errors import ClientFailure, needs_extra

with needs_extra("federation", "a federation"):
    import flwr  # noqa: F401

from fedmjp.federation.active_server import ActiveServer
from fedmjp.federation.client_app import app as client_app
from fedmjp.federation.client_app import build_client_app
from fedmjp.federation.engines import ENGINES
from fedmjp.federation.received_check import ReceivedCheck, of_model
from fedmjp.federation.server_app import ServerView, run_rounds, server_app_for
from fedmjp.federation.tap import TapGrid

__all__ = [
    "ENGINES",
    "ActiveServer",
    "ClientFailure",
    "ReceivedCheck",
    "ServerView",
    "TapGrid",
    "build_client_app",
    "client_app",
    "of_model",
    "run_rounds",
    "server_app_for",
]
