"""Render tables and Markdown blocks from the committed results, or check that they are what the results give."""

from experiments.pages.options import Options
from experiments.scaffold import command

main = command("render", Options, "experiments.pages.protocol")

if __name__ == "__main__":
    raise SystemExit(main())
