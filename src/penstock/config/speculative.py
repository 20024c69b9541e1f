"""How tokens are guessed ahead, for the model to confirm several in one step."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import msgspec

from penstock.core.errors import invalid

Number = Annotated[int, msgspec.Meta(ge=1, le=32)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding, under the names that vLLM's users know.

    Raises ``PenstockError`` (``invalid``) for values that do not go together.
    """

    method: Literal["", "ngram", "draft_model", "mtp"] = ""
    """Who guesses: the text so far (what followed the last time), a smaller model, or heads that the model itself has.
    Nothing is ``draft_model``, or ``ngram`` where there is no such model."""
    model: str = ""
    """Folder of the draft model; nothing for the one in the box, beside the model in the box."""
    num_speculative_tokens: Number = 4
    """Guessed at a time, at most."""
    prompt_lookup_max: Number = 4
    """Last tokens that are looked for in the text before them, at most and at least."""
    prompt_lookup_min: Number = 2
    adaptive: bool = True
    """Stop guessing while it makes steps slower than it makes them fewer."""

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise invalid("speculative_config", "prompt_lookup_min must be at most prompt_lookup_max")
        if self.model and self.method not in ("", "draft_model"):
            raise invalid("speculative_config", f"the method {self.method} takes no model")

    @classmethod
    def read(cls, text: str) -> Self | None:
        """From the option's JSON; None where it is empty.

        Raises ``PenstockError`` (``invalid``) for what is no such object.
        """
        if not text.strip():
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise invalid("speculative_config", str(error)) from error
