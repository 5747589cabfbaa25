"""What leaks when clients take several local steps, use AdamW, or send batches under MJP?"""

from experiments.local_training.options import Options
from experiments.scaffold import command

main = command("local_training", Options, "experiments.local_training.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
