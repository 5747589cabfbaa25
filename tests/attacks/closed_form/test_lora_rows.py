"""Collected rows of low-rank factors stand for one gradient, however many weights the first attention has."""

from __future__ import annotations

import torch

from attacks import Observation
from attacks.attention import find_first_attention
from attacks.closed_form.lora_span import _as_whole_layer
from attacks.linear.input_spans import attention_gradient
from tests.attacks.models import hugging_face_vit, timm_vit


def test_no_row_counts_twice() -> None:
    rows = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))
    for model in (timm_vit(), hugging_face_vit()):
        view = _as_whole_layer(Observation({}, model, 1, (3, 32, 32), (0.5,) * 3, (0.5,) * 3), rows)
        assert torch.equal(attention_gradient(view, find_first_attention(model, 48)), rows)
