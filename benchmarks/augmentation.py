"""Does augmentation protect against attacks over several updates?"""

from experiments.augmentation.options import Options
from experiments.scaffold import command

main = command("augmentation", Options, "experiments.augmentation.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
