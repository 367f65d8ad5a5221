"""Clients send null for what their user has not set: it means the same as to leave it out, in each protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import carpool
from carpool.http.app import App
from tests.http.asked_by_name import PAIR, SAYS, TENSOR, WAYS, named, protocols, service

NULLS: dict[str, list[Any]] = {
    "own": [],
    "own lists": [],
    "kserve-v1": [{"signature_name": None, "instances": [0.0], "inputs": None, "other": None}],
    "kserve-v1 versions": [{"signature_name": None, "instances": [0.0]}],
    "oip": [
        {**TENSOR, "id": None, "parameters": None, "outputs": None},
        {
            "inputs": [{**TENSOR["inputs"][0], "parameters": None}],
            "parameters": {"timeout": None, "priority": None, "binary_data_output": None},
            "outputs": [{"name": "output", "parameters": None}],
        },
        {
            "inputs": [{**TENSOR["inputs"][0], "parameters": {"binary_data_size": None}}],
            "outputs": [{"name": "output", "parameters": {"classification": None, "binary_data": None}}],
        },
    ],
    "oip versions": [{**TENSOR, "id": None, "outputs": None}],
    "openai embeddings": [
        {"input": "x", "encoding_format": None, "dimensions": None, "user": None, "input_type": None, "truncate": None}
    ],
    "openai chats": [
        {
            **SAYS,
            **dict.fromkeys(["n", "stream", "stream_options", "user", "stop", "max_tokens", "max_completion_tokens"]),
            **dict.fromkeys(["seed", "temperature", "top_p", "tools", "response_format", "logprobs"]),
        },
        {"messages": [{"role": "user", "content": "x", "name": None, "tool_calls": None}]},
        {**SAYS, "stream_options": {"include_usage": None, "include_obfuscation": None}},
    ],
    "openai completions": [{"prompt": "x", **dict.fromkeys(["n", "suffix", "echo", "stop", "user", "stream_options"])}],
    "rerank": [
        {
            **PAIR,
            **dict.fromkeys(["texts", "top_n", "return_documents", "return_text", "max_tokens_per_doc", "rank_fields"]),
        }
    ],
    "rerank of TEI": [
        {"query": "x", "texts": ["x"], **dict.fromkeys(["documents", "return_text", "raw_scores", "truncate"])}
    ],
    "rerank v2": [{**PAIR, **dict.fromkeys(["top_n", "return_documents", "priority"])}],
}
OF_THE_FIRST: list[tuple[str, Any]] = [
    ("/invocations", {"instances": [0.0], "inputs": None, "dataframe_split": None, "params": None}),
    ("/invocations", {"dataframe_split": {"columns": ["x"], "data": [[0.0]], "index": None}, "params": None}),
    ("/vertex", {"instances": [0.0], "parameters": None}),
]


def test_every_way_is_asked() -> None:
    """Each way that names a model is asked with nulls, too."""
    assert NULLS.keys() == WAYS.keys()


@pytest.mark.parametrize("name", NULLS)
def test_null_is_not_given(name: str) -> None:
    """A request with nulls for all that may be left out is answered as one without them."""
    way = WAYS[name]

    async def ask_all() -> None:
        app = App(service("one", way, 1.0), protocols=protocols())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for body in NULLS[name]:
                path, said = named(way._replace(body=body), "one")
                answer = await client.post(path, json=said)
                assert answer.status_code == 200 and "1.0" in answer.text, (body, answer.text)
        await app.stop()

    asyncio.run(ask_all())


def test_null_is_not_given_where_no_model_is_named() -> None:
    """So it is where the model is the first one."""

    def double(x: float) -> float:
        return 1.0

    async def ask_all() -> None:
        app = App(carpool.Service(carpool.Stage(double, run_in="thread")), protocols=protocols())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for path, body in OF_THE_FIRST:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200 and "1.0" in answer.text, (body, answer.text)
        await app.stop()

    asyncio.run(ask_all())
