"""Are models without position embeddings easier to attack?"""

import sys

from experiments.leakage.position_claim import main

if __name__ == "__main__":
    sys.exit(main())
