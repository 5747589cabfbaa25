"""Train the predictor of places that attackers place pieces with."""

from experiments.piece_predictor.options import Options
from experiments.scaffold import command

main = command("piece_predictor", Options, "experiments.piece_predictor.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
