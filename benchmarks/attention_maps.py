"""Is MJP's attention "more diverse and content-aware"?  Figure 4 of the MJP paper, with numbers."""

from experiments.scaffold import command
from experiments.trained_models.options import AttentionOptions

main = command("attention_maps", AttentionOptions, "experiments.trained_models.attention_maps")

if __name__ == "__main__":
    raise SystemExit(main())
