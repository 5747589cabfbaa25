"""Vision Transformers by name, with and without the MJP input layer."""

from fedmjp.models.registry import MODELS, BuiltModel, build_model, model_names, split_name
from fedmjp.models.vit import POSITION_TABLES, AprilBlock, ViT

__all__ = ["MODELS", "POSITION_TABLES", "AprilBlock", "BuiltModel", "ViT", "build_model", "model_names", "split_name"]
