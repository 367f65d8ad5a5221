"""Items for models of text that clients of OpenAI ask: `Completion`, `Chat` and `Delta`.

A model whose items are `Completion` (or `Chat`) and that yields texts answers at `/v1/completions`
(or `/v1/chat/completions`), whole and as a stream. A subclass with further fields takes further
parameters: `class MyChat(carpool.openai.Chat): top_k: int = 0`. See "Protocols" in the docs.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

__all__ = ["Chat", "Completion", "Delta", "Message", "Sampling"]

_CHARACTERS_A_TOKEN: Final = 4  # a common estimate for English
_DEFAULT_MAX_TOKENS: Final = 256


class Sampling(msgspec.Struct, kw_only=True):
    """What completions and chats have in common.

    Attributes:
        max_tokens: The most tokens that the answer may have; None leaves it to the model.
        temperature: How random the choice of tokens is; None leaves it to the model.
        top_p: The probability of the tokens to choose among; None leaves it to the model.
        seed: Of the random choice; of several answers to one request, each gets another one.
        stop: Texts at which the answer ends. The server cuts the answer there in any case, and
            cancels a stream.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] = []


class Completion(Sampling, kw_only=True):
    """An item of a model that goes on with a text.

    Attributes:
        prompt: The text, or its tokens.
    """

    prompt: str | list[int]


class Message(msgspec.Struct, kw_only=True):
    """One message of a chat.

    Attributes:
        role: Who has said it: "system", "user", "assistant" and so on.
        content: A text, or a list of parts as OpenAI describes them; None if there is none.
        name: Of the participant, if several have one role.
    """

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text; parts that are no text are left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content or ())


class Chat(Sampling, kw_only=True):
    """An item of a model that goes on with a chat.

    Attributes:
        messages: What was said so far. Dicts are made into messages.

    Raises:
        msgspec.ValidationError: One of them is no message.
    """

    messages: list[Message]

    def __post_init__(self) -> None:
        messages: list[Any] = self.messages
        if any(type(message) is dict for message in messages):
            self.messages = msgspec.convert(messages, list[Message])


class Delta(msgspec.Struct):
    """A part of an answer that says more than its text.

    Attributes:
        text: What is added to the answer.
        finish_reason: Why the answer ends with this part: "stop" or "length", for example; None if
            it goes on.
        tokens: How many tokens the text is.
    """

    text: str = ""
    finish_reason: str | None = None
    tokens: int = 1


def tokens(item: Completion | Chat) -> int:
    """Return how many tokens a request may come to hold, as `Stage(size=carpool.openai.tokens)`.

    The prompt is counted with four characters a token unless it comes as tokens, and the answer
    with `max_tokens`, or with 256.

    Args:
        item: The request.
    """
    prompt: str | list[int]
    if isinstance(item, Chat):
        prompt = "".join(message.text for message in item.messages)
    else:
        prompt = item.prompt
    n = len(prompt) if isinstance(prompt, list) else -(-len(prompt) // _CHARACTERS_A_TOKEN)
    return n + (_DEFAULT_MAX_TOKENS if item.max_tokens is None else item.max_tokens)
