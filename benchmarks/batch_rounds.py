"""Do small batches protect?"""

import sys

from experiments.batches.protocol import main

if __name__ == "__main__":
    sys.exit(main())
