"""``RequestOutputKind.DELTA``: the part of each output that is new."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .outputs import CompletionOutput, RequestOutput


@dataclass
class Deltas:
    """Converts the cumulative outputs of a request to deltas."""

    _returned: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Numbers of characters and tokens of each sequence that earlier deltas have."""

    def next(self, output: RequestOutput) -> RequestOutput:
        """The output with the new text, tokens and logprobs of each sequence only."""
        return replace(output, outputs=[self._new_part(one) for one in output.outputs])

    def _new_part(self, sequence: CompletionOutput) -> CompletionOutput:
        characters, tokens = self._returned.get(sequence.index, (0, 0))
        self._returned[sequence.index] = len(sequence.text), len(sequence.token_ids)
        return replace(
            sequence,
            text=sequence.text[characters:],
            token_ids=sequence.token_ids[tokens:],
            logprobs=None if sequence.logprobs is None else sequence.logprobs[tokens:],
        )
