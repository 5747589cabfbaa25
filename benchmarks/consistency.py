"""How much does a jigsaw change a model's answer?  Tables 1 and 3, Figure 2 of the MJP paper."""

import sys

from experiments.trained_models.consistency import main

if __name__ == "__main__":
    sys.exit(main())
