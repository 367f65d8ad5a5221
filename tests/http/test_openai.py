"""OpenAI's API: embeddings, completions and chats, whole and as streams; and reranking."""

from __future__ import annotations

import base64
import copy
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import carpool
from carpool import Service, Stage
from carpool.http.app import App
from carpool.openai import Chat, Completion, Delta, Message
from carpool.testing import served
from tests.http.streamed import asked as asked_in_parts
from tests.support.http.both_fronts import both_fronts
from tests.support.http.front import post
from tests.support.http.served import ask, fetched, posted
from tests.support.waiting import wait_until

STEPPED: list[str] = []


class Embed(carpool.Model):
    """Vectors of texts: their length, and the code of the first letter."""

    dimensions = (2,)

    @staticmethod
    def count_tokens(text: str) -> int:
        return len(text.split())

    def predict(self, xs: list[str]) -> list[list[float]]:
        return [[3.0, 4.0, float(len(x))] for x in xs]


def lengths(xs: list[str]) -> list[list[float]]:
    """Vectors of one number."""
    return [[float(len(x))] for x in xs]


class OfTokens(carpool.Model):
    """Vectors of tokens, as arrays."""

    def predict(self, xs: list[list[int]]) -> list[Any]:
        return [np.array(x, np.float32) for x in xs]


class Words(carpool.Model):
    """Goes on with a text: its words once more, one at a time."""

    @staticmethod
    def count_tokens(text: str) -> int:
        return len(text.split())

    def predict(self, x: Completion) -> Iterator[str | Delta]:
        assert isinstance(x.prompt, str)
        words = x.prompt.split()
        for n, word in enumerate(words):
            STEPPED.append(word)
            if word == "raise":
                raise RuntimeError("the secret is 1234")
            if word == "sleep":
                time.sleep(0.02)
            if n + 1 == x.max_tokens:
                yield Delta(word, "length")
                return
            yield word + " "


class Loud(Chat):
    """A chat with a parameter of the model's own."""

    loudness: int = 1


class Parrot(carpool.Model):
    """Says the last message again, letter by letter."""

    def predict(self, x: Loud) -> Iterator[str]:
        yield from x.messages[-1].text + "!" * x.loudness


def whole(x: Completion) -> str:
    """A model that returns whole answers."""
    return f"<{x.prompt}>"


def score(pair: tuple[str, str]) -> float:
    """How many letters two texts have in common."""
    return float(len(set(pair[0]) & set(pair[1])))


@pytest.fixture(scope="module")
def doors() -> Iterator[Any]:
    services = [
        Service(
            Stage(
                model,
                max_batch_size=8 if isinstance(model, type) and issubclass(model, (Embed, OfTokens)) else None,
                max_rows=8 if model in (Words, Parrot) else None,
                run_in="thread",
                workers=1,
            ),
            name=name,
        )
        for name, model in (
            ("embed", Embed),
            ("tokens", OfTokens),
            ("words", Words),
            ("parrot", Parrot),
            ("whole", whole),
            ("score", score),
        )
    ]
    with both_fronts(App(*services)) as both:
        yield both


def streamed(port: int, path: str, body: Any) -> tuple[list[Any], str]:
    """The chunks of a stream, and the last line of data."""
    with asked_in_parts(port, post(json.dumps(body).encode(), path)) as reply:
        assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream"
        lines = [line[6:] for line in reply.body().decode().split("\n\n") if line.startswith("data: ")]
    *chunks, last = lines
    return [json.loads(chunk) for chunk in chunks], last


# -- embeddings


