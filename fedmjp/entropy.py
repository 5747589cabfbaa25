"""Where a client's random numbers come from: the order of its images, augmentation, masks, noise, rounding, dropout.

Everything follows from a key that no message holds. A SuperNode draws the key from its operating system; a simulation
derives it from `--seed` and `--client-seed`, so that the same command gives the same rows. Each use has a stream of its
own, by BLAKE2 under the key (RFC 7693, keyed mode).

torch's CPU generator is seeded with 32 bits whatever number it is given, which a server could try one by one. Its whole
state (624 words of the Mersenne Twister) is therefore expanded from the key by SHAKE-256. The generator itself is not
cryptographic: who sees enough of a stream without anything added can compute the rest of that stream, not the key and
not other streams.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

KEY_BYTES = 32
WORDS = 624  # of the Mersenne Twister's state
STATE_BYTES = 5056  # of a torch CPU generator
# Places in torch's serialised CPU generator: 64-bit numbers seed, left, seeded, next, then the words as 64 bits each.
_HEADER, _FIRST_WORD = struct.Struct("<QiiQ"), 24


@dataclass(frozen=True)
class ClientEntropy:
    """A key, and the streams that follow from it.

    Attributes:
        key: 32 bytes; never sent.
    """

    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Self:
        """A new key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def simulated(cls, seed: int, client_seed: int) -> Self:
        """The key of a simulation's clients; `client_seed` is not in the server's orders."""
        return cls(hashlib.sha256(f"fedmjp clients {client_seed} of run {seed}".encode()).digest())

    def _digest(self, purpose: int, place: tuple[int, ...]) -> bytes:
        words = struct.pack(f"<{1 + len(place)}q", purpose, *place)
        return hashlib.blake2b(words, key=self.key, digest_size=KEY_BYTES).digest()

    def seed(self, purpose: int, *place: int) -> int:
        """A seed in [0, 2^63) of one stream; `place` is the client, the round and the step."""
        return int.from_bytes(self._digest(purpose, place)[:8], "little") >> 1

    def permutation(self, count: int, purpose: int, *place: int) -> np.ndarray:
        """A random order of 0..count - 1, (count,) int64, from a generator that is seeded with 256 bits."""
        seed = int.from_bytes(self._digest(purpose, place), "little")
        return np.random.default_rng(seed).permutation(count)

    def generator(self, purpose: int, *place: int) -> torch.Generator:
        """A CPU generator of one stream, so that masks are the same on every device and engine."""
        generator = torch.Generator()
        generator.set_state(self._state(purpose, place))
        return generator

    def seed_globally(self, purpose: int, *place: int, device: str = "cpu") -> None:
        """Start torch's global generators from one stream: that of the CPU, and those of `device` if it is another one.

        `torch.manual_seed` formats the call stack for CUDA, so that it is not called for computations on the CPU. See
        `torch.random.fork_rng`.
        """
        if device != "cpu":
            torch.manual_seed(self.seed(purpose, *place))
        torch.set_rng_state(self._state(purpose, place))

    def _state(self, purpose: int, place: tuple[int, ...]) -> torch.Tensor:
        """Serialised state of a CPU generator whose words come from the key, (5056,) uint8."""
        expanded = hashlib.shake_256(self._digest(purpose, place)).digest(4 * WORDS)
        state = np.zeros(STATE_BYTES, dtype=np.uint8)
        # As a newly seeded one: the first draw computes new words from all of these. The field `seed` is only kept by
        # torch to be read back, and says nothing of the words.
        header = _HEADER.pack(0, 1, 1, 0)
        state[: len(header)] = np.frombuffer(header, np.uint8)
        words = np.frombuffer(expanded, "<u4").astype("<u8")
        state[_FIRST_WORD : _FIRST_WORD + 8 * WORDS] = words.view(np.uint8)
        return torch.from_numpy(state)
