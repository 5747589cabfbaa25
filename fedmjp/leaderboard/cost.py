"""What a defence costs a client: seconds of a local step and bits of a message, beside those without a defence."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

from fedmjp.client import ClientTask
from fedmjp.config import RunConfig


def client_cost(config: RunConfig, repeats: int) -> dict[str, float]:
    """Cost of an update under the defence of `config` and under none, timed in turn on this machine.

    An update is one step on a batch and what the defence makes of its gradient; sending is not timed.

    Args:
        config: a federation that sends gradients, with one defence.
        repeats: updates of each that are timed, after one that is not.

    Returns:
        seconds_step and seconds_step_none (medians), ratio (median of the ratios of successive pairs), bits and
        bits_none of a message, repeats.
    """
    entry = config.defense[0]
    tasks = {
        "none": ClientTask(replace(config, defense=("none",)), "none"),
        entry: ClientTask(config, entry),
    }
    sent = {n: {k: v.detach().clone() for k, v in {**t.parameters, **t.buffers}.items()} for n, t in tasks.items()}
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    bits: dict[str, int] = {}
    kept: dict[str, dict] = {name: {} for name in tasks}
    for repeat in range(repeats + 1):
        for name, task in tasks.items():
            started = time.perf_counter()
            result = task.update(0, repeat + 1, sent[name], kept=kept[name])
            if repeat:  # the first update also sets up what torch keeps for later ones
                seconds[name].append(time.perf_counter() - started)
            kept[name], bits[name] = result.kept, task.defense.bits(result.tensors)
    ratios = [own / plain for own, plain in zip(seconds[entry], seconds["none"], strict=True)]
    return {
        "seconds_step": median(seconds[entry]),
        "seconds_step_none": median(seconds["none"]),
        "ratio": median(ratios),
        "bits": bits[entry],
        "bits_none": bits["none"],
        "repeats": repeats,
    }
