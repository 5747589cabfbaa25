"""Training with and without MJP side by side (Figure 6 of the MJP paper)."""

from experiments.scaffold import command
from experiments.trainings.options import CurveOptions

main = command("training_curves", CurveOptions, "experiments.trainings.training_curves")

if __name__ == "__main__":
    raise SystemExit(main())
