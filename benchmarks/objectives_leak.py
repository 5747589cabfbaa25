"""What does an update leak under each objective?"""

from experiments.objectives.options import Options
from experiments.scaffold import command

main = command("objectives_leak", Options, "experiments.objectives.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
