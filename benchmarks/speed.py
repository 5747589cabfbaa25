"""How fast is the leakage benchmark?"""

from experiments.scaffold import command
from experiments.speed.options import SpeedOptions

main = command("speed", SpeedOptions, "experiments.speed.speed")

if __name__ == "__main__":
    raise SystemExit(main())
