"""The client: some steps of SGD, then its weights; nothing in it knows of the audit."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from photo_vit.task import MEAN, STD, build_model, load_batch

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    config, node = context.run_config, context.node_config
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = SGD(model.parameters(), lr=config["learning-rate"])
    images, labels = load_batch(node["partition-id"], node["num-partitions"], config["batch-size"])
    for _ in range(config["local-steps"]):
        optimiser.zero_grad()
        loss = cross_entropy(model((images - MEAN[0]) / STD[0]), labels)
        loss.backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(images), "loss": loss.item()})
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(reply), reply_to=message)
