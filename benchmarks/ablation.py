"""The variants of MJP one by one.  Table 2 of the MJP paper."""

import sys

from experiments.trainings.ablation import main

if __name__ == "__main__":
    sys.exit(main())
