"""Completions and chats of OpenAI's API: requests as items, and texts as choices, whole or as a
stream of chunks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Final

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.hints import schema
from carpool.engine.wire.payload import OBJECT
from carpool.errors import InvalidRequest, ModelError
from carpool.http.exchange import HttpResponse
from carpool.http.protocols.base import ModelOfApp, ShownError, Submission
from carpool.http.protocols.wording import as_response, value_in
from carpool.openai import Chat, Completion, Delta, Message, Sampling

_MOST_CHOICES: Final = 128
_MOST_STOPS: Final = 16
_LONGEST_STOP: Final = 1000  # characters: each part is compared with every beginning of a stop
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""Values of parameters that ask for nothing; many clients send them always."""

_encode = msgspec.json.Encoder().encode
CountTokens = Callable[[Any], int]


def count_tokens(counter: CountTokens | None, value: Any) -> int:
    """Return how many tokens an input has: those of a list, or as a model counts them; 0 if it
    cannot.
    """
    if isinstance(value, list):
        return len(value)
    return 0 if counter is None else counter(value)


class TextForm:
    """The differences between completions and chats."""

    item: ClassVar[type[Sampling]]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def choice(self, text: str) -> dict[str, Any]:
        """Return the content of a choice of a whole answer."""
        raise NotImplementedError

    def delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Return the content of a choice of a chunk."""
        raise NotImplementedError

    def prompts(self, parameters: dict[str, Any]) -> list[Any]:
        """Return the prompts of a request that has several; empty if it does not."""
        return []

    def prompt_tokens(self, item: Any, count: CountTokens) -> int:
        """Return how many tokens an item has before it is answered."""
        raise NotImplementedError


class CompletionForm(TextForm):
    """Texts that are gone on with."""

    item = Completion
    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None}

    def delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return {"text": text, "logprobs": None}

    def prompts(self, parameters: dict[str, Any]) -> list[Any]:
        prompt = parameters.get("prompt")
        if prompt == [] or (isinstance(prompt, list) and [] in prompt):
            raise InvalidRequest("`prompt` is empty: it must have at least one text or list of tokens")
        return prompt if isinstance(prompt, list) and not all(type(each) is int for each in prompt) else []

    def prompt_tokens(self, item: Any, count: CountTokens) -> int:
        return count(item.prompt)


class ChatForm(TextForm):
    """Chats that are gone on with."""

    item = Chat
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None}

    def delta(self, text: str, *, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, **({"content": text} if text or is_first else {})}, "logprobs": None}

    def prompt_tokens(self, item: Any, count: CountTokens) -> int:
        messages: list[Message] = item.messages
        return sum(count(message.text) for message in messages)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False


class Wishes(msgspec.Struct):
    """The parts of a request that are not for the model."""

    n: int = 1
    stream: bool = False
    stream_options: _StreamOptions = msgspec.field(default_factory=_StreamOptions)
    user: str = ""

    @classmethod
    def read(cls, members: dict[str, bytes]) -> tuple[Wishes, dict[str, Any]]:
        """Return the wishes in a request, and its other members. Raises `InvalidRequest`."""
        values = {name: value_in(raw) for name, raw in members.items() if name != "model"}
        own = {name: values.pop(name) for name in cls.__struct_fields__ if name in values}
        try:
            wishes = msgspec.convert(own, cls)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error)) from None
        if not 1 <= wishes.n <= _MOST_CHOICES:
            raise InvalidRequest(f"`n` must be from 1 to {_MOST_CHOICES}, not {wishes.n}")
        return wishes, values


def submission_of(
    model: ModelOfApp,
    form: TextForm,
    kind: type,
    wishes: Wishes,
    parameters: dict[str, Any],
    counter: CountTokens | None,
    created: int,
    nbytes: int,
) -> Submission:
    """Return the submission of a request.

    Raises:
        InvalidRequest: The parameters do not fit, or would be too many items.
    """
    prompts = form.prompts(parameters)
    _check_size(model.allowance(nbytes), parameters, len(prompts) or 1, wishes.n, nbytes)
    of_prompts = ({**parameters, "prompt": each} for each in prompts) if prompts else [parameters]
    items = [item for each in of_prompts for item in _items_of(kind, each, wishes.n)]
    about = About(form, form.prefix + secrets.token_hex(12), created, model.name)
    n = sum(form.prompt_tokens(item, partial(count_tokens, counter)) for item in items[:: wishes.n])
    terms = ChoiceTerms(items[0].stop, items[0].max_tokens, counter) if items else ChoiceTerms([], None, None)
    respond = partial(_respond, about, n, terms)
    if not wishes.stream:
        return Submission(model, items, respond, sent_as=OBJECT)
    tells_usage, is_yielded = bool(wishes.stream_options.include_usage), model.gives.in_parts
    writer = Chunks(about, len(items), n, terms, is_yielded=is_yielded, tells_usage=tells_usage)
    return Submission(model, items, respond, sent_as=OBJECT, parts=writer)


def _check_size(allowance: Allowance, parameters: dict[str, Any], prompts: int, n: int, nbytes: int) -> None:
    """Raise `InvalidRequest` (413) if a request would make too many items, or too large ones: each
    has a copy of all parameters but the other prompts.
    """
    allowance.check_items(prompts * n, "this request, with `n` answers to each prompt,")
    shared = len(_encode({**parameters, "prompt": None})) if prompts > 1 else 0
    copies = (nbytes + shared * (prompts - 1)) * n
    allowance.take_bytes(copies, "the request, once for each answer,", "ask for fewer answers at a time")


def _items_of(kind: type, parameters: dict[str, Any], n: int) -> list[Any]:
    parameters = dict(parameters)
    if "max_completion_tokens" in parameters:
        parameters["max_tokens"] = parameters.pop("max_completion_tokens")
    if isinstance(parameters.get("stop"), str):
        parameters["stop"] = [parameters["stop"]]
    known = {each.encode_name for each in msgspec.structs.fields(kind)}
    for name in parameters.keys() & _NEUTRAL.keys() - known:
        if _asks_for_nothing(name, parameters[name]):
            del parameters[name]
    unknown = sorted(parameters.keys() - known)
    if unknown:
        raise InvalidRequest(f"Unrecognized request argument supplied: {unknown[0][:100]}")
    try:
        item: Any = msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    if not getattr(item, "messages", True):
        raise InvalidRequest("`messages` must have at least one message")
    if len(item.stop) > _MOST_STOPS or not all(0 < len(stop) <= _LONGEST_STOP for stop in item.stop):
        raise InvalidRequest(f"`stop` must be up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters")
    if item.max_tokens is not None and item.max_tokens < 1:
        raise InvalidRequest(f"`max_tokens` must be at least 1, not {item.max_tokens}")
    if n == 1 or item.seed is None:
        return [item] * n
    return [msgspec.structs.replace(item, seed=item.seed + i) for i in range(n)]


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Report whether a parameter has a value that asks for nothing; 0 is not False."""
    is_bool = type(value) is bool
    return any(value == each and is_bool == (type(each) is bool) for each in _NEUTRAL[name])


