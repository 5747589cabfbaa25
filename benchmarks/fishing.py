"""What does a server get out of a large batch if it chooses the parameters that it sends?"""

from experiments.fishing.options import Options
from experiments.scaffold import command

main = command("fishing", Options, "experiments.fishing.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
