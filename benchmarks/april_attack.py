"""Reproduce the leakage table of the MJP paper (Table 5), on the paper's own block and on the one people train."""

from experiments.leakage.options import Options
from experiments.scaffold import command

main = command("april_attack", Options, "experiments.leakage.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