def test_embeddings(port: int) -> None:
    """Texts and lists of them have vectors, as lists or base64, and the usage is counted."""
    status, one = posted(port, "/v1/embeddings", {"model": "embed", "input": "a b"})
    assert status == 200 and one["object"] == "list" and one["model"] == "embed"
    assert one["data"] == [{"object": "embedding", "index": 0, "embedding": [3.0, 4.0, 3.0]}]
    assert one["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    _, two = posted(port, "/v1/embeddings", {"model": "embed", "input": ["a", "bc"], "encoding_format": "base64"})
    assert [each["index"] for each in two["data"]] == [0, 1]
    assert np.frombuffer(base64.b64decode(two["data"][1]["embedding"]), "<f4").tolist() == [3.0, 4.0, 2.0]
    _, cut = posted(port, "/v1/embeddings", {"model": "embed", "input": "a", "dimensions": 2})
    assert cut["data"][0]["embedding"] == [0.6, 0.8]
    for tokens, wanted in (([1, 2], [[1.0, 2.0]]), ([[1], [2]], [[1.0], [2.0]])):
        _, answer = posted(port, "/v1/embeddings", {"model": "tokens", "input": tokens})
        assert [each["embedding"] for each in answer["data"]] == wanted


BAD_EMBEDDINGS: list[tuple[str, Any, int]] = [
    ("no JSON", b"{", 400),
    ("no model", {"input": "a"}, 400),
    ("an unknown model", {"model": "none", "input": "a"}, 404),
    ("a model of texts", {"model": "words", "input": "a"}, 404),
    ("no input", {"model": "embed"}, 400),
    ("an empty input", {"model": "embed", "input": []}, 400),
    ("a number", {"model": "embed", "input": 3}, 400),
    ("mixed inputs", {"model": "embed", "input": ["a", 1]}, 400),
    ("tokens for a model of texts", {"model": "embed", "input": [1]}, 400),
    ("texts for a model of tokens", {"model": "tokens", "input": "a"}, 400),
    ("an unknown format", {"model": "embed", "input": "a", "encoding_format": "hex"}, 400),
    ("dimensions that there are not", {"model": "embed", "input": "a", "dimensions": 3}, 400),
    ("an unknown parameter", {"model": "embed", "input": "a", "colour": 1}, 400),
]


@pytest.mark.parametrize(("what", "body", "status"), BAD_EMBEDDINGS, ids=[each[0] for each in BAD_EMBEDDINGS])
def test_bad_embeddings(port: int, what: str, body: Any, status: int) -> None:
    """What is wrong is an error as OpenAI has them."""
    answer = ask(port, "/v1/embeddings", body)
    error = json.loads(answer.body)["error"]
    assert answer.status == status and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"]


def test_answers_have_a_request_id(port: int) -> None:
    """Clients log the id of a request, their own or else one of ours."""
    body = {"model": "embed", "input": "a"}
    assert ask(port, "/v1/embeddings", body).headers["x-request-id"].startswith("req_")
    assert ask(port, "/v1/embeddings", body, "X-Request-Id: mine").headers["x-request-id"] == "mine"


# -- completions


def test_a_whole_completion(port: int) -> None:
    """The parts of an answer are one text, with why it ended and the usage."""
    _, answer = posted(port, "/v1/completions", {"model": "words", "prompt": "a b c"})
    assert answer["object"] == "text_completion" and answer["model"] == "words" and answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("a b c ", "stop", 0)
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    _, cut = posted(port, "/v1/completions", {"model": "words", "prompt": "a b c", "max_tokens": 2})
    assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == ("a b", "length")
    _, several = posted(port, "/v1/completions", {"model": "words", "prompt": ["a", "b"], "n": 2})
    assert [(each["index"], each["text"]) for each in several["choices"]] == [
        (0, "a "),
        (1, "a "),
        (2, "b "),
        (3, "b "),
    ]
    _, stopped = posted(port, "/v1/completions", {"model": "words", "prompt": "a b c", "stop": "b"})
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("a ", "stop")
    assert posted(port, "/v1/completions", {"model": "whole", "prompt": "x"})[1]["choices"][0]["text"] == "<x>"


def test_a_streamed_completion(port: int) -> None:
    """Chunks come as the model makes them, the last one says why, and `[DONE]` says that it is whole."""
    chunks, last = streamed(port, "/v1/completions", {"model": "words", "prompt": "a b", "stream": True})
    assert last == "[DONE]" and {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a ", "b ", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    body = {"model": "words", "prompt": "a b", "stream": True, "stream_options": {"include_usage": True}}
    chunks, last = streamed(port, "/v1/completions", body)
    assert last == "[DONE]" and chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    chunks, last = streamed(port, "/v1/completions", {"model": "words", "prompt": "a b", "stream": True, "n": 2})
    by_index = {i: "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in (0, 1)}
    assert by_index == {0: "a b ", 1: "a b "} and last == "[DONE]"
    chunks, last = streamed(port, "/v1/completions", {"model": "whole", "prompt": "x", "stream": True})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["<x>", ""] and last == "[DONE]"


def test_a_stop_ends_a_stream_and_what_makes_it(port: int) -> None:
    """Nothing of a stop is told, and the model makes no further parts."""
    STEPPED.clear()
    prompt = "one two " + "sleep " * 500
    chunks, last = streamed(
        port, "/v1/completions", {"model": "words", "prompt": prompt, "stream": True, "stop": ["o sl"]}
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one tw" and last == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    wait_until(_is_quiet)


def test_a_failure_after_the_first_chunk_is_no_whole_answer(port: int) -> None:
    """A broken stream ends with an error, and without `[DONE]`; before the first part it is a status."""
    chunks, last = streamed(port, "/v1/completions", {"model": "words", "prompt": "a sleep raise", "stream": True})
    error = json.loads(last)["error"]
    assert error["type"] == "server_error" and "1234" not in error["message"]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a ", "sleep "]
    status, answer = posted(port, "/v1/completions", {"model": "words", "prompt": "raise", "stream": True})
    assert (status, answer["error"]["type"]) == (500, "server_error")


def test_a_client_that_leaves_a_stream(doors: Any) -> None:
    """No parts are made for a client that has gone."""
    for door in doors:
        STEPPED.clear()
        body = json.dumps({"model": "words", "prompt": "sleep " * 500, "stream": True}).encode()
        with asked_in_parts(door.port, post(body, "/v1/completions")) as reply:
            wait_until(lambda: len(STEPPED) > 1)
            assert reply.status == 200
        wait_until(lambda: threading.active_count() > 0 and _is_quiet())


def _is_quiet() -> bool:
    n = len(STEPPED)
    time.sleep(0.1)
    return len(STEPPED) == n < 500


# -- chats


def test_chats(port: int) -> None:
    """A chat goes on with a message, whole or in pieces; a model may have parameters of its own."""
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "ab"}]},
    ]
    _, answer = posted(port, "/v1/chat/completions", {"model": "parrot", "messages": messages, "temperature": 0.5})
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "ab!", "refusal": None}
    _, loud = posted(port, "/v1/chat/completions", {"model": "parrot", "messages": messages, "loudness": 3})
    assert loud["choices"][0]["message"]["content"] == "ab!!!"
    chunks, last = streamed(port, "/v1/chat/completions", {"model": "parrot", "messages": messages, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert (
        deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "!"}, {}] and last == "[DONE]"
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    _, cut = posted(port, "/v1/chat/completions", {"model": "parrot", "messages": messages, "max_completion_tokens": 5})
    assert cut["choices"][0]["finish_reason"] == "stop"


M = [{"role": "user", "content": "a"}]
BAD_CHATS: list[tuple[str, Any, int]] = [
    ("no messages", {"model": "parrot"}, 400),
    ("a list of no messages", {"model": "parrot", "messages": []}, 400),
    ("messages without roles", {"model": "parrot", "messages": [{"content": "a"}]}, 400),
    ("an unknown parameter", {"model": "parrot", "messages": M, "logit_bias": {"1": 1}}, 400),
    ("no answers", {"model": "parrot", "messages": M, "n": 0}, 400),
    ("too many answers", {"model": "parrot", "messages": M, "n": 1000}, 400),
    ("an empty stop", {"model": "parrot", "messages": M, "stop": ""}, 400),
    ("no tokens", {"model": "parrot", "messages": M, "max_tokens": 0}, 400),
    ("a stream that is no bool", {"model": "parrot", "messages": M, "stream": "yes"}, 400),
    ("a model of completions", {"model": "words", "messages": M}, 404),
    ("an unknown model", {"model": "none", "messages": M}, 404),
    ("no model", {"messages": M}, 400),
]


@pytest.mark.parametrize(("what", "body", "status"), BAD_CHATS, ids=[each[0] for each in BAD_CHATS])
def test_bad_chats(port: int, what: str, body: Any, status: int) -> None:
    """What is wrong is an error as OpenAI has them, also where a stream was asked for."""
    for more in ({}, {"stream": True}):
        found, answer = posted(port, "/v1/chat/completions", {**more, **body})
        assert found == status and answer["error"]["type"] == "invalid_request_error", answer


def test_parameters_that_are_null_are_not_there(port: int) -> None:
    """Clients send null for what they leave open."""
    body = {"model": "parrot", "messages": M, "stop": None, "logit_bias": None, "max_tokens": None, "stream": None}
    assert posted(port, "/v1/chat/completions", body)[0] == 200


# -- reranking


def test_a_chat_is_made_of_dicts_as_well() -> None:
    """Messages may be given as clients of OpenAI write them; one that is no message is refused at
    once, and not where a model reads it.
    """
    said = Message(role="system", content="be brief")
    chat = Chat(messages=[said, {"role": "user", "content": "hello"}])  # type: ignore[list-item]
    assert chat.messages == [said, Message(role="user", content="hello")]
    assert [message.text for message in copy.deepcopy(chat).messages] == ["be brief", "hello"]
    wrongs: list[Any] = [{"content": "hello"}, {"role": 1}]
    for wrong in wrongs:
        with pytest.raises(msgspec.ValidationError, match="role"):
            Chat(messages=[wrong])


def test_reranking(port: int) -> None:
    """Documents come back by falling score, in the form of Cohere or of TEI."""
    documents = ["x", "abc", {"text": "ab"}]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        _, answer = posted(port, path, {"model": "score", "query": "abc", "documents": documents, "top_n": 2})
        assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [(1, 3.0), (2, 2.0)]
    _, shown = posted(port, "/v2/rerank", {"query": "abc", "documents": documents, "return_documents": True})
    assert shown["results"][0]["document"] == {"text": "abc"}
    _, tei = posted(port, "/rerank", {"query": "abc", "texts": ["x", "ab"], "return_text": True})
    assert tei == [{"index": 1, "score": 2.0, "text": "ab"}, {"index": 0, "score": 0.0, "text": "x"}]
    for wrong in (
        {"query": "a"},
        {"query": "a", "documents": []},
        {"documents": ["a"]},
        {"query": "a", "documents": [1]},
    ):
        status, answer = posted(port, "/v1/rerank", wrong)
        assert status == 400 and isinstance(answer["message"], str)
    status, answer = posted(port, "/v1/rerank", {"model": "embed", "query": "a", "documents": ["a"]})
    assert status == 404 and "no pairs" in answer["message"]


def test_models_are_listed(port: int) -> None:
    """`/v1/models` has the names that requests give."""
    assert {each["id"] for each in fetched(port, "/v1/models")[1]["data"]} >= {"embed", "words", "parrot"}


def test_values_that_ask_for_nothing_are_taken(port: int) -> None:
    """Parameters in the value that asks for nothing are passed over; any other value of theirs is refused."""
    neutral: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
    }
    chat = {"model": "parrot", "messages": [{"role": "user", "content": "a"}]}
    status, answer = posted(port, "/v1/chat/completions", {**chat, **neutral})
    assert status == 200, answer
    assert posted(port, "/v1/completions", {"model": "whole", "prompt": "a", "echo": False, "best_of": 1})[0] == 200
    for name, value in (("presence_penalty", 1), ("logprobs", True), ("tools", [{}]), ("colour", 0)):
        status, answer = posted(port, "/v1/chat/completions", {**chat, name: value})
        assert status == 400 and name in answer["error"]["message"]


