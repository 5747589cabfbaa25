"""What does a server get out of a batch if it chooses the layers, or the tokens, of the model that it sends?"""

from experiments.imprint.options import Options
from experiments.scaffold import command

main = command("imprint", Options, "experiments.imprint.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
