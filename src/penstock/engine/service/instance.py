"""Instances: engines of a model that routers reach over TCP."""

from __future__ import annotations

import msgspec

from .messages import Ready


class Instance(msgspec.Struct, frozen=True):
    """An engine as the supervisor of a router has found it, which the router uses as long as it stays as it is."""

    address: str
    """Where it is reached, as host:port."""
    role: str
    """Its option ``role``."""
    fingerprint: str
    weights_version: str

    def is_of(self, engine: Ready) -> bool:
        """Whether an engine at the address is still the same in what matters for results."""
        return (self.role, self.fingerprint, self.weights_version) == (
            engine.role,
            engine.fingerprint,
            engine.weights_version,
        )
