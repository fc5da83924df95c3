"""Ollama's API through the ollama client."""

import asyncio
import json

import jsonschema
import ollama
import pytest

from conftest import CITY_SCHEMA, KEY, MODEL, TIMEOUT_S, URL

GREEDY = {"temperature": 0, "num_predict": 24}
HEADERS = {"Authorization": f"Bearer {KEY}"}


def weather(city: str, days: int) -> str:
    """The weather in a city

    Args:
        city: Name of the city
        days: Number of days
    """
    return f"sunny in {city} for {days} days"


@pytest.fixture(scope="module")
def client():
    return ollama.Client(host=URL, headers=HEADERS, timeout=TIMEOUT_S)


def test_a_reply_has_text_counts_and_times(client, user):
    reply = client.chat(MODEL, user, options=GREEDY)
    assert reply.model == MODEL and reply.message.role == "assistant" and reply.message.content
    assert reply.done and reply.done_reason in ("stop", "length")
    assert reply.prompt_eval_count > 0 and 0 < reply.eval_count <= 24
    assert 0 < reply.prompt_eval_duration < reply.total_duration
    assert 0 < reply.eval_duration < reply.total_duration


def test_a_stream_says_what_the_whole_reply_says(client, user):
    whole = client.chat(MODEL, user, options=GREEDY)
    parts = list(client.chat(MODEL, user, options=GREEDY, stream=True))
    assert len(parts) > 2
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


def test_the_asynchronous_client_streams(user):
    async def text():
        client = ollama.AsyncClient(host=URL, headers=HEADERS, timeout=TIMEOUT_S)
        return [part.message.content async for part in await client.chat(MODEL, user, options=GREEDY, stream=True)]

    assert "".join(asyncio.run(text()))


def test_a_prompt_is_answered_and_its_context_continued(client):
    first = client.generate(MODEL, "My name is Ada. Say hello.", system="Be brief.", options=GREEDY)
    assert first.response and len(first.context) >= first.prompt_eval_count + first.eval_count
    second = client.generate(MODEL, "What is my name?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count > first.prompt_eval_count
    assert list(second.context[: len(first.context)]) == list(first.context)
    parts = list(client.generate(MODEL, "My name is Ada. Say hello.", system="Be brief.", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == first.response


def test_a_raw_prompt_is_continued(client):
    reply = client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY | {"stop": ["."]})
    assert "Paris" in reply.response and "." not in reply.response
    assert reply.context is None


def test_a_seed_repeats_a_reply(client, user):
    say = lambda seed: client.chat(MODEL, user, options={"temperature": 1.5, "seed": seed, "num_predict": 32}).message.content
    assert say(7) == say(7)
    assert len({say(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept(client, stream):
    messages = [{"role": "user", "content": "Where do you travel, and for how many days?"}]
    reply = client.chat(MODEL, messages, format=CITY_SCHEMA, options={"temperature": 0, "num_predict": 100}, stream=stream)
    text = "".join(part.message.content for part in reply) if stream else reply.message.content
    jsonschema.validate(json.loads(text), CITY_SCHEMA)


def test_json_is_an_object(client):
    reply = client.generate(MODEL, "Describe a cat as JSON.", format="json", options=GREEDY)
    assert reply.response.lstrip().startswith("{")


def test_a_tool_is_called_and_its_result_goes_back(client):
    # Ollama has no way to force a call, and a small model makes one only if it is shown how.
    arguments = {"city": "Paris", "days": 2}
    said = json.dumps({"name": "weather", "arguments": arguments})
    user = {"role": "user", "content": f"Repeat: <tool_call>\n{said}\n</tool_call>"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}
    messages = [user, call, user, call, user]
    settings = {"tools": [weather], "options": {"temperature": 0, "num_predict": 80}}
    reply = client.chat(MODEL, messages, **settings)
    assert [(call.function.name, call.function.arguments) for call in reply.message.tool_calls] == [("weather", arguments)]
    streamed = [call for part in client.chat(MODEL, messages, stream=True, **settings) for call in part.message.tool_calls or []]
    assert [call.function for call in streamed] == [call.function for call in reply.message.tool_calls]
    messages += [reply.message, {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    assert client.chat(MODEL, messages, **settings).prompt_eval_count > reply.prompt_eval_count


def test_thinking_is_refused_by_a_model_that_cannot(client, user):
    assert client.chat(MODEL, user, think=False, options=GREEDY).message.thinking is None
    with pytest.raises(ollama.ResponseError, match="does not support thinking") as caught:
        client.chat(MODEL, user, think=True)
    assert caught.value.status_code == 400


def test_logprobs_tell_each_token(client, user):
    reply = client.chat(MODEL, user, logprobs=True, top_logprobs=2, options={"temperature": 0, "num_predict": 6})
    assert len(reply.logprobs) == reply.eval_count
    assert "".join(token.token for token in reply.logprobs) == reply.message.content
    assert all(token.top_logprobs[0].token == token.token for token in reply.logprobs)


def test_texts_are_embedded(client):
    reply = client.embed(MODEL, ["a river", "a tax return", "a river"])
    river, tax, again = reply.embeddings
    assert river == again and river != tax
    assert sum(x * x for x in river) == pytest.approx(1)
    assert reply.prompt_eval_count > 3
    assert list(client.embeddings(MODEL, "a river").embedding) == pytest.approx(list(river))


def test_the_model_is_listed_shown_and_running(client):
    listed, running = client.list().models, client.ps().models
    assert [model.model for model in listed] == [model.model for model in running] == [f"{MODEL}:latest"]
    assert listed[0].digest == running[0].digest and len(listed[0].digest) == 64
    assert listed[0].size > 90_000_000 and listed[0].modified_at.year > 2000
    assert listed[0].details.family == "llama" and listed[0].details.parameter_size.endswith("M")
    assert running[0].context_length > 0 and running[0].size_vram == 0 and running[0].expires_at.year > 2100
    shown = client.show(listed[0].model)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.embedding_length"] == 576
    assert 130_000_000 < shown.modelinfo["general.parameter_count"] < 140_000_000
    assert "messages" in shown.template and shown.details == listed[0].details


def test_a_request_without_a_prompt_loads_or_unloads(client):
    assert client.generate(MODEL).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert client.chat(MODEL, [], keep_alive="10m").done_reason == "load"
    assert client.ps().models, "the model stays"


def test_the_served_model_is_there_already(client):
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(MODEL, stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="one model"):
        client.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="one model"):
        client.delete(MODEL)


def test_errors_have_a_sentence_and_a_status(client, user):
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("nobody", user)
    assert (caught.value.status_code, caught.value.error) == (404, "model 'nobody' not found")
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(client.generate("nobody", "x", stream=True))
    with pytest.raises(ollama.ResponseError, match="temperature") as caught:
        client.chat(MODEL, user, options={"temperature": -1})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError) as caught:
        ollama.Client(host=URL, headers={"Authorization": "Bearer no"}).list()
    assert caught.value.status_code == 401
