"""Do small batches protect?"""

from experiments.batches.options import Options
from experiments.scaffold import command

main = command("batch_rounds", Options, "experiments.batches.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
