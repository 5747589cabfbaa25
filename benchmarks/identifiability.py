"""How much of an image is determined by the few numbers that some clients send?"""

from experiments.identifiability.options import Options
from experiments.scaffold import command

main = command("identifiability", Options, "experiments.identifiability.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
