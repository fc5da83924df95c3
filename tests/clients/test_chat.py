"""/v1/chat/completions through the openai client."""

import asyncio
import json
import re

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from conftest import CITY_SCHEMA, KEY, MODEL, TIMEOUT_S, URL

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city", "parameters": CITY_SCHEMA},
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time of day",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


def chat(oai, messages, **settings):
    settings = {"max_tokens": 24, "temperature": 0} | settings
    return oai.chat.completions.create(model=MODEL, messages=messages, **settings)


def collect(stream):
    """Text, finish reason and usage of a stream, as its chunks give them."""
    text, finish, usage = "", None, None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    return text, finish, usage


def test_an_answer_has_text_usage_and_a_finish_reason(oai, user):
    answer = chat(oai, user)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(oai, user):
    whole = chat(oai, user)
    text, finish, usage = collect(chat(oai, user, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_usage_is_streamed_only_to_those_who_ask(oai, user):
    assert collect(chat(oai, user, stream=True))[2] is None


def test_a_repeated_prompt_comes_from_the_cache(oai):
    messages = [{"role": "system", "content": "You are a patient teacher. " * 40}, {"role": "user", "content": "Hello"}]
    chat(oai, messages, max_tokens=1)
    again = chat(oai, messages, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_content_may_be_parts_and_roles_developer(oai):
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    answer = chat(oai, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert answer.choices[0].message.content


def test_max_completion_tokens_bounds_an_answer(oai, user):
    answer = chat(oai, user, max_tokens=openai.omit, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_a_seed_repeats_an_answer_and_another_seed_does_not(oai, user):
    say = lambda seed: chat(oai, user, temperature=1.5, seed=seed, max_tokens=32).choices[0].message.content
    assert say(7) == say(7)
    assert len({say(seed) for seed in range(4)}) > 1


def test_n_answers_are_numbered(oai, user):
    answer = chat(oai, user, n=3, temperature=1.5, seed=1, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    texts = ["", "", ""]
    for chunk in chat(oai, user, n=3, temperature=1.5, seed=1, max_tokens=12, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_an_answer_ends_before_a_stop_string(oai, user):
    whole = chat(oai, user).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    answer = chat(oai, user, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    text, finish, _ = collect(chat(oai, user, stop=stop, stream=True))
    assert (text, finish) == (whole[: whole.index(stop)], "stop")


def test_logprobs_tell_each_token_and_its_rivals(oai, user):
    answer = chat(oai, user, logprobs=True, top_logprobs=3, max_tokens=8)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == answer.choices[0].message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0
        # Greedy: the chosen token is the best one.
        assert token.top_logprobs[0].token == token.token
    streamed = [
        token.token
        for chunk in chat(oai, user, logprobs=True, top_logprobs=0, max_tokens=8, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]
    assert streamed == [token.token for token in tokens]


def test_a_bias_forbids_a_token(oai, user):
    first = chat(oai, user, max_tokens=1, logprobs=True, top_logprobs=1)
    # vLLM's /tokenize tells the id of what was said.
    token = oai.post("/../tokenize", cast_to=object, body={"model": MODEL, "prompt": first.choices[0].message.content,
                                                          "add_special_tokens": False})["tokens"][0]
    other = chat(oai, user, max_tokens=1, logit_bias={str(token): -100})
    assert other.choices[0].message.content != first.choices[0].message.content


def test_json_mode_gives_json(oai):
    messages = [{"role": "user", "content": "Describe a cat as JSON with two short fields."}]
    answer = chat(oai, messages, response_format={"type": "json_object"}, max_tokens=200, frequency_penalty=1.0)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept(oai, stream):
    messages = [{"role": "user", "content": "Where do you travel, and for how many days?"}]
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": CITY_SCHEMA, "strict": True}}
    answer = chat(oai, messages, response_format=schema, max_tokens=100, stream=stream)
    text = collect(answer)[0] if stream else answer.choices[0].message.content
    jsonschema.validate(json.loads(text), CITY_SCHEMA)


class Trip(BaseModel):
    days: int
    by_train: bool


def test_the_clients_own_parser_accepts_a_schema(oai):
    answer = oai.chat.completions.parse(
        model=MODEL, temperature=0, max_tokens=100, response_format=Trip,
        messages=[{"role": "user", "content": "Two days by train."}],
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)


def test_a_regex_is_matched(oai, user):
    body = {"structured_outputs": {"regex": "(red|green|blue), [0-9]{3}"}}
    text = chat(oai, user, extra_body=body).choices[0].message.content
    assert re.fullmatch("(red|green|blue), [0-9]{3}", text), text


def test_a_lark_grammar_is_followed(oai, user):
    body = {"structured_outputs": {"grammar": 'start: "yes" | "no"'}}
    assert chat(oai, user, extra_body=body).choices[0].message.content in ("yes", "no")


def test_a_named_tool_is_called_with_arguments_that_fit(oai):
    messages = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = chat(oai, messages, tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=120)
    call = answer.choices[0].message.tool_calls[0]
    assert call.type == "function" and call.id and call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY_SCHEMA)
    # And the results go back to the model.
    messages.append(answer.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert chat(oai, messages, tools=[WEATHER, CLOCK]).usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_required_call_is_streamed_piece_by_piece(oai):
    messages = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
    calls, finish = {}, None
    for chunk in chat(oai, messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False,
                      max_tokens=120, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"id": None, "name": "", "arguments": "", "pieces": 0})
                call["id"] = piece.id or call["id"]
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
                call["pieces"] += 1
    assert finish == "tool_calls"
    assert list(calls) == [0]
    assert calls[0]["id"] and calls[0]["name"] == "weather" and calls[0]["pieces"] > 2
    jsonschema.validate(json.loads(calls[0]["arguments"]), CITY_SCHEMA)


def test_tools_may_be_forbidden(oai, user):
    assert chat(oai, user, tools=[WEATHER], tool_choice="none").choices[0].message.tool_calls is None


def test_many_at_once_get_what_each_gets_alone(oai):
    prompts = ["Count to ten.", "Name a river. " * 30, "Why is the sky blue?", "Hi", "Write a haiku about rain. " * 10, "2+2="]
    ask = lambda prompt: dict(model=MODEL, temperature=0, max_tokens=16, messages=[{"role": "user", "content": prompt}])
    alone = [oai.chat.completions.create(**ask(prompt)).choices[0].message.content for prompt in prompts]

    async def together():
        async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, timeout=TIMEOUT_S, max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**ask(prompt)) for prompt in prompts))
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(together()) == alone
