"""How far does gradient matching get on Vision Transformers?"""

import sys

from experiments.matching.protocol import main

if __name__ == "__main__":
    sys.exit(main())
