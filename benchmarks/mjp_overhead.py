"""What does MJP cost a training step?"""

import sys

from experiments.speed.mjp_overhead import main

if __name__ == "__main__":
    sys.exit(main())
