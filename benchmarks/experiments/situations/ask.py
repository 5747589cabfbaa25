"""Run the situations named on the command line, and print a line of JSON for each: [name, kind, words, CPU seconds].

Runs in a process of its own, with the version that answers first on the path.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import warnings

SECONDS, BYTES = 120, 12 * 2**30  # what one situation may take

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
warnings.filterwarnings("ignore")


def main() -> None:
    """Answer to each name in turn; a situation that takes too long ends the process."""
    from experiments.situations.answers import answer_of
    from experiments.situations.cases import CASES

    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    for name in sys.argv[1:]:
        signal.alarm(SECONDS)
        before = sum(os.times()[:4])
        answer = answer_of(CASES[name][1])
        signal.alarm(0)
        print(json.dumps([name, answer.kind, answer.words, round(sum(os.times()[:4]) - before, 2)]), flush=True)


if __name__ == "__main__":
    main()
