"""What an update of a model of speech says of its frames."""

from experiments.scaffold import command
from experiments.speech.options import LeakOptions

main = command("speech_leak", LeakOptions, "experiments.speech.leak")

if __name__ == "__main__":
    raise SystemExit(main())
