"""How fast is the leakage benchmark?"""

import sys

from experiments.speed.leakage_speed import main

if __name__ == "__main__":
    sys.exit(main())
