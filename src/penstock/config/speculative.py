"""Configuration of speculative decoding."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

import msgspec

from penstock.core.errors import invalid

from .token_tree import MAX_DEPTH, MAX_NODES, TokenTree

Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEPTH)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """``speculative_config``, under vLLM's names, and TensorRT-LLM's for trees.

    Raises ``PenstockError`` (``invalid``) for values that do not go together.
    """

    method: Literal["", "ngram", "draft_model", "mtp", "eagle", "eagle3", "medusa"] = ""
    """The drafter: n-grams of the text, a smaller model, the model's own MTP layers, or heads that were trained for the
    model. Empty is what the folder ``model`` holds, or ``ngram`` without one."""
    model: str = ""
    """Folder of the heads, or folder or GGUF file of the draft model; empty for the built-in model's."""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 4
    """Maximum length of a draft; not read with a tree, whose depth it is."""
    speculative_token_tree: str | list[list[int]] = ""
    """Tree of draft tokens that a step verifies together, as its paths: ``[(0,), (0, 0), (1,)]`` are the likeliest
    token, the likeliest one after it, and the second likeliest. Empty is a chain."""
    medusa_choices: str | list[list[int]] = ""
    """``speculative_token_tree`` of Medusa heads."""
    eagle_choices: str | list[list[int]] = ""
    """``speculative_token_tree`` of EAGLE heads."""
    prompt_lookup_max: Number = 4
    """Longest n-gram that is looked up in the text."""
    prompt_lookup_min: Number = 2
    """Shortest one."""
    adaptive: bool = True
    """Do not draft while drafts lower the tokens a second."""

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise invalid("speculative_config", "prompt_lookup_min must be at most prompt_lookup_max")
        if self.model and self.method in ("ngram", "mtp"):
            raise invalid("speculative_config", f"the method {self.method} takes no model")
        if self.tree is None and self.num_speculative_tokens > MAX_DEPTH:
            raise invalid("speculative_config", f"num_speculative_tokens must be at most {MAX_DEPTH}", MAX_DEPTH)

    @cached_property
    def tree(self) -> TokenTree | None:
        """The tree of draft tokens; None for a chain.

        Raises ``PenstockError`` (``invalid``) where it is none, or the method cannot draft it.
        """
        trees = {name: getattr(self, name) for name in ("speculative_token_tree", "medusa_choices", "eagle_choices")}
        trees = {name: tree for name, tree in trees.items() if tree}
        if not trees:
            return None
        if len(trees) > 1:
            raise invalid("speculative_config", f"give one of {' and '.join(trees)}")
        ((name, given),) = trees.items()
        kind = name.removesuffix("_choices") if name.endswith("_choices") else ""
        if self.method in ("ngram", "draft_model") or (kind not in self.method and self.method):
            raise invalid("speculative_config", f"{name} is not for the method {self.method}")
        try:
            return TokenTree.read(given) if isinstance(given, str) else TokenTree(given)
        except ValueError as error:
            raise invalid("speculative_config", f"{name}: {error}") from error

    @property
    def max_draft_len(self) -> int:
        """Tokens of a sequence's draft that can be accepted at most."""
        return self.tree.depth if self.tree else self.num_speculative_tokens

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse the option's JSON; None where it is empty.

        Raises ``PenstockError`` (``invalid``) for anything but such an object.
        """
        if not text.strip():
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise invalid("speculative_config", str(error)) from error
