"""Audit one step of fine-tuning a Hugging Face ViT: python examples/huggingface_finetuning.py [--weights FOLDER]

FOLDER is what `save_pretrained` wrote, or a snapshot of a published model. Without it a small ViT with random weights
is built, so that nothing has to be downloaded.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

from fedmjp.audit import audit_gradient
from fedmjp.data import load_data

SMALL = ViTConfig(
    image_size=64, patch_size=8, hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768
)
MEAN = STD = (0.5, 0.5, 0.5)  # those of ViTImageProcessor


def load_model(weights: Path | None, classes: int) -> ViTForImageClassification:
    """The pretrained backbone with a new classifier for `classes` classes."""
    if weights is None:
        SMALL.num_labels = classes
        return ViTForImageClassification(SMALL)
    options = {"num_labels": classes, "ignore_mismatched_sizes": True, "local_files_only": True}
    return ViTForImageClassification.from_pretrained(weights, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, help="folder of a pretrained model (none: random weights)")
    parser.add_argument("--freeze", action="store_true", help="train the classifier only, and send nothing else")
    parser.add_argument("--out", type=Path, help="new folder for the page (none: a temporary one)")
    given = parser.parse_args()
    if given.weights is not None and not (given.weights / "config.json").is_file():
        parser.error(f"--weights {given.weights} holds no config.json; give the folder that save_pretrained wrote")
    torch.manual_seed(0)
    classes = 8
    model = load_model(given.weights, classes)
    train = load_data("photos", size=model.config.image_size).train
    images, labels = train.images([1]), torch.tensor([train.labels[1]])
    model.vit.requires_grad_(not given.freeze)
    model(pixel_values=(images - 0.5) / 0.5, labels=labels).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    audit = audit_gradient(model, images, gradients, mean=MEAN, std=STD)
    print(audit)
    print("page:", audit.save(given.out or tempfile.mkdtemp(prefix="audit-")))


if __name__ == "__main__":
    main()
