"""The images behind an update, which the auditor of a simulation knows and the server does not."""

from __future__ import annotations

import torch
from torch import Tensor

from fedmjp.audit.aggregate import SeenUpdate
from fedmjp.audit.guesses import guesses_beside, without_copies
from fedmjp.client import Batch, ClientTask
from fedmjp.metrics.baselines import MEAN_IMAGE, mean_image
from fedmjp.records.rows import BASELINES

BASELINE_IMAGES = 128  # training images behind the mean image


class Originals:
    """What answers about updates are compared with.

    Args:
        task: of the federation, with what its clients draw from.
        simulated: whether they draw from it; if not, nothing but the number of images is known.

    Attributes:
        mean_image: (1, C, H, W), the mean of training images; of a training set of one image, that of other
            photographs (`single`).

    Raises:
        UsageError: see `guesses_beside`.
    """

    def __init__(self, task: ClientTask, simulated: bool) -> None:
        self.task, self.simulated, train = task, simulated, task.data.train
        self.single = len(train) == 1
        some = list(range(0, len(train), max(1, len(train) // BASELINE_IMAGES)))[:BASELINE_IMAGES]
        images = train.images(some)
        found = guesses_beside(images)[MEAN_IMAGE] if self.single else mean_image(images)
        self.mean_image = found.to(task.device)

    def ids(self, view: SeenUpdate) -> list[str]:
        """Names of the images of an update, view by view; numbers where only the clients know which ones they drew."""
        views, size = self.task.learner.objective.whole_views, self.task.config.federation.batch_size
        if not self.simulated:
            return [f"image {index}" for index in range(len(view.members) * size * views)]
        return [i for member in view.members for i in self.task.batch_ids(member, view.round, 0)] * views

    def labels(self, view: SeenUpdate) -> Tensor:
        """(B * local steps,) int64 of the batches of all local steps, one step after the other, of all members."""
        places = [(member, step) for step in range(self.task.steps(view.client)) for member in view.members]
        own = self.task.data.train.labels
        return torch.cat([own[self.task.indices(member, view.round, step)] for member, step in places])

    def batch(self, view: SeenUpdate) -> tuple[Batch, Tensor]:
        """The first local step's batch of all members together, and their images as the models saw them."""
        # A mask may follow from the weights that the clients were sent; an active server may send more layers.
        known = self.task.parameters | self.task.buffers
        self.task.load({name: tensor for name, tensor in view.sent.items() if name in known})
        # Local steps after the first see other images; an attack on a summed update is scored on the first step's.
        own = [self.task.batch(member, view.round, 0) for member in view.members]
        pairs = zip(own, view.members, strict=True)
        seen = torch.cat([self.task.seen(batch, member, view.round, 0).images for batch, member in pairs])
        if len(own) == 1:
            return own[0], seen
        images, labels, targets = (torch.cat([getattr(b, n) for b in own]) for n in ("images", "labels", "targets"))
        return Batch(images, labels, tuple(i for batch in own for i in batch.ids), targets), seen

    def guesses(self, view: SeenUpdate, originals: Tensor) -> dict[str, Tensor]:
        """The two guesses for `originals` that need no gradient, (B, C, H, W) each."""
        test, size = self.task.data.test, len(originals)
        others = [(view.round * 101 + view.client * 7 + i) % len(test) for i in range(size)]
        other = without_copies(test.images(others).to(self.mean_image), originals.to(self.mean_image))
        mean = without_copies(self.mean_image.expand(size, -1, -1, -1), originals.to(self.mean_image), guess=MEAN_IMAGE)
        return dict(zip(BASELINES, (mean, other), strict=True))
