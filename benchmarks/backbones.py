"""Three families of backbones with and without MJP.  Table 1 and Figure 2 (a), (b) of the MJP paper."""

from experiments.scaffold import command
from experiments.trainings.options import BackboneOptions

main = command("backbones", BackboneOptions, "experiments.trainings.backbones")

if __name__ == "__main__":
    raise SystemExit(main())