@dataclass(frozen=True, slots=True)
class About:
    """The fields that every piece of an answer repeats.

    Attributes:
        created: When it was asked for.
        model: The name of the model.
    """

    form: TextForm
    id: str
    created: int
    model: str

    def as_object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return an answer, or a piece of it."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _respond(about: About, prompt_tokens: int, terms: ChoiceTerms, results: list[Any]) -> HttpResponse:
    choices, n = [], 0
    for index, result in enumerate(results):
        is_yielded = isinstance(result, list)
        choice = Choice(terms, is_yielded)
        text = "".join([*map(choice.add, result if is_yielded else [result]), choice.end()])
        n += choice.tokens
        choices.append({"index": index, **about.form.choice(text), "finish_reason": choice.finish_reason})
    return as_response(about.as_object(about.form.kind, choices, usage=_usage(prompt_tokens, n)))


def delta_of(part: Any) -> Delta:
    """Return a part of a model as a `Delta`. Raises `ModelError` if it is no text."""
    if isinstance(part, Delta):
        return part
    if isinstance(part, str):
        return Delta(part)
    raise ModelError(f"the model returned {schema.type_name(type(part))}, not a text or a Delta", code="bad_result")


@lru_cache(64)
def _shorter(stop: str) -> list[int]:
    """Return, for each length of a beginning of a text, how long the longest shorter one is that it
    ends with.
    """
    found, n = [0, 0], 0
    for c in stop[1:]:
        while n and stop[n] != c:
            n = found[n]
        n += stop[n] == c
        found.append(n)
    return found


@dataclass(frozen=True, slots=True)
class ChoiceTerms:
    """Where the answers to a request end, and how they are counted.

    Attributes:
        max_tokens: How many tokens one may have; None if the client has not said it.
        count: Counts the tokens of a text; None if the model cannot, and each part is one.
    """

    stops: Sequence[str]
    max_tokens: int | None
    count: CountTokens | None


