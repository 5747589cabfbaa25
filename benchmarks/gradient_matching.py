"""How far does gradient matching get on Vision Transformers?"""

from experiments.matching.options import Options
from experiments.scaffold import command

main = command("gradient_matching", Options, "experiments.matching.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
