"""What does one update show of the patches whose positions it does not?"""

from experiments.pieces.options import Options
from experiments.scaffold import command

main = command("pieces", Options, "experiments.pieces.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