@dataclass(slots=True)
class Choice:
    """How far the text of one choice has come; it is cut at the first stop.

    Attributes:
        is_yielded: Whether the model gives it in parts, one for each token.
        tokens: How many there were; all are counted once it has ended.
    """

    terms: ChoiceTerms
    is_yielded: bool = False
    finish_reason: str = ""
    tokens: int = 0
    has_begun: bool = False
    _held: str = field(default="", repr=False)
    _n_parts: int = 0
    _uncounted: list[str] = field(default_factory=list, repr=False)
    _cut: int = 0  # characters of these that are not sent
    _begun: list[int] = field(default_factory=list, repr=False)  # of each stop, how much the held text ends with

    def add(self, part: Any) -> str:
        """Take the next part, and return the text that can be sent now.

        Raises:
            ModelError: It is neither a text nor a `Delta`.
        """
        delta = delta_of(part)
        if self.finish_reason:
            return ""
        self._n_parts += 1
        if delta is not part and self.terms.count is not None:
            self._uncounted.append(delta.text)
        else:
            self.tokens += delta.tokens
        text, stops = self._held + delta.text, self.terms.stops
        ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if ends:
            self._held, self.finish_reason, self._cut = "", "stop", len(text) - min(ends)
            return text[: min(ends)]
        if delta.finish_reason is not None:
            self._held, self.finish_reason = "", delta.finish_reason
            return text
        kept = self._kept(delta.text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _kept(self, new: str) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop.

        Each new character is looked at once or twice, however long the stops are (Knuth, Morris and
        Pratt, 1977).
        """
        begun = self._begun or [0] * len(self.terms.stops)
        for i, stop in enumerate(self.terms.stops):
            n, shorter = begun[i], _shorter(stop)
            if len(new) >= len(stop):
                n = 0
            for c in new[-len(stop) + 1 :] if len(stop) > 1 else "":
                while n and stop[n] != c:
                    n = shorter[n]
                n += stop[n] == c
            begun[i] = n
        self._begun = begun
        return max(begun, default=0)

    def end(self) -> str:
        """Take note that the answer has ended, and return the text that was kept back."""
        held, self._held = self._held, ""
        if self._uncounted:
            text = "".join(self._uncounted)
            self._uncounted.clear()
            self.tokens += self.terms.count(text[: max(0, len(text) - self._cut)])  # type: ignore[misc] # there is one
        if not self.finish_reason:
            self.finish_reason = "length" if self._has_reached_limit else "stop"
        return held

    @property
    def _has_reached_limit(self) -> bool:
        """Whether as many tokens have come as were asked for at most, as far as that is known."""
        most, is_known = self.terms.max_tokens, self.is_yielded or self.terms.count is not None
        if most is None or not is_known:
            return False
        return self.tokens >= most or (self.is_yielded and self._n_parts == most)


class Chunks:
    """Writes answers as a stream of chunks.

    Args:
        tells_usage: Whether the usage comes at the end.
    """

    def __init__(
        self, about: About, n: int, prompt_tokens: int, terms: ChoiceTerms, *, is_yielded: bool, tells_usage: bool
    ) -> None:
        self._about = about
        if not tells_usage and terms.max_tokens is None:
            terms = replace(terms, count=None)  # nobody asks, and an endless text would be kept
        self._choices = [Choice(terms, is_yielded) for _ in range(n)]
        self._prompt_tokens = prompt_tokens
        self._sends_usage = tells_usage

    def part(self, index: int, part: Any) -> bytes:
        choice = self._choices[index]
        parts = [part]
        if isinstance(part, list):  # a whole answer in the place of its parts
            parts, choice.is_yielded = part, True
        text = "".join(map(choice.add, parts))
        return self._chunk(index, text) if text else b""

    def is_over(self, index: int) -> bool:
        return bool(self._choices[index].finish_reason)

    def end(self, index: int) -> bytes:
        choice = self._choices[index]
        rest = choice.end()
        first = self._chunk(index, rest) if rest else b""
        return first + self._chunk(index, "", choice.finish_reason)

    def close(self) -> bytes:
        usage = b""
        if self._sends_usage:
            n = sum(choice.tokens for choice in self._choices)
            last = self._about.as_object(self._about.form.chunk_kind, [], usage=_usage(self._prompt_tokens, n))
            usage = b"data: %b\n\n" % _encode(last)
        return usage + b"data: [DONE]\n\n"

    def error(self, error: ShownError) -> bytes:
        kind = "rate_limit_error" if error.status == 429 else "server_error"
        shown = {"message": error.message, "type": kind, "param": None, "code": error.code}
        return b"data: %b\n\n" % _encode({"error": {**shown, "request_id": error.request_id}})

    def _chunk(self, index: int, text: str, finish_reason: str | None = None) -> bytes:
        choice, form = self._choices[index], self._about.form
        content = form.delta(text, is_first=not choice.has_begun)
        choice.has_begun = True
        usage = {"usage": None} if self._sends_usage else {}
        of_choice = {"index": index, **content, "finish_reason": finish_reason}
        return b"data: %b\n\n" % _encode(self._about.as_object(form.chunk_kind, [of_choice], **usage))
