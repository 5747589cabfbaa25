"""Segmentation with and without MJP.  Table 3 of the MJP supplement."""

from experiments.scaffold import command
from experiments.segmentation.options import Options

main = command("segmentation", Options, "experiments.segmentation.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
