"""Reproduce the leakage table of the MJP paper (Table 5), on the paper's own block and on the one people train."""

import sys

from experiments.leakage.protocol import main

if __name__ == "__main__":
    sys.exit(main())
