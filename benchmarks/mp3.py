"""What does pre-training with MP3 give?"""

from experiments.mp3.options import MP3Options
from experiments.scaffold import command

main = command("mp3", MP3Options, "experiments.mp3.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
