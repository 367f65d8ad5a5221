"""OpenAI's API: models, embeddings, completions and chats."""

from __future__ import annotations

import array
import base64
import math
import secrets
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import msgspec

from carpool.engine.rows import is_array_type
from carpool.engine.wire.payload import ARRAYS, OBJECT
from carpool.errors import InvalidRequest, ModelError, too_large
from carpool.http.exchange import REQUEST_ID, HttpResponse
from carpool.http.protocols.base import (
    HttpProtocol,
    ModelOfApp,
    ProtocolRequest,
    ProtocolRoute,
    ShownError,
    Submission,
    model_asked,
    unfit,
)
from carpool.http.protocols.openai_text import (
    ChatForm,
    CompletionForm,
    CountTokens,
    TextForm,
    Wishes,
    count_tokens,
    submission_of,
)
from carpool.http.protocols.wording import (
    UNPROCESSABLE,
    as_response,
    as_written,
    check_finite,
    members_of,
    name_in,
    routes_of_list,
    struct_of,
)

_MOST_INPUTS: Final = 2048  # that OpenAI takes, and its clients send, whatever the queue holds
_RETRIED: Final = frozenset({408, 409, 429, 503})


class _Embeddings(msgspec.Struct):
    input: Any  # of several kinds of lists in a union msgspec reads only one
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    model: str = ""
    user: str = ""


class OpenAI(HttpProtocol):
    """OpenAI's API; the body of a request says which model is asked."""

    name = "openai"
    prefixes = ("/v1/",)

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        yield from routes_of_list(models)
        yield ProtocolRoute(
            "POST",
            "/v1/embeddings",
            partial(_embed, models),
            summary="Vectors of texts",
            fits=lambda: any(map(_embeds, models)),
        )
        for path, form, summary in (
            ("/v1/completions", CompletionForm(), "Go on with a text"),
            ("/v1/chat/completions", ChatForm(), "Go on with a chat"),
        ):
            yield ProtocolRoute(
                "POST",
                path,
                partial(_complete, models, form),
                summary=summary,
                writes=("application/json", "text/event-stream"),
                fits=partial(_is_any_asked, models, form),
            )

    def error(self, error: ShownError) -> HttpResponse:
        """Return an error as OpenAI has them; with a header that says whether to try again."""
        status = 400 if error.status == UNPROCESSABLE else error.status
        shown = {"message": error.message, "type": _type_of(status), "param": None, "code": error.code}
        should_retry = b"true" if status in _RETRIED else b"false"
        return as_response({"error": shown}, status)._replace(headers=((b"x-should-retry", should_retry),))


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def with_id(request: ProtocolRequest, response: HttpResponse) -> HttpResponse:
    """Return a response with a request id of ours, unless the client has given one."""
    if REQUEST_ID in request.headers:
        return response
    return response._replace(headers=(*response.headers, (REQUEST_ID, b"req_" + secrets.token_hex(8).encode())))


# -- embeddings


def _embed(models: Sequence[ModelOfApp], request: ProtocolRequest) -> Submission:
    members = members_of(request.body)
    unknown = members.keys() - set(_Embeddings.__struct_fields__)
    if unknown:
        raise InvalidRequest(f"Unrecognized request argument supplied: {min(unknown)[:100]}")
    asked = struct_of(members, _Embeddings)
    model = model_asked(models, name_in(members), _embeds, must_be_named=True)
    if not _gives_vectors(model.gives.output_type):
        raise unfit(f"the model {model.name} returns no vectors, so it has no embeddings")
    inputs = _inputs(asked.input)
    most = max(model.allowance(len(request.body)).items, _MOST_INPUTS)
    if len(inputs) > most:
        raise too_large(f"`input` has more than {most:.0f} inputs: send several requests")
    _check_inputs(model, inputs)
    if asked.dimensions is not None:
        _check_dimensions(model, asked.dimensions)
    respond = partial(_respond_with_vectors, request, model, asked, inputs)
    return Submission(model, inputs, respond, sent_as=OBJECT, wanted_as=ARRAYS, waits=True)


def _inputs(given: Any) -> list[Any]:
    if given in ([], [[]]):
        raise InvalidRequest("`input` is empty: it must have at least one text or list of tokens")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(each) is int for each in given):
            return [given]
        if all(isinstance(each, str) for each in given):
            return given
        if all(isinstance(each, list) and each and all(type(token) is int for token in each) for each in given):
            return given
    raise InvalidRequest("`input` must be a text, a list of texts, a list of tokens, or a list of lists of tokens")


