"""Is MJP's attention "more diverse and content-aware"?  Figure 4 of the MJP paper, with numbers."""

import sys

from experiments.trained_models.attention_maps import main

if __name__ == "__main__":
    sys.exit(main())
