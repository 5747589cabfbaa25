"""Fit the image prior of the attack mjp_mixture to photographs."""

from experiments.image_prior.options import Options
from experiments.scaffold import command

main = command("patch_mixture", Options, "experiments.image_prior.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
