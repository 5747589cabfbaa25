"""Training with and without MJP side by side (Figure 6 of the MJP paper)."""

import sys

from experiments.trainings.training_curves import main

if __name__ == "__main__":
    sys.exit(main())
