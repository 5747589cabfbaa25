"""What a defence costs a client: seconds and memory of a local step and bits of a message, beside those without one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from torch.profiler import ProfilerActivity, profile

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
        bits_none of a message, peak_bytes and peak_bytes_none (`peak_bytes` of an update), repeats.
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
    peaks = {
        name: peak_bytes(lambda task=task, name=name: task.update(0, repeats + 2, sent[name], kept=kept[name]))
        for name, task in tasks.items()
    }
    ratios = [own / plain for own, plain in zip(seconds[entry], seconds["none"], strict=True)]
    return {
        "seconds_step": median(seconds[entry]),
        "seconds_step_none": median(seconds["none"]),
        "ratio": median(ratios),
        "bits": bits[entry],
        "bits_none": bits["none"],
        "peak_bytes": peaks[entry],
        "peak_bytes_none": peaks["none"],
        "repeats": repeats,
    }


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes of tensors on the CPU that `work` holds at most, of those that it allocates itself.

    Counted from torch's own allocations and not from the process, so that it is the same in every run. What was there
    before (model, images) does not count.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's lines of progress
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
