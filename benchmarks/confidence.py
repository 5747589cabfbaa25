"""Fit the curves of `attacks.linear.confidence` on photographs that the calibration does not score."""

import sys

from experiments.confidence.options import Options
from experiments.scaffold import command

main = command("confidence", Options, "experiments.confidence.protocol")

if __name__ == "__main__":
    sys.exit(main())
