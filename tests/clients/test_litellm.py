"""What litellm makes of the server, as an OpenAI-compatible and as an Ollama server."""

import json
import os

# Otherwise it fetches a list of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import jsonschema
import litellm
import pytest

from conftest import CITY_SCHEMA, KEY, MODEL, TIMEOUT_S, URL

WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY_SCHEMA}}
WHERE = {
    "openai": {"model": f"openai/{MODEL}", "api_base": URL + "/v1", "api_key": KEY},
    "ollama": {"model": f"ollama_chat/{MODEL}", "api_base": URL, "api_key": KEY},
}


def chat(api, messages, **settings):
    settings = {"max_tokens": 24, "temperature": 0, "timeout": TIMEOUT_S, "num_retries": 0} | settings
    return litellm.completion(messages=messages, **WHERE[api], **settings)


@pytest.mark.parametrize("api", WHERE)
def test_a_stream_says_what_the_whole_answer_says(api, user):
    whole = chat(api, user)
    assert whole.choices[0].message.content and whole.usage.completion_tokens <= 24
    parts = [chunk.choices[0].delta.content or "" for chunk in chat(api, user, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content and len(parts) > 2


def test_a_prompt_that_is_too_long_is_told_as_such():
    with pytest.raises(litellm.ContextWindowExceededError):
        chat("openai", [{"role": "user", "content": "word " * 40_000}])


def test_an_unknown_model_is_not_found(user):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=user, **(WHERE["openai"] | {"model": "openai/nobody"}))


def test_a_tool_is_called(user):
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = chat("openai", user, tools=[WEATHER], tool_choice=choice, max_tokens=120)
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), CITY_SCHEMA)


def test_texts_are_embedded():
    settings = WHERE["openai"] | {"timeout": TIMEOUT_S}
    answer = litellm.embedding(input=["a river", "a brook"], encoding_format="float", **settings)
    assert len(answer.data) == 2 and len(answer.data[0]["embedding"]) == len(answer.data[1]["embedding"]) > 0
