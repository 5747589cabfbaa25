"""How much of a photograph comes back in its place from pieces in random order: borders, a learned predictor, both."""

from experiments.placement.options import Options
from experiments.scaffold import command

main = command("placement", Options, "experiments.placement.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
