"""What does MJP hide from an adversary that knows it?"""

import sys

from experiments.adaptive.protocol import main

if __name__ == "__main__":
    sys.exit(main())
