"""How often are updates of different images taken for updates of one?"""

from experiments.augmentation.options import StrangerOptions
from experiments.scaffold import command

main = command("strangers", StrangerOptions, "experiments.augmentation.strangers")

if __name__ == "__main__":
    raise SystemExit(main())
