"""What does pre-training with MST give?"""

from experiments.pretraining.mst_options import MSTOptions
from experiments.scaffold import command

main = command("mst", MSTOptions, "experiments.pretraining.mst_protocol")

if __name__ == "__main__":
    raise SystemExit(main())
