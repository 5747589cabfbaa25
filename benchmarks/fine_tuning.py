"""A trained ViT fine-tuned with and without MJP.  Tables 1 to 3 of the MJP paper on a model with something to lose."""

from experiments.scaffold import command
from experiments.trainings.options import FineTuningOptions

main = command("fine_tuning", FineTuningOptions, "experiments.trainings.fine_tuning")

if __name__ == "__main__":
    raise SystemExit(main())
