"""Fit the mixture of borders that attackers place pieces with."""

from experiments.piece_predictor.options import BorderOptions
from experiments.scaffold import command

main = command("border_mixture", BorderOptions, "experiments.piece_predictor.borders")

if __name__ == "__main__":
    raise SystemExit(main())
