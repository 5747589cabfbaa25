"""What does a defence cost in accuracy, and what does it buy in privacy?"""

from experiments.scaffold import command
from experiments.tradeoff.options import Options

main = command("federated_tradeoff", Options, "experiments.tradeoff.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
