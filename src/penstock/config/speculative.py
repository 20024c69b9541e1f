"""Configuration of speculative decoding."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

import msgspec

from penstock.core.errors import invalid

from .token_tree import MAX_DEPTH, MAX_NODES, TokenTree

Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEPTH)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Values of ``speculative_config``, under vLLM's names, and TensorRT-LLM's for trees.

    Raises ``PenstockError`` (``invalid``) for contradictory values.
    """

    method: Literal["", "ngram", "draft_model", "mtp", "eagle", "eagle3", "medusa"] = ""
    """Drafter: n-gram lookup in the text, a draft model, the model's MTP layers, or trained draft heads. Empty:
    detected from the folder ``model``, or ``ngram`` without one."""
    model: str = ""
    """Folder of draft heads, or folder or GGUF file of a draft model; empty: the built-in draft model."""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 4
    """Maximum length of a draft; ignored with a tree, whose depth is the maximum."""
    speculative_token_tree: str | list[list[int]] = ""
    """Tree of draft tokens verified together in one step, as a list of paths: in ``[(0,), (0, 0), (1,)]``, the most
    likely token, the most likely token after it, and the second most likely token. Empty: a chain."""
    medusa_choices: str | list[list[int]] = ""
    """``speculative_token_tree`` of Medusa heads."""
    eagle_choices: str | list[list[int]] = ""
    """``speculative_token_tree`` of EAGLE heads."""
    prompt_lookup_max: Number = 4
    """Maximum length of the n-gram that is looked up in the text."""
    prompt_lookup_min: Number = 2
    """Minimum length of the n-gram that is looked up in the text."""
    adaptive: bool = True
    """Stop drafting while it lowers the throughput (tokens per second)."""

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            message = f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max"
            raise invalid("speculative_config", f"{message} ({self.prompt_lookup_max})")
        if self.model and self.method in ("ngram", "mtp"):
            raise invalid("speculative_config", f"model cannot be set with the method {self.method}: unset one of them")
        if self.tree is None and self.num_speculative_tokens > MAX_DEPTH:
            message = f"num_speculative_tokens must be at most {MAX_DEPTH}, is {self.num_speculative_tokens}"
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
        if self.method in ("ngram", "draft_model") or (kind not in self.method and self.method):
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
        return self.tree.depth if self.tree else self.num_speculative_tokens

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse the option's JSON; None if it is empty. Raises ``PenstockError`` (``invalid``) if it is invalid."""
        if not text.strip():
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise invalid("speculative_config", str(error)) from error
