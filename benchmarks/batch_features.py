"""Of how many images does the gradient of a classifier give the features?"""

from experiments.batch_features.options import Options
from experiments.scaffold import command

main = command("batch_features", Options, "experiments.batch_features.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
