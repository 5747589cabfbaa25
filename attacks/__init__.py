"""The adversary: closed-form and optimisation attacks on the updates of federated ViTs.

Imports torch and never `fedmjp` or Flower: an attack sees `Observation`s and nothing else. A new built-in attack is one
file and one line in `ATTACKS`; another package adds its own through the entry points `fedmjp.attacks`; a class defined
in a notebook takes the decorator `@ATTACKS.register("name")`. An attack is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attacks.lazy import lazy_exports
from attacks.registry import Registry, UsageError

if TYPE_CHECKING:
    from attacks.attention import FirstAttention, find_first_attention
    from attacks.base import Attack, Interrupted
    from attacks.observation import Capability, Observation, Reconstruction, ThreatModel
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

__getattr__ = lazy_exports(
    __name__,
    {
        "attacks.attention": ("FirstAttention", "find_first_attention"),
        "attacks.base": ("Attack", "Interrupted"),
        "attacks.observation": ("Capability", "Observation", "Reconstruction", "ThreatModel"),
        "attacks.tokenizer": ("Tokenizer", "check_tokenizer", "find_tokenizer", "has_tokenizer"),
    },
)

ATTACKS: Registry[type[Attack]] = Registry(
    "attack",
    {
        "april_optimisation": "attacks.gradient_matching.april_optimisation:AprilOptimisation",
        "dlg": "attacks.gradient_matching.dlg:DeepLeakage",
        "gauss_newton": "attacks.gradient_matching.gauss_newton:GaussNewton",
        "gradvit": "attacks.gradient_matching.gradvit:GradViT",
        "idlg": "attacks.gradient_matching.idlg:ImprovedDeepLeakage",
        "inverting_gradients": "attacks.gradient_matching.inverting_gradients:InvertingGradients",
        "see_through_gradients": "attacks.gradient_matching.see_through_gradients:SeeThroughGradients",
        "breaching_inverting_gradients": "attacks.breaching:BreachingInvertingGradients",
        "breaching_see_through_gradients": "attacks.breaching:BreachingSeeThroughGradients",
        "breaching_dlg": "attacks.breaching:BreachingDeepLeakage",
        "breaching_april": "attacks.breaching:BreachingApril",
        "known_draws": "attacks.mjp.known_draws:KnownDraws",
        "april": "attacks.closed_form.april:April",
        "batch_rounds": "attacks.closed_form.batch_rounds:BatchRounds",
        "feature_decoder": "attacks.features.feature_decoder:FeatureDecoder",
        "later_block": "attacks.features.later_block:LaterBlock",
        "lora_span": "attacks.closed_form.lora_span:LoRASpan",
        "noisy_rounds": "attacks.closed_form.noisy_rounds:NoisyRounds",
        "patch_embedding": "attacks.closed_form.patch_embedding:PatchEmbedding",
        "pixel_head": "attacks.heads.pixel_head:PixelHead",
        "position_head": "attacks.heads.position_head:PositionHead",
        "sparse_rounds": "attacks.closed_form.sparse_rounds:SparseRounds",
        "undo_policy": "attacks.closed_form.undo_policy:UndoPolicy",
        "token_span": "attacks.closed_form.token_span:TokenSpan",
        "token_inverse": "attacks.mjp.token_inverse:TokenInverse",
        "batch_tokens": "attacks.mjp.batch_tokens:BatchTokens",
        "mjp_subspace": "attacks.mjp.subspace:MJPSubspace",
        "mjp_rounds": "attacks.mjp.rounds:MJPRounds",
        "mjp_mixture": "attacks.mjp.mixture:MJPMixture",
        "patch_set": "attacks.mjp.patch_set:PatchSet",
        "unmix": "attacks.mjp.unmix:Unmix",
        "unmix_rounds": "attacks.mjp.unmix_rounds:UnmixRounds",
        "fishing": "attacks.active.fishing:Fishing",
        "feature_fishing": "attacks.active.feature_fishing:FeatureFishing",
        "imprint": "attacks.active.imprint:Imprint",
        "token_bins": "attacks.active.token_bins:TokenBins",
        "adapter_trap": "attacks.active.adapter_trap:AdapterTrap",
        "lora_trap": "attacks.active.lora_trap:LoRATrap",
    },
    group="fedmjp.attacks",
    base="attacks.base:Attack",
)
