"""What do attacks that know noise recover from updates of one image, and what does the bound allow?"""

from experiments.noise.options import Options
from experiments.scaffold import command

main = command("noise", Options, "experiments.noise.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
