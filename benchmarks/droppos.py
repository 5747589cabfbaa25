"""Which positions does DropPos reconstruct?"""

from experiments.pretraining.options import DropPosOptions
from experiments.scaffold import command

main = command("droppos", DropPosOptions, "experiments.pretraining.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
