"""How much do closed forms lose when a message has fewer digits, and how much do the known errors give back?"""

from experiments.message_precision.options import Options
from experiments.scaffold import command

main = command("message_precision", Options, "experiments.message_precision.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
