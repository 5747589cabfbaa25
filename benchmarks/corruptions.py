"""Does MJP make a ViT more robust to common corruptions?  Tables 4 and 9 of the MJP paper."""

import sys

from experiments.trained_models.corruptions import main

if __name__ == "__main__":
    sys.exit(main())
