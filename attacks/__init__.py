"""The adversary: closed-form and optimisation attacks on the updates of federated ViTs.

Imports torch and never `fedmjp` or Flower: an attack sees `Observation`s and nothing else.
"""

from attacks import breaching, gradient_matching  # noqa: F401  (importing an attack registers it)
from attacks.attention import FirstAttention, find_first_attention
from attacks.base import ATTACKS, Attack, Interrupted
from attacks.closed_form import april, batch_rounds, patch_embedding  # noqa: F401
from attacks.mjp import rounds, subspace, unmix, unmix_rounds  # noqa: F401
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
