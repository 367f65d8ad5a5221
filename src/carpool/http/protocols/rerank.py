"""Reranking, in the forms of Cohere (`/v1/rerank`, `/v2/rerank`) and of TEI (`/rerank`): a query
and documents, for models that score pairs of texts.
"""

from __future__ import annotations

import secrets
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from carpool.engine.wire.payload import ARRAYS, MSGPACK
from carpool.errors import InvalidRequest, ModelError
from carpool.http.exchange import HttpResponse
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
from carpool.http.protocols.rows import fields_of
from carpool.http.protocols.wording import as_response, check_finite, members_of, name_in, struct_of, without_details


class _Rerank(msgspec.Struct):
    query: str
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    top_n: int | None = None
    return_documents: bool = False
    return_text: bool = False


_pack = msgspec.msgpack.Encoder().encode

MakePair = Callable[[str, str], Any]


class Rerank(HttpProtocol):
    """Reranking for models of pairs of texts; with several models the body says which one."""

    name = "rerank"
    prefixes = ("/rerank", "/v2/rerank", "/v1/rerank")

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            yield ProtocolRoute(
                "POST",
                path,
                partial(_answer, models),
                summary="Sort documents by how well they fit a query",
                is_alias=path != "/v1/rerank",
                fits=lambda: any(map(_reranks, models)),
            )

    def error(self, error: ShownError) -> HttpResponse:
        response = without_details(error)
        return as_response({"message": error.message, "error": error.message}, response.status)


def _answer(models: Sequence[ModelOfApp], request: ProtocolRequest) -> Submission:
    members = members_of(request.body)
    asked = struct_of(members, _Rerank)
    if asked.top_n is not None and asked.top_n < 1:
        raise InvalidRequest(f"`top_n` must be at least 1, not {asked.top_n}")
    if (asked.documents is None) == (asked.texts is None):
        raise InvalidRequest('the body must have either "documents", as Cohere has them, or "texts", as TEI has them')
    model = model_asked(models, name_in(members), _reranks)
    make_pair = pair_maker(model.takes.input_type)
    if make_pair is None:
        raise unfit(f"the model {model.name} takes no pairs of texts, so it cannot rerank")
    given = asked.documents or asked.texts or ()
    allowance = model.allowance(len(request.body))
    allowance.check_items(len(given), "this request")
    repeated = len(given) * len(asked.query.encode())
    allowance.take_bytes(repeated, "the query, once beside each document,", "send fewer documents")
    documents = [_text_of(each) for each in given]
    if not documents:
        raise InvalidRequest("there are no documents")
    items = [_pack(make_pair(asked.query, document)) for document in documents]
    return Submission(model, items, partial(_respond, asked, documents), sent_as=MSGPACK, wanted_as=ARRAYS)


def _reranks(model: ModelOfApp) -> bool:
    return pair_maker(model.takes.input_type) is not None and model.formats.holds(MSGPACK, ARRAYS)


def pair_maker(kind: Any) -> MakePair | None:
    """Return the maker of an item of a query and a document; None if a type holds no two texts."""
    fields = fields_of(kind)
    if fields is not None:
        names = [name for name, (hint, _) in fields.items() if hint is str]
        needed = [name for name, (_, is_optional) in fields.items() if not is_optional]
        if len(names) != 2 or not set(needed) <= set(names):
            return None
        return lambda query, document: dict(zip(names, (query, document), strict=True))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if (origin is tuple and args == (str, str)) or (origin is list and args == (str,)):
        return lambda query, document: [query, document]
    return None


def _text_of(document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise InvalidRequest('a document must be a text, or an object with a "text"')
    return text


def _respond(asked: _Rerank, documents: list[str], results: list[Any]) -> HttpResponse:
    scores = [_score(result) for result in results]
    check_finite(scores)  # NaN has no place in an order
    ranked = sorted(enumerate(scores), key=lambda each: -each[1])
    if asked.top_n is not None:
        ranked = ranked[: asked.top_n]
    if asked.texts is not None:
        return as_response(
            [
                {"index": i, "score": score, **({"text": documents[i]} if asked.return_text else {})}
                for i, score in ranked
            ]
        )
    shown = [
        {
            "index": i,
            "relevance_score": score,
            **({"document": {"text": documents[i]}} if asked.return_documents else {}),
        }
        for i, score in ranked
    ]
    return as_response({"id": secrets.token_hex(8), "results": shown, "meta": {"api_version": {"version": "2"}}})


def _score(result: Any) -> float:
    try:
        score = float(result)
    except (TypeError, ValueError):
        raise ModelError(
            f"the model returned {type(result).__name__} for a pair, not a score", code="bad_result"
        ) from None
    return score
