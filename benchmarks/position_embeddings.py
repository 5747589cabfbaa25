"""What do position embeddings learn?  Tables 7 and 8, Figures 1, 3 and 7 of the MJP paper."""

import sys

from experiments.trained_models.position_embeddings import main

if __name__ == "__main__":
    sys.exit(main())
