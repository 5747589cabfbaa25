"""Does a client that looks at the model it is sent notice an active server, and what does it think of honest ones?"""

from experiments.detect.options import Options
from experiments.scaffold import command

main = command("detect", Options, "experiments.detect.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
