"""The tokenizer that ``LLM.get_tokenizer`` returns: transformers' class, or a plain one with the same methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.core.errors import invalid
from penstock.text import Tokenizer


def hugging_face_tokenizer(tokenizer: Tokenizer) -> Any:
    """Convert a tokenizer to transformers' ``PreTrainedTokenizerFast``, with the same token ids, special tokens and
    chat templates. Without transformers: a ``PlainTokenizer``."""
    try:
        import tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        return PlainTokenizer(tokenizer)
    templates = tokenizer.templates
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.to_json()),
        chat_template=tokenizer.template_source if len(templates) < 2 else templates,
        clean_up_tokenization_spaces=False,
        **tokenizer.special,
    )


class Encoding(dict[str, Any]):
    """Result of calling a tokenizer: a dict whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the encoding has no {name!r}, only {', '.join(self)}")
        return self[name]


class PlainTokenizer:
    """The methods of transformers' tokenizers that need no transformers. Other arguments are refused."""

    is_fast = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str | Sequence[str], text_pair: None = None, add_special_tokens: bool = True) -> Encoding:
        """Encode a text, or several."""
        if text_pair is not None:
            raise invalid("text_pair", "needs transformers: install it, or encode both texts separately")
        one = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        ids = [self._tokenizer.encode(each, add_special_tokens) for each in texts]
        masks = [[1] * len(each) for each in ids]
        return Encoding(input_ids=ids[0] if one else ids, attention_mask=masks[0] if one else masks)

    def encode(self, text: str, text_pair: None = None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self(text, text_pair, add_special_tokens)["input_ids"]
        return ids

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """Text of each sequence."""
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> str | list[int] | Encoding:
        """Render a chat.

        Args:
            tokenize: return token ids; False: the text.
            return_dict: return the token ids as ``input_ids`` of a dict.
            variables: variables of the chat template.
        """
        flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        text = self._tokenizer.render(conversation, tools=tools, **flags, **variables)
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else encoding["input_ids"]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Id of a token, or of each of several; None for an unknown token."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str]:
        """Token of an id, or of each of several, as written in the vocabulary."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        return [self._tokenizer.id_to_token(one) for one in ids]

    def get_vocab(self) -> dict[str, int]:
        """Id of each token, including special tokens."""
        return {self._tokenizer.id_to_token(i): i for i in range(len(self))}

    def __len__(self) -> int:
        return len(self._tokenizer.vocabulary)

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added tokens."""
        return self._tokenizer.vocab_size

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.template_source

    @property
    def all_special_tokens(self) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) for token_id in self.all_special_ids]

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    def __getattr__(self, name: str) -> Any:
        """``bos_token``, ``eos_token_id`` …: special tokens by role; None for a role without a token."""
        role = name.removesuffix("_id")
        if not role.endswith("_token") or role.startswith("_"):
            raise AttributeError(f"the tokenizer has no {name!r} without transformers: pip install transformers")
        token = self._tokenizer.special.get(role)
        return token if role == name or token is None else self._tokenizer.token_to_id(token)
