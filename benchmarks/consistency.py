"""How much does a jigsaw change a model's answer?  Tables 1 and 3, Figure 2 of the MJP paper."""

from experiments.scaffold import command
from experiments.trained_models.options import ConsistencyOptions

main = command("consistency", ConsistencyOptions, "experiments.trained_models.consistency")

if __name__ == "__main__":
    raise SystemExit(main())
