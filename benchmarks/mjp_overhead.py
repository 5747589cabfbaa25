"""What does MJP cost a training step?"""

from experiments.scaffold import command
from experiments.speed.options import StepOptions

main = command("mjp_overhead", StepOptions, "experiments.speed.mjp_overhead")

if __name__ == "__main__":
    raise SystemExit(main())