def _check_inputs(model: ModelOfApp, inputs: list[Any]) -> None:
    takes = model.takes.input_type
    if takes is Any:
        return
    are_texts = isinstance(inputs[0], str)
    takes_tokens = takes == list[int] or is_array_type(takes)
    takes_texts = takes is str
    if set(typing.get_args(takes)) == {str, list[int]}:
        takes_tokens = takes_texts = True
    if not (takes_texts or takes_tokens):
        raise unfit(f"the model {model.name} takes neither texts nor tokens, so it has no embeddings")
    if are_texts and not takes_texts:
        raise InvalidRequest(f"the model {model.name} takes lists of tokens, not texts")
    if not are_texts and not takes_tokens:
        raise InvalidRequest(
            f"the model {model.name} takes texts, not lists of tokens: clients such as LangChain's send texts with"
            " check_embedding_ctx_length=False"
        )


def _check_dimensions(model: ModelOfApp, dimensions: int) -> None:
    known = getattr(getattr(model.service.graph[-1], "model", None), "dimensions", None)
    if not isinstance(known, Sequence) or dimensions not in known:
        sizes = ", ".join(map(str, known)) if isinstance(known, Sequence) else ""
        choice = f"it has {sizes}" if sizes else "leave `dimensions` out"
        raise InvalidRequest(f"the model {model.name} does not have vectors of {dimensions} dimensions: {choice}")


def _embeds(model: ModelOfApp) -> bool:
    return _gives_vectors(model.gives.output_type) and model.formats.holds(OBJECT, ARRAYS)


def _gives_vectors(kind: Any) -> bool:
    if kind is Any or is_array_type(kind):
        return True
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    return isinstance(origin, type) and issubclass(origin, Sequence) and bool(args) and args[0] in (float, int)


def _respond_with_vectors(
    request: ProtocolRequest, model: ModelOfApp, asked: _Embeddings, inputs: list[Any], results: list[Any]
) -> HttpResponse:
    written = [_vector(result, asked) for result in results]
    data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(written)]
    counter = counter_of(model)
    n = sum([count_tokens(counter, value) for value in inputs])  # `map` would end at its StopIteration
    usage = {"prompt_tokens": n, "total_tokens": n}
    return with_id(request, as_response({"object": "list", "data": data, "model": model.name, "usage": usage}))


def _vector(result: Any, asked: _Embeddings) -> msgspec.Raw | str:
    """Return a vector as the client wants it. Raises `ModelError` if a result is none.

    Each is written by itself: one call that wrote all of many thousand would hold all threads up.
    """
    try:
        values = [float(each) for each in (result.tolist() if hasattr(result, "tolist") else result)]
    except (TypeError, ValueError):
        raise ModelError("the model returned something else than a vector", code="bad_result") from None
    if asked.dimensions is not None:
        values = values[: asked.dimensions]
        length = math.hypot(*values)  # squares of large numbers would be infinite
        values = [each / length for each in values] if length else values
    check_finite(values)
    if asked.encoding_format == "float":
        return as_written(values)
    packed = array.array("f", values)
    check_finite(packed)  # it has less room
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def counter_of(model: ModelOfApp) -> CountTokens | None:
    """Return the counter of the tokens of a text, a static method `count_tokens` of the model; None
    if it has none.
    """
    for stage in model.service.stages:
        count: CountTokens | None = getattr(stage.model, "count_tokens", None)
        if count is not None:
            return lambda text: int(count(text))
    return None


# -- completions and chats


def _is_any_asked(models: Sequence[ModelOfApp], form: TextForm) -> bool:
    return any(_is_asked(form, model) for model in models)


def _is_asked(form: TextForm, model: ModelOfApp) -> bool:
    return _is_taken(form, model) and model.formats.holds(OBJECT, OBJECT)


def _is_taken(form: TextForm, model: ModelOfApp) -> bool:
    kind = model.takes.input_type
    return isinstance(kind, type) and issubclass(kind, form.item)


def _complete(models: Sequence[ModelOfApp], form: TextForm, request: ProtocolRequest) -> Submission:
    members = members_of(request.body)
    model = model_asked(models, name_in(members), partial(_is_asked, form), must_be_named=True)
    kind = model.takes.input_type
    if not _is_taken(form, model):
        raise unfit(
            f"the model {model.name} takes no carpool.openai.{form.item.__name__}, so it does not answer at"
            f" {request.path}"
        )
    wishes, parameters = Wishes.read(members)
    counter, now, nbytes = counter_of(model), int(time.time()), len(request.body)
    submission = submission_of(model, form, kind, wishes, parameters, counter, now, nbytes)
    respond = submission.respond
    return replace(submission, respond=lambda results: with_id(request, respond(results)))
