"""The sent model from patches to the tokens that its head reads, with keys and values of some tokens only.

Between the encoder's tokens and the head there may be a decoder (`Decoder`), as in masked-image modelling.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer


class KeyBias(TorchFunctionMode):
    """Inside this context every attention adds log-weights to its scores, one for each key.

    Args:
        bias: (T,), minus infinity for tokens that give no keys and values.

    Attributes:
        calls: attentions that it was added to.
    """

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias, self.calls = bias, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention and kwargs.get("attn_mask") is None and len(args) < 4:
            kwargs["attn_mask"] = self.bias.expand(args[0].shape[-2], -1)
            self.calls += 1
        return func(*args, **kwargs)


class Encoder:
    """Patches -> the tokens that the head reads.

    Args:
        model: as sent; it is not changed.
        tokenizer: of the model.
        head: name of the layer that reads the tokens. Where `forward` does not call it (a head for pre-training), the
            last output of a layer that is tokens is taken for its input.
        dtype: of the computation.

    Raises:
        UsageError: `forward` fails, or has no tokens of the head's width.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, head: str, dtype: torch.dtype = torch.float64) -> None:
        self.model, self.tokenizer, self.head = model, tokenizer, head
        tensors = (*model.named_parameters(), *model.named_buffers())
        self.tensors = {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in tensors}
        self.source, self.before = self._find()

    def __call__(self, patches: Tensor, key_bias: Tensor | None = None) -> Tensor:
        """(N, D) tokens of one image.

        Args:
            patches: (N, P) normalised.
            key_bias: (N,) log-weights of the patches as keys; None where all tokens attend to all.

        Raises:
            UsageError: log-weights for a model whose attention is not torch's.
        """
        images = self.tokenizer.unpatchify(patches[None])
        if key_bias is None:
            return self._run(images)
        with KeyBias(key_bias) as mode:
            tokens = self._run(images)
        if not mode.calls:
            raise UsageError("the model's attention is not torch's own: tokens cannot be left out of it")
        return tokens

    def _run(self, images: Tensor) -> Tensor:
        kept: list[Tensor] = []
        layer = self.model.get_submodule(self.source)
        register = layer.register_forward_pre_hook if self.before else layer.register_forward_hook
        handle = register(lambda _, inputs, *output: kept.append(inputs[0] if self.before else output[0]))
        try:
            functional_call(self.model, self.tensors, (images,))
        finally:
            handle.remove()
        return kept[-1][0, -self.tokenizer.num_patches :]

    def _find(self) -> tuple[str, bool]:
        """Name of the layer at which the tokens are read, and whether before it."""
        width = self.tensors[f"{self.head}.weight"].shape[1]
        found: list[tuple[str, bool]] = []

        def note(name: str, inputs: tuple, output: Any) -> None:
            """Keep the layer where it is the head, or where its output are tokens of the head's width."""
            if name == self.head:
                found.append((name, True))
            elif isinstance(output, Tensor) and output.dim() == 3 and output.shape[2] == width:
                found.append((name, False))

        hooks = [
            module.register_forward_hook(lambda _, i, o, name=name: note(name, i, o))
            for name, module in self.model.named_modules()
        ]
        image = torch.zeros(1, self.tokenizer.num_patches, self.tokenizer.patch_dim)
        image = image.to(self.tensors[self.tokenizer.weight])
        try:
            functional_call(self.model, self.tensors, (self.tokenizer.unpatchify(image),))
        except Exception as error:  # a model may be anybody's code
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UsageError(f"{type(self.model).__name__} cannot be run on an image alone ({what})") from error
        finally:
            for hook in hooks:
                hook.remove()
        own = [entry for entry in found if entry[1]] or found
        if not own:
            raise UsageError(f"no layer of the model returns tokens of {width} channels, which its head would read")
        return own[-1]


class Decoder:
    """Tokens of several images -> what the head reads, through the module that the head is the last layer of.

    Each image passes by itself, in training mode: a batch norm takes its statistics from the tokens of one image.

    Args:
        encoder: patches to tokens.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, (parent, _, self.last) = encoder, encoder.head.rpartition(".")
        module = encoder.model.get_submodule(parent)
        self.reads_grid = _reads_tokens_and_grid(module)
        self.module = copy.deepcopy(module).train() if self.reads_grid else None
        prefix = f"{parent}."
        self.tensors = {n.removeprefix(prefix): t for n, t in encoder.tensors.items() if n.startswith(prefix)}

    def __call__(self, patches: Tensor, key_bias: Tensor | None = None) -> Tensor:
        """(k N, D) of k images, image by image, from their patches (k N, P), normalised."""
        count = self.encoder.tokenizer.num_patches
        return torch.cat([self._decoded(self.encoder(own, key_bias)) for own in patches.split(count)])

    def _decoded(self, tokens: Tensor) -> Tensor:
        if self.module is None:
            return tokens
        kept: list[Tensor] = []
        handle = self.module.get_submodule(self.last).register_forward_pre_hook(lambda _, i: kept.append(i[0]))
        try:
            functional_call(self.module, self.tensors, (tokens[None], self.encoder.tokenizer.grid))
        finally:
            handle.remove()
        read = kept[-1][0]
        return read.flatten(1).T if read.dim() == 3 else read


def _reads_tokens_and_grid(module: nn.Module) -> bool:
    """Whether `forward` takes (tokens, grid): the layers before the head are then a decoder of all tokens."""
    return list(inspect.signature(module.forward).parameters)[1:2] == ["grid"]
