"""Modes of weight updates, pause and sleep, shared by the engine, the server and Python callers."""

from __future__ import annotations

from typing import Literal

WeightUpdateMode = Literal["finish", "recompute"]
"""How running sequences are handled during a weight update. ``finish``: they finish with the old weights, while new
sequences wait. ``recompute``: they are preempted, and continue with the new weights after the tokens generated so far.
The update never waits for sequences whose clients do not read."""
ReloadMode = Literal["finish", "recompute", "restart"]
"""How new weights are loaded: ``WeightUpdateMode``, or ``restart``: by a new engine process for each replica, next to
the old one if memory allows, which finishes its requests."""
PauseMode = Literal["abort", "wait", "keep"]
"""How requests are handled when the engine is paused. ``abort``: they are aborted. ``wait``: those that have started
finish. ``keep``: they continue after ``resume``. With ``wait`` and ``keep``, waiting and new requests stay queued."""
WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""Parts of an engine that sleep frees; ``wake_up`` can restore them one by one."""
