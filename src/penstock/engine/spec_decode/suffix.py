"""Suffix decoding: drafts the tokens that followed earlier occurrences of the last tokens.

Earlier occurrences are found in the sequence itself (prompt lookup decoding, Saxena, 2023) and in recent answers
(SuffixDecoding, Oliaro et al., 2024), with hash tables and chains of positions instead of a suffix tree
(``csrc/token_history.h``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING

from penstock.core import Code, PenstockError

from ..sequence.draft_state import NOTHING, DraftState, Proposal
from ..sequence.sequence import Sequence

if TYPE_CHECKING:
    from penstock.ops import _kernels

MAX_SEQUENCE_TOKENS = 1 << 17
"""Number of trailing tokens of a sequence that are searched; they take 40 bytes each."""
MAX_ANSWER_TOKENS = 1 << 16
"""Number of tokens of recent answers that are searched, for each ``cache_salt``."""
MAX_SALTS = 32
"""Number of values of ``cache_salt``, the last used ones, of which answers are kept."""
MIN_ANSWER = 8
"""Number of tokens of the shortest answer that is kept."""
LONG_MATCH = 16
"""Length of a match in the sequence from which on answers are not searched."""

FIRST_RATES = (
    (0.27, 0.48, 0.57, 0.65, 0.65, 0.72, 0.90, 0.99),  # one occurrence
    (0.15, 0.33, 0.43, 0.45, 0.30, 0.20, 0.20, 0.50),  # several, followed by different tokens
    (0.63, 0.80, 0.83, 0.87, 0.92, 0.94, 0.98, 0.99),  # several, followed by the same token
)
NEXT_RATES = (0.50, 0.53, 0.63, 0.75, 0.80, 0.87, 0.95, 0.99)
"""Initial rates of the first token of a draft, and of the others, by length of the match (1, 2, 3, 4, from 5, 8, 16 and
32). Measured with SmolLM2-135M-Instruct at temperatures 0 and 0.7, on the kinds of work of the benchmark."""
FORCED_RATE = 0.99
"""Initial rate of tokens that the grammar forces."""
RATES = [*[rate for rates in (*FIRST_RATES, NEXT_RATES) for rate in rates], FORCED_RATE]
NEXT, FORCED = 8 * len(FIRST_RATES), 8 * len(FIRST_RATES) + 8
"""Contexts of the tokens after the first one, and of forced tokens."""


class SuffixDrafter:
    """Drafts the tokens after the longest earlier occurrence of the last tokens of a sequence, the most recent one of
    several; or the tokens that the sequence's grammar forces, if they may not be appended without the model.

    Args:
        shortest, longest: range of lengths of an occurrence; longer ones count as ``longest``.
        answers: also search recent answers to requests with the same ``cache_salt``.

    Raises ``PenstockError`` (``unsupported``) if Penstock was built without a compiler.
    """

    rates: Sequence_[float] = RATES

    def __init__(self, shortest: int = 1, longest: int = 32, answers: bool = True) -> None:
        try:
            from penstock.ops import _kernels
        except ImportError as error:
            message = "speculative_config: the methods suffix and ngram need the compiled kernels"
            message += ": install a C++ compiler and reinstall penstock"
            raise PenstockError(Code.UNSUPPORTED, message, "speculative_config") from error
        self._new_history = _kernels.TokenHistory
        self._shortest, self._longest, self._search_answers = shortest, longest, answers
        self._answers: OrderedDict[str, _kernels.TokenHistory] = OrderedDict()
        """Recent answers by ``cache_salt``, the last used one at the end."""

    def propose(self, sequence: Sequence, state: DraftState) -> Proposal:
        """Draft one token; none without an earlier occurrence of the last token."""
        history = state.history
        if history is None:
            history = state.history = self._new_history(min(MAX_SEQUENCE_TOKENS, sequence.max_len + 2))
            history.append(sequence.tokens[-MAX_SEQUENCE_TOKENS:])
        else:
            history.append(sequence.tokens[state.at :])
        guide = sequence.guide
        if guide and not sequence.jumps_forward and (forced := guide.jump_forward_tokens()):
            return Proposal(forced, [FORCED] * len(forced))
        source, found = history, history.find(history, self._longest)
        if self._answers and (not found or found[2] < LONG_MATCH):
            answers = self._answers.get(sequence.request.cache_salt)
            other = answers.find(history, self._longest) if answers is not None else None
            if other and (not found or other[2] > found[2]):
                source, found = answers, other
        if not found or found[2] < self._shortest:
            return NOTHING
        position, token, length, occurrences, agreeing = found
        kind = 0 if occurrences == 1 else 2 if occurrences == agreeing else 1
        state.source = source, position, length
        return Proposal([token], [8 * kind + _group(length)])

    def extend(self, sequence: Sequence, state: DraftState, max_len: int) -> Proposal:
        """Draft the tokens after the occurrence that ``propose`` found last."""
        if state.proposal.contexts == [FORCED]:
            return state.proposal
        source, position, length = state.source
        token_ids = source.tokens(position, max_len)
        next_contexts = [NEXT + _group(each) for each in range(length + 1, length + len(token_ids))]
        return Proposal(token_ids, state.proposal.contexts[:1] + next_contexts)

    def remember(self, sequence: Sequence) -> None:
        """Keep the output of a sequence that has ended, as an answer for later requests with its ``cache_salt``."""
        if not self._search_answers or sequence.num_output_tokens < MIN_ANSWER:
            return
        salt = sequence.request.cache_salt
        answers = self._answers.pop(salt, None)
        if answers is None:
            answers = self._new_history(MAX_ANSWER_TOKENS)
        self._answers[salt] = answers
        answers.append(
            [*sequence.tokens[sequence.prompt_length :][-MAX_ANSWER_TOKENS + 1 :], self._new_history.SEPARATOR]
        )
        if len(self._answers) > MAX_SALTS:
            self._answers.popitem(last=False)


_GROUPS = [0, 0, 1, 2, 3, *[4] * 3, *[5] * 8, *[6] * 16]


def _group(length: int) -> int:
    """Index of a length of a match in the tables of rates."""
    return _GROUPS[length] if length < 32 else 7
