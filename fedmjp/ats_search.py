"""python -m fedmjp.ats_search: search transformation policies for --defense ats.

What computes is imported after the options are read and checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attacks.registry import UsageError
from fedmjp.cli import guarded, parse, terminal
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.data.catalog import IMAGES, require_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedmjp.defenses.policy_search import ScoredPolicy


@dataclass(frozen=True)
class SearchConfig:
    """Score random transformation policies by the similarity of gradients and by an untrained model's correlations.

    The policies of the least similarity whose accuracy score is high enough are for --ats-policy, joined by +.
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig("vit_mini_64"))
    data: DataConfig = field(default_factory=DataConfig)
    policies: int = 20
    """Policies to draw (paper: 1,500)."""
    attacked: int = 4
    """Training images of the privacy score, each 22 gradients a policy (released code: 500)."""
    correlated: int = 24
    """Training images of the accuracy score (released code: 10 times 100)."""
    least_accuracy: float = float("-inf")
    """Least accuracy score of the policies that are listed; it grows with the number of images (paper: -85 for 100)."""
    best: int = 3
    """Policies to list."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    seed: int = 0
    """Fixes the images, the policies, the noise and the untrained weights."""

    def validate(self) -> None:
        """Check the options.

        Raises:
            UsageError: one line that names the option.
        """
        for option in ("policies", "attacked", "correlated", "best"):
            if getattr(self, option) < 1:
                raise UsageError(f"--{option} must be at least 1, not {getattr(self, option)}")
        if self.correlated < max(2, self.attacked):
            raise UsageError(f"--correlated must be at least 2 and --attacked, not {self.correlated}")
        require_kind(self.data.data, IMAGES, "a transformation policy")


def search(config: SearchConfig, on_policy: Callable[[ScoredPolicy], None]) -> list[ScoredPolicy]:
    """The best policies, the one of least privacy score first.

    Raises:
        UsageError: data, weights or device that cannot be used, fewer images than asked for, or no policy that reaches
            --least-accuracy.
    """
    import torch

    from fedmjp.client import shared_data
    from fedmjp.defenses.policy_search import random_policies, score_policies
    from fedmjp.devices import usable_device, use_threads
    from fedmjp.models import MODELS, build_model, split_name

    device = usable_device(config.device)
    use_threads(0)
    spec = MODELS.get(split_name(config.model.model)[0])
    if spec.speech:
        raise UsageError(f"a transformation policy is for models of images, not {config.model.model}")
    data = shared_data(config.data, spec.image_size, config.seed)
    data.require_labels("fedmjp.ats_search")
    if len(data.train) < config.correlated:
        raise UsageError(f"--correlated {config.correlated} exceeds the {len(data.train)} training images")
    indices = list(range(config.correlated))
    models = [
        build_model(config.model.model, num_classes=len(data.classes), weights=weights, seed=config.seed)
        for weights in (config.model.weights, "random")
    ]
    for model in models:
        model.module.to(device).eval()
    policies = random_policies(config.policies, torch.Generator().manual_seed(config.seed))
    images, labels = data.train.images(indices).to(device), data.train.labels[indices].to(device)
    found = score_policies(policies, *models, images, labels, config.attacked, config.seed, on_policy)
    kept = [scored for scored in found if scored.accuracy >= config.least_accuracy]
    if not kept:
        highest = max(scored.accuracy for scored in found)
        raise UsageError(f"no policy has an accuracy score of {config.least_accuracy}; the highest is {highest:.4g}")
    return sorted(kept, key=lambda scored: scored.privacy)[: config.best]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    config = parse(SearchConfig, "python -m fedmjp.ats_search", SearchConfig.__doc__, arguments)
    console = terminal()

    def show(scored: ScoredPolicy) -> None:
        """A line for each policy as it is scored."""
        console.print(
            f"{scored.policy}: privacy score {scored.privacy:.4f}, accuracy score {scored.accuracy:.4g}",
            highlight=False,
        )

    def work() -> None:
        """Search, and print the best policies as an option."""
        config.validate()
        best = search(config, show)
        console.print(f"--ats-policy {'+'.join(scored.policy for scored in best)}", highlight=False)

    return guarded(work, lambda: "nothing is written")


if __name__ == "__main__":
    sys.exit(main())
