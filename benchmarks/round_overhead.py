"""What does Flower cost a round?"""

from experiments.scaffold import command
from experiments.speed.options import RoundOptions

main = command("round_overhead", RoundOptions, "experiments.speed.round_overhead")

if __name__ == "__main__":
    raise SystemExit(main())
