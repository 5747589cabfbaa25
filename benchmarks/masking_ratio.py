"""MJP trained with different masking ratios.  Table 3 and Figure 2 (c) of the MJP paper."""

import sys

from experiments.trainings.masking_ratio import main

if __name__ == "__main__":
    sys.exit(main())
