"""What does Flower cost a round?"""

import sys

from experiments.scaffold import command
from experiments.speed.options import RoundOptions

main = command("round_overhead", RoundOptions, "experiments.speed.round_overhead")

if __name__ == "__main__":
    sys.exit(main())
