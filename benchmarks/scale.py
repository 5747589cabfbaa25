"""Seconds and peak memory of a round of 10 to 10,000 clients, and of a report over 10,000 to a million rows."""

from experiments.scaffold import command
from experiments.scale.options import Options

main = command("scale", Options, "experiments.scale.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
