"""Trained models and the images on which they are measured."""

from __future__ import annotations

from attacks import UsageError
from experiments.trained_models.options import TrainedOptions
from experiments.trained_models.subjects import Subject
from fedmjp.data import DataBundle, load_data
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.weights import classes_of


def load_bundle(options: TrainedOptions, subject: Subject) -> DataBundle:
    """The test images asked for, at the size that a model takes."""
    asked = {"path": options.data_path, "test_limit": options.num_images, "seed": options.seed}
    return load_data(options.data, size=options.side(subject), **asked)


def load_trained(options: TrainedOptions, name: str, source: str, bundle: DataBundle) -> BuiltModel:
    """The model `name` at the size asked for, without its DAL map, in evaluation mode.

    Raises:
        UsageError: weights that are not there, or for other classes than those of `bundle`.
    """
    if classes_of(name, source) != len(bundle.classes):
        raise UsageError(
            f"the weights of {name} are for {classes_of(name, source)} classes, {bundle.name} has "
            f"{len(bundle.classes)}; choose --data or --model to match"
        )
    size = options.image_size
    built = build_model(name, num_classes=len(bundle.classes), weights=source, dal="none", image_size=size)
    built.module.eval()
    return built
