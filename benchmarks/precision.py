"""One training recipe in float32 and in bfloat16, plainly and under MJP."""

from experiments.scaffold import command
from experiments.trainings.options import PrecisionOptions

main = command("precision", PrecisionOptions, "experiments.trainings.precision")

if __name__ == "__main__":
    raise SystemExit(main())
