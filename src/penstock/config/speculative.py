"""Configuration of speculative decoding."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

import msgspec

from penstock.core.errors import invalid

from .token_tree import MAX_DEPTH, MAX_NODES, TokenTree

LOOKUPS = ("suffix", "ngram")
"""Methods that look up drafts in tokens, without a model."""
LOOKUP_TOKENS, DRAFTED_TOKENS = 16, 4
"""Default of ``num_speculative_tokens`` with and without lookup."""
Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEPTH)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Values of ``speculative_config``, under vLLM's names, and TensorRT-LLM's for trees.

    Raises ``PenstockError`` (``invalid``) for contradictory values.
    """

    method: Literal["", "none", "suffix", "ngram", "draft_model", "mtp", "eagle", "eagle3", "medusa"] = ""
    """Drafter: lookup of the last tokens in the text and in recent answers (suffix) or in the text only (ngram), a
    draft model, the model's MTP layers, or trained draft heads. Empty: detected from the folder ``model``, or
    ``suffix`` without one. none: no drafts."""
    model: str = ""
    """Folder of draft heads, or folder or GGUF file of a draft model; empty: the built-in draft model."""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] | None = None
    """Maximum length of a draft (default: 16 for suffix and ngram, else 4); ignored with a tree, whose depth is the
    maximum."""
    speculative_token_tree: str | list[list[int]] = ""
    """Tree of draft tokens verified together in one step, as a list of paths: in ``[(0,), (0, 0), (1,)]``, the most
    likely token, the most likely token after it, and the second most likely token. Empty: a chain."""
    medusa_choices: str | list[list[int]] = ""
    """``speculative_token_tree`` of Medusa heads."""
    eagle_choices: str | list[list[int]] = ""
    """``speculative_token_tree`` of EAGLE heads."""
    prompt_lookup_max: Number = 4
    """Maximum length of the n-gram that the method ngram looks up in the text."""
    prompt_lookup_min: Number = 2
    """Minimum length of the n-gram that the method ngram looks up in the text."""
    suffix_decoding_max_tree_depth: Annotated[int, msgspec.Meta(ge=1)] = 32
    """Maximum length of the match that the method suffix looks up; values above 32 count as 32."""
    suffix_decoding_max_cached_requests: Annotated[int, msgspec.Meta(ge=0)] = 10_000
    """0: the method suffix does not search recent answers. Other values have no effect: answers are kept while there is
    room for their tokens."""
    suffix_decoding_max_spec_factor: float = 1.0
    """No effect: the length of a draft follows from its expected acceptance (``adaptive``)."""
    suffix_decoding_min_token_prob: float = 0.1
    """No effect, as ``suffix_decoding_max_spec_factor``."""
    adaptive: bool = True
    """Choose the length of each draft, down to none, so that drafts raise the throughput (tokens per second)."""

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            message = f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max"
            raise invalid("speculative_config", f"{message} ({self.prompt_lookup_max})")
        if self.model and self.method in (*LOOKUPS, "none", "mtp"):
            raise invalid("speculative_config", f"model cannot be set with the method {self.method}: unset one of them")
        if self.tree is None and self.max_draft_len > MAX_DEPTH:
            message = f"num_speculative_tokens must be at most {MAX_DEPTH}, is {self.max_draft_len}"
            raise invalid("speculative_config", message, MAX_DEPTH)

    @cached_property
    def tree(self) -> TokenTree | None:
        """Tree of draft tokens; None: a chain.

        Raises ``PenstockError`` (``invalid``) if it is not a valid tree, or the method cannot draft trees.
        """
        trees = {name: getattr(self, name) for name in ("speculative_token_tree", "medusa_choices", "eagle_choices")}
        trees = {name: tree for name, tree in trees.items() if tree}
        if not trees:
            return None
        if len(trees) > 1:
            raise invalid("speculative_config", f"set only one of {' and '.join(trees)}")
        ((name, given),) = trees.items()
        kind = name.removesuffix("_choices") if name.endswith("_choices") else ""
        if self.method in (*LOOKUPS, "none", "draft_model") or (kind not in self.method and self.method):
            raise invalid(
                "speculative_config", f"{name} cannot be set with the method {self.method}: unset one of them"
            )
        try:
            return TokenTree.read(given) if isinstance(given, str) else TokenTree(given)
        except ValueError as error:
            raise invalid("speculative_config", f"{name}: {error}") from error

    @property
    def max_draft_len(self) -> int:
        """Maximum number of draft tokens of a sequence that one step can accept."""
        if self.tree:
            return self.tree.depth
        return self.num_speculative_tokens or (LOOKUP_TOKENS if self.is_lookup else DRAFTED_TOKENS)

    @property
    def is_lookup(self) -> bool:
        """True if drafts are looked up in tokens, without a model."""
        return self.method in LOOKUPS

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse the option's JSON; None if it is empty or the method is ``none``. Raises ``PenstockError``
        (``invalid``) if it is invalid."""
        if not text.strip():
            return None
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise invalid("speculative_config", str(error)) from error
        return None if config.method == "none" else config


DEFAULT = SpeculativeConfig(method="suffix")
"""Configuration without ``speculative_config``, where drafts cannot change results."""
