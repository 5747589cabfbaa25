"""The server: Flower's FedAvg, and one line for the audit."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedmjp.audit import Watcher
from fedmjp.federation import TapGrid
from photo_vit.task import MEAN, STD, build_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, model = context.run_config, build_model()
    settings = {"learning_rate": config["learning-rate"], "batch_size": config["batch-size"]}
    settings |= {"local_steps": config["local-steps"], "mean": MEAN, "std": STD, "out": config["out"]}
    grid = TapGrid(grid, Watcher(model, image_shape=(3, 32, 32), **settings))  # the line that audits
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(model.state_dict()), num_rounds=config["rounds"])
