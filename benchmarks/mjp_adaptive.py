"""What does MJP hide from an adversary that knows it?"""

from experiments.adaptive.options import Options
from experiments.scaffold import command

main = command("mjp_adaptive", Options, "experiments.adaptive.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
