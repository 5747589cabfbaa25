"""Are models without position embeddings easier to attack?"""

from experiments.leakage.options import ClaimOptions
from experiments.scaffold import command

main = command("position_claim", ClaimOptions, "experiments.leakage.position_claim")

if __name__ == "__main__":
    raise SystemExit(main())
