"""Settings of the attacks that search, chosen on photographs that no table scores."""

from experiments.matching.tuning_options import TuningOptions
from experiments.scaffold import command

main = command("matching_tuning", TuningOptions, "experiments.matching.tuning")

if __name__ == "__main__":
    raise SystemExit(main())
