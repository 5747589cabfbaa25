"""Spoken words, supervised and after MP3.  Tables 5 and 6 of the MP3 paper."""

from experiments.scaffold import command
from experiments.speech.options import TrainingOptions

main = command("speech", TrainingOptions, "experiments.speech.trainings")

if __name__ == "__main__":
    raise SystemExit(main())
