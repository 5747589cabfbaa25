"""Which part of an update has to be withheld before nothing leaks?"""

from experiments.scaffold import command
from experiments.withheld.options import Options

main = command("withheld", Options, "experiments.withheld.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
