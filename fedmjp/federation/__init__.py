"""The federated system, and the only room that imports Flower."""

from fedmjp.federation.client_app import app as client_app
from fedmjp.federation.engines import ENGINES
from fedmjp.federation.server_app import ServerView, run_rounds, server_app_for
from fedmjp.federation.strategy import ClientFailure
from fedmjp.federation.tap import TapGrid

__all__ = ["ENGINES", "ClientFailure", "ServerView", "TapGrid", "client_app", "run_rounds", "server_app_for"]
