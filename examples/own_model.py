"""Audit one training step of your own timm model: python examples/own_model.py"""

import tempfile

import timm
import torch

from fedmjp.audit import audit_gradient
from fedmjp.data import load_data

MEAN = STD = (0.5, 0.5, 0.5)
torch.manual_seed(0)
train = load_data("photos", size=64).train  # your data: images in [0, 1] and labels
images, labels = train.images([1]), torch.tensor([train.labels[1]])
model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, num_classes=8)  # your model and weights
loss = torch.nn.functional.cross_entropy(model((images - 0.5) / 0.5), labels)  # your loss
names, parameters = zip(*model.named_parameters(), strict=True)
gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))  # what your client would send
audit = audit_gradient(model, images, gradients, mean=MEAN, std=STD)
print(audit)
print("page:", audit.save(tempfile.mkdtemp(prefix="audit-")))
