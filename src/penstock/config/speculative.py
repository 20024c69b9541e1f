"""Configuration of speculative decoding."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import msgspec

from penstock.core.errors import invalid

Number = Annotated[int, msgspec.Meta(ge=1, le=32)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``speculative_config``, under vLLM's names.

    Raises ``PenstockError`` (``invalid``) for values that do not go together.
    """

    method: Literal["", "ngram", "draft_model", "mtp", "eagle", "eagle3", "medusa"] = ""
    """The drafter: n-grams of the text, a smaller model, the model's own MTP layers, or heads that were trained for the
    model. Empty is what the folder ``model`` holds, or ``ngram`` without one."""
    model: str = ""
    """Folder of the heads, or folder or GGUF file of the draft model; empty for the built-in model's."""
    num_speculative_tokens: Number = 4
    """Maximum length of a draft."""
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
