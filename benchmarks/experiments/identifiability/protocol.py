"""What updates of few numbers determine of their images; the protocol stands in `options.Options`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.console import Console

from experiments.identifiability.information import derivatives, determined
from experiments.identifiability.options import Options
from experiments.identifiability.render import IDENTIFIABILITY, SCHEMA
from experiments.session import Session, TableRun
from experiments.withheld.groups import without
from fedmjp.audit.per_image import observe_groups
from fedmjp.audit.victims import Setting, Victims
from fedmjp.defenses import DEFENSES
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import RowLog

PLAIN = Setting("plain", defended=False, hidden=False, against="original")


def run(options: Options, console: Console) -> None:
    """Compute, then write the table."""
    Run(options, console)()


class Run(TableRun):
    """One call of the benchmark."""

    program, rendering = "identifiability", IDENTIFIABILITY

    def start(self, options: Options, console: Console) -> Session:
        """See `TableRun.start`: rows of what is determined."""
        return Session(options, console, SCHEMA)

    def attack(self, rows: RowLog) -> str:
        """See `TableRun.attack`: nothing is attacked here."""
        o = self.options
        classes = classes_of(o.model, o.weights) or IMAGENET_CLASSES
        built = build_model(o.model, num_classes=classes, weights=o.weights, seed=o.seed, image_size=o.image_size)
        built.module.to(self.session.device).eval()
        gallery = self.session.gallery(o.images, size=built.image_size, limit=o.num_images, path=o.data_path)
        device, say = self.session.device, self.session.say
        victims = Victims(gallery, DEFENSES.get("none")(), seed=o.seed, device=device, warn=say)
        case = {
            "dataset": gallery.name,
            "model": built.sized_name,
            "weights": built.provenance,
            "seed": o.seed,
        }
        with self.session.bar() as bar:
            task = bar.add_task(f"{built.name}, {built.provenance}", total=len(victims))
            for client in range(len(victims)):
                ids = victims.ids(client)
                missing = [group for group in o.withheld() if not rows.done(case | {"withheld": group}, ids)]
                for group, answer in self.answers(built, victims, client, missing).items():
                    rows.append({**self.session.columns, **case, "withheld": group, "image_id": ids[0], **answer})
                bar.advance(task)
        return gallery.provenance

    def answers(
        self, built: BuiltModel, victims: Victims, client: int, groups: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        """What each group leaves determined of one client's image; the derivatives are computed once."""
        clients, originals = victims.decode([client] if groups else [])
        if not clients:
            return {}
        seen = victims.seen(built, PLAIN, clients, originals)
        view = observe_groups(built, seen, victims.labels(built, clients), 1)[0]
        started = time.process_time()
        left = {group: without(view, group).gradients for group in groups}
        sent = {name: gradient for gradients in left.values() for name, gradient in gradients.items()}
        columns = derivatives(replace(view, gradients=sent), originals)
        found = {group: determined({n: columns[n] for n in names}, originals) for group, names in left.items()}
        seconds = (time.process_time() - started) / len(found)
        return {group: {**asdict(answer), "seconds": seconds} for group, answer in found.items()}
