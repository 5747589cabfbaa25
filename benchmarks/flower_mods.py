"""What does a server see of updates that pass Flower's own clipping and privacy mods?"""

from experiments.flower_mods.options import Options
from experiments.scaffold import command

main = command("flower_mods", Options, "experiments.flower_mods.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
