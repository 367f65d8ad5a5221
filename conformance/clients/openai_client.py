"""openai, sync and async, with its own retries."""

import asyncio
from importlib.metadata import version

import openai
from calls import URL, call, raises, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "one two three"}]


@call
def models_list():
    assert {model.id for model in client.models.list()} >= {"embed", "words"}


@call
def models_retrieve():
    assert client.models.retrieve("embed").id == "embed"
    raises(openai.NotFoundError, lambda: client.models.retrieve("none"))


@call
def embeddings_create():
    told = client.embeddings.create(model="embed", input=["ab", "a b c"])  # base64, if it has numpy
    assert [each.embedding for each in told.data] == [[2.0, 0.5, -1.25], [5.0, 0.5, -1.25]]
    assert told.usage.prompt_tokens == 4
    told = client.embeddings.create(model="embed", input="ab", encoding_format="float")
    assert told.data[0].embedding == [2.0, 0.5, -1.25]


@call
def errors_are_its_exceptions():
    error = raises(openai.NotFoundError, lambda: client.embeddings.create(model="none", input="a"))
    assert error.code == "model_not_found" and error.request_id
    raises(openai.BadRequestError, lambda: client.embeddings.create(model="embed", input=[]))
    raises(openai.NotFoundError, lambda: client.embeddings.create(model="words", input="a"))
    raises(openai.InternalServerError, lambda: client.completions.create(model="words", prompt="raise"))
    asked = lambda: client.chat.completions.create(model="parrot", messages=HELLO, presence_penalty=1)  # noqa: E731
    raises(openai.BadRequestError, asked)


@call
def completions_create():
    told = client.completions.create(model="words", prompt="a b", n=2, max_tokens=10)
    assert [choice.text for choice in told.choices] == ["a b ", "a b "]


@call
def completions_create_with_stream():
    parts = list(client.completions.create(model="words", prompt="a b", stream=True))
    assert "".join(part.choices[0].text for part in parts) == "a b "


@call
def chat_completions_create():
    told = client.chat.completions.create(model="parrot", messages=HELLO, temperature=0.1)
    assert told.choices[0].message.content == "one two three " and told.choices[0].finish_reason == "stop"
    told = client.chat.completions.create(model="parrot", messages=HELLO, stop="two")
    assert told.choices[0].message.content == "one "


@call
def chat_completions_create_with_stream():
    stream = client.chat.completions.create(
        model="parrot", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one two three "
    assert chunks[-1].usage.completion_tokens == 3


@call
def chat_completions_stream_helper():
    with client.chat.completions.stream(model="parrot", messages=HELLO) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == "one two three "


@call
def a_broken_stream_raises():
    messages = [{"role": "user", "content": "one raise"}]
    stream = client.chat.completions.create(model="parrot", messages=messages, stream=True)
    raises(openai.APIError, lambda: list(stream))


@call
def its_own_retries():
    patient = client.with_options(max_retries=2)
    assert patient.embeddings.create(model="busy", input="a").data[0].embedding == [1.0]
    raises(openai.RateLimitError, lambda: client.embeddings.create(model="busy", input="a"))


@call
def async_client():
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
            told = await asyncio.gather(*[client.embeddings.create(model="embed", input="a" * n) for n in range(1, 20)])
            assert [each.data[0].embedding[0] for each in told] == [float(n) for n in range(1, 20)]
            stream = await client.chat.completions.create(model="parrot", messages=HELLO, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one two three "
            assert (await client.completions.create(model="words", prompt="a")).choices[0].text == "a "

    asyncio.run(main())


tell("openai", version("openai"))
