"""Fit the mixture on patches to a gallery, and write it."""

from __future__ import annotations

from rich.console import Console

from attacks.linear.patch_mixture import fit_mixture
from experiments.image_prior.options import Options
from experiments.session import prepare_torch
from fedmjp.data import load_gallery


def run(options: Options, console: Console) -> None:
    """Fit and write."""
    prepare_torch(options)
    gallery = load_gallery(options.images, size=options.image_size, limit=options.num_images, seed=options.seed)
    images = gallery.images.images(range(len(gallery.images)))
    mixture = fit_mixture(
        images, options.components, patches=options.patches, iterations=options.iterations, seed=options.seed
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    mixture.save(options.out)
    console.print(f"{options.components} components, fitted to {gallery.provenance}: {options.out}", highlight=False)
