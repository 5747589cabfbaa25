"""Is an attack's confidence justified? Patches vouched for against patches that are right, and certified answers."""

import sys

from experiments.calibration.options import Options
from experiments.scaffold import command

main = command("calibration", Options, "experiments.calibration.protocol")

if __name__ == "__main__":
    sys.exit(main())
