"""What does Flower cost a round?"""

import sys

from experiments.speed.round_overhead import main

if __name__ == "__main__":
    sys.exit(main())
