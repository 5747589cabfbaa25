"""Trained models and the images on which they are measured."""

from __future__ import annotations

from attacks import UsageError
from experiments.trained_models.options import TrainedOptions
from fedmjp.data import DataBundle, load_data
from fedmjp.models import MODELS, BuiltModel, build_model, split_name
from fedmjp.models.weights import classes_of


def load_bundle(options: TrainedOptions, model: str) -> DataBundle:
    """The test images asked for, at the size that `model` takes."""
    size = MODELS.get(split_name(model)[0]).image_size
    return load_data(options.data, size=size, path=options.data_path, test_limit=options.num_images, seed=options.seed)


def load_trained(name: str, source: str, bundle: DataBundle) -> BuiltModel:
    """The model, without its DAL map, in evaluation mode.

    Raises:
        UsageError: weights that are not there, or for other classes than those of `bundle`.
    """
    if classes_of(name, source) != len(bundle.classes):
        raise UsageError(
            f"the weights of {name} are for {classes_of(name, source)} classes, {bundle.name} has "
            f"{len(bundle.classes)}; choose --data or --model to match"
        )
    built = build_model(name, num_classes=len(bundle.classes), weights=source, dal="none")
    built.module.eval()
    return built
