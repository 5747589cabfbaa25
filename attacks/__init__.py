"""The adversary: closed-form and optimisation attacks on the updates of federated ViTs.

Imports torch and never `fedmjp` or Flower: an attack sees `Observation`s and nothing else.
"""

from attacks import (  # noqa: F401  (importing an attack registers it)
    april,
    batch_rounds,
    breaching_adapter,
    gradient_matching,
    mjp_rounds,
    mjp_subspace,
    patch_embedding,
    unmix_rounds,
    unmixing,
)
from attacks.attention import FirstAttention, find_first_attention
from attacks.base import ATTACKS, Attack, Interrupted
from attacks.observation import Capability, Observation, Reconstruction, ThreatModel
from attacks.registry import Registry, UsageError
from attacks.tokenizer import Tokenizer, check_tokenizer, find_tokenizer, has_tokenizer

__all__ = [
    "ATTACKS",
    "Attack",
    "Capability",
    "FirstAttention",
    "Interrupted",
    "Observation",
    "Reconstruction",
    "Registry",
    "ThreatModel",
    "Tokenizer",
    "UsageError",
    "check_tokenizer",
    "find_first_attention",
    "find_tokenizer",
    "has_tokenizer",
]
