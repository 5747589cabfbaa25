"""What is a pre-training worth, against a supervised one on the same images, with and without MJP in fine-tuning?"""

from experiments.pretraining.start_options import StartOptions
from experiments.scaffold import command

main = command("pretraining", StartOptions, "experiments.pretraining.start_protocol")

if __name__ == "__main__":
    raise SystemExit(main())
