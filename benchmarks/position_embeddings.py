"""What do position embeddings learn?  Tables 7 and 8, Figures 1, 3 and 7 of the MJP paper."""

from experiments.scaffold import command
from experiments.trained_models.options import PositionOptions

main = command("position_embeddings", PositionOptions, "experiments.trained_models.position_embeddings")

if __name__ == "__main__":
    raise SystemExit(main())
