"""What is rendered from the rows of MP3's tables in kind."""

from __future__ import annotations

import pandas as pd

from experiments.mp3.options import LINES
from experiments.mp3.rows import ROWS
from experiments.rendering import Rendering, csv, read_rows
from fedmjp.metrics import t_interval


def accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """Per line and seed (index) the top-1 accuracy of the trainings with labels, per cent."""
    own = rows[(rows["measure"] == "accuracy") & (rows["line"] != "")]
    return own.pivot(index="line", columns="seed", values="value").reindex([n for n in LINES if n in set(own["line"])])


def line_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a training with labels: accuracy with Student's interval over seeds, difference from `against`."""
    by_seed, lines = accuracies(rows), []
    for name, own in by_seed.iterrows():
        mean, against = t_interval(own.to_numpy()), LINES[name].against
        line = {"line": name, "seeds": mean.count}
        line |= {"accuracy_mean": mean.mean, "accuracy_low": mean.low, "accuracy_high": mean.high, "against": against}
        if against in by_seed.index:
            found = t_interval((own - by_seed.loc[against]).to_numpy())
            line |= {"difference_mean": found.mean, "difference_low": found.low, "difference_high": found.high}
        lines.append(line)
    return pd.DataFrame(lines)


MP3 = Rendering("mp3", lambda folder: {"table.csv": csv(line_table(read_rows(folder, ROWS)), 5)})
RENDERINGS = ()
