"""MJP trained with different masking ratios.  Table 3 and Figure 2 (c) of the MJP paper."""

from experiments.scaffold import command
from experiments.trainings.options import RatioOptions

main = command("masking_ratio", RatioOptions, "experiments.trainings.masking_ratio")

if __name__ == "__main__":
    raise SystemExit(main())
