"""What may be asked of an engine as a whole: names that engine, server and Python callers share."""

from __future__ import annotations

from typing import Literal

Running = Literal["finish", "recompute"]
"""What becomes of running sequences when weights change: they finish on the old ones, while new sequences wait; or they
are preempted, and computed again with the new weights, which go on after the tokens that were generated. Sequences
whose clients do not read are never waited for."""
PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests when the engine is paused: they fail; those that have begun finish; or they stay where they
are. In the last two cases the others wait in the queue, as do those that come later."""
WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""Parts of an engine that sleep frees, and that ``wake_up`` may name."""
