"""The variants of MJP one by one.  Table 2 of the MJP paper."""

from experiments.scaffold import command
from experiments.trainings.options import AblationOptions

main = command("ablation", AblationOptions, "experiments.trainings.ablation")

if __name__ == "__main__":
    raise SystemExit(main())