def test_what_is_empty_is_refused_as_such(port: int) -> None:
    """No prompt, no input and an empty list of tokens are 400, and the text says so."""
    for empty in ([], [[]], [[1], []]):
        status, answer = posted(port, "/v1/completions", {"model": "whole", "prompt": empty})
        assert status == 400 and "`prompt` is empty" in answer["error"]["message"], empty
    for empty in ([], [[]]):
        status, answer = posted(port, "/v1/embeddings", {"model": "embed", "input": empty})
        assert status == 400 and "`input` is empty" in answer["error"]["message"]


def test_tokens_for_a_model_of_texts_are_refused_with_the_setting_of_clients(port: int) -> None:
    """The refusal of tokens names the setting by which clients send texts."""
    status, answer = posted(port, "/v1/embeddings", {"model": "embed", "input": [[1, 2]]})
    assert status == 400 and "check_embedding_ctx_length=False" in answer["error"]["message"]


@pytest.mark.parametrize("top_n", [0, -1])
def test_none_of_the_documents_is_refused(port: int, top_n: int) -> None:
    """An answer without documents can be meant by nobody."""
    status, answer = posted(port, "/v1/rerank", {"query": "a", "documents": ["a"], "top_n": top_n})
    assert status == 400 and "`top_n` must be at least 1" in answer["message"]


@pytest.mark.parametrize("size", [8, 4096])
def test_as_many_inputs_as_openai_takes(size: int) -> None:
    """A request may have 2,048 inputs, whatever the queue holds: those without room wait for it. More are 413, unless
    the queue holds them."""
    stage = Stage(lengths, max_batch_size=4, max_queue_size=size, run_in="thread")
    with served(Service(stage, name="short")) as client:
        port = int(client.url.rpartition(":")[2])
        texts = ["x" * (n % 7) for n in range(2048)]
        status, answer = posted(port, "/v1/embeddings", {"model": "short", "input": texts})
        assert status == 200 and [each["embedding"] for each in answer["data"]] == [
            [float(len(each))] for each in texts
        ]
        status, answer = posted(port, "/v1/embeddings", {"model": "short", "input": [*texts, "y"]})
        assert status == (413 if size < 2048 else 200)
