"""What do augmentation, batches, optimisers and local epochs do to each attack?"""

from experiments.recipes.options import Options
from experiments.scaffold import command

main = command("recipes", Options, "experiments.recipes.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
