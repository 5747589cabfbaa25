"""What is answered to ordinary mistakes and situations, in this version and in an earlier one?"""

from experiments.scaffold import command
from experiments.situations.options import Options

main = command("situations", Options, "experiments.situations.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
