"""What does a defence cost in accuracy, and what does it buy in privacy?"""

import sys

from experiments.tradeoff.protocol import main

if __name__ == "__main__":
    sys.exit(main())
