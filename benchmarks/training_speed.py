"""How fast is training beside a bare timm loop?"""

from experiments.scaffold import command
from experiments.speed.options import TrainingSpeedOptions

main = command("training_speed", TrainingSpeedOptions, "experiments.speed.training_speed")

if __name__ == "__main__":
    raise SystemExit(main())
