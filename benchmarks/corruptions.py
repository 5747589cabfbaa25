"""Does MJP make a ViT more robust to common corruptions?  Tables 4 and 9 of the MJP paper."""

from experiments.scaffold import command
from experiments.trained_models.options import CorruptionOptions

main = command("corruptions", CorruptionOptions, "experiments.trained_models.corruptions")

if __name__ == "__main__":
    raise SystemExit(main())
