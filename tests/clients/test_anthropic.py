"""/v1/messages and /v1/messages/count_tokens through the anthropic client."""

import json

import anthropic
import jsonschema
import pytest

from conftest import CITY_SCHEMA, KEY, MODEL, TIMEOUT_S, URL

WEATHER = {"name": "weather", "description": "The weather in a city", "input_schema": CITY_SCHEMA}
GREEDY = {"temperature": 0}
"""The client's own type has no temperature any more; the API takes it."""


def create(claude, messages, **settings):
    settings = {"max_tokens": 24, "extra_body": GREEDY} | settings
    return claude.messages.create(model=MODEL, messages=messages, **settings)


def test_a_message_has_text_usage_and_a_stop_reason(claude, user):
    message = create(claude, user)
    assert message.type == "message" and message.role == "assistant" and message.model == MODEL
    assert message.content[0].type == "text" and message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens") and message.stop_sequence is None
    assert 0 < message.usage.output_tokens <= 24
    assert message.usage.cache_creation_input_tokens == 0


def test_events_come_in_order_and_add_up(claude, user):
    whole = create(claude, user)
    with claude.messages.stream(model=MODEL, messages=user, max_tokens=24, extra_body=GREEDY) as stream:
        names = [event.type for event in stream if event.type not in ("text", "input_json", "thinking", "signature")]
        final = stream.get_final_message()
    deltas = names.count("content_block_delta")
    assert deltas > 1
    assert names == ["message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
                     "message_delta", "message_stop"]
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    total = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    assert total(final.usage) == total(whole.usage)


def test_raw_events_are_named_and_a_ping_follows_the_start(claude, user):
    with claude.messages.with_streaming_response.create(model=MODEL, messages=user, max_tokens=4, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    kinds = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
    assert names == kinds
    assert names[:2] == ["message_start", "ping"]
    start = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0


def test_system_prompts_are_text_or_blocks(claude, user):
    plain = create(claude, user, system="Speak like a pirate.")
    blocks = create(claude, user, system=[{"type": "text", "text": "Speak like a pirate.", "cache_control": {"type": "ephemeral"}}])
    assert plain.content == blocks.content


def test_a_repeated_prompt_comes_from_the_cache(claude, user):
    system = "You are a careful librarian. " * 40
    create(claude, user, system=system, max_tokens=1)
    again = create(claude, user, system=system, max_tokens=1)
    assert again.usage.cache_read_input_tokens > again.usage.input_tokens


def test_a_stop_sequence_is_named(claude, user):
    whole = create(claude, user).content[0].text
    stop = whole[len(whole) // 2 :][:3]
    message = create(claude, user, stop_sequences=["never said", stop])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert message.content[0].text == whole[: whole.index(stop)]


def test_too_few_tokens_are_told(claude, user):
    message = create(claude, user, max_tokens=2)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 2


def test_an_answer_that_was_begun_is_continued(claude, user):
    begun = [*user, {"role": "assistant", "content": "Here are three colours: red,"}]
    message = create(claude, begun)
    assert not message.content[0].text.lstrip().startswith("Here are three")
    assert message.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_used_and_its_result_taken(claude, choice):
    messages = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
    choice = choice | {"disable_parallel_tool_use": True}
    message = create(claude, messages, tools=[WEATHER], tool_choice=choice, max_tokens=120)
    assert message.stop_reason == "tool_use"
    use = message.content[-1]
    assert use.type == "tool_use" and use.name == "weather" and use.id
    jsonschema.validate(use.input, CITY_SCHEMA)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    messages += [message.to_param(), {"role": "user", "content": [result]}]
    assert create(claude, messages, tools=[WEATHER]).stop_reason


def test_a_tools_input_is_streamed(claude):
    messages = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
    pieces = []
    with claude.messages.stream(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=120, extra_body=GREEDY,
                                tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True}) as stream:
        for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                pieces.append(event.delta.partial_json)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == final.content[-1].input
    jsonschema.validate(final.content[-1].input, CITY_SCHEMA)
    assert final.stop_reason == "tool_use"


def test_a_schema_is_kept(claude):
    messages = [{"role": "user", "content": "Where do you travel?"}]
    config = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    message = create(claude, messages, output_config=config, max_tokens=100)
    jsonschema.validate(json.loads(message.content[0].text), CITY_SCHEMA)


def test_thinking_may_be_asked_for_where_the_model_does_not_think(claude, user):
    message = create(claude, user, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=8)
    assert message.content[-1].type == "text"


def test_tokens_are_counted_as_they_are_used(claude, user):
    counted = claude.messages.count_tokens(model=MODEL, messages=user, system="Be brief.", tools=[WEATHER])
    message = create(claude, user, system="Be brief.", tools=[WEATHER], max_tokens=1)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_both_headers_carry_a_key():
    bearer = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, timeout=TIMEOUT_S, max_retries=0)
    assert bearer.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Hi"}]).input_tokens > 0


def test_errors_have_the_clients_types(claude, user):
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="nobody/nothing", messages=user, max_tokens=1)
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=MODEL, messages=[], max_tokens=1)
    assert caught.value.type == "invalid_request_error" and "message" in caught.value.api_message
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        create(claude, [{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.post("/v1/messages", cast_to=object, body={"model": MODEL, "messages": user})
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong", timeout=TIMEOUT_S, max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(model=MODEL, messages=user, max_tokens=1)
    assert caught.value.type == "authentication_error"


def test_tools_of_the_service_are_left_out(claude, user):
    plain = create(claude, user)
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert create(claude, user, tools=[search]).content == plain.content


def test_the_model_is_listed(claude):
    models = list(claude.models.list())
    assert [model.id for model in models] == [MODEL]
    assert models[0].type == "model" and models[0].display_name == MODEL and models[0].created_at.year > 2000
    assert claude.models.retrieve(MODEL).id == MODEL


def test_a_temperature_above_one_is_refused(claude, user):
    with pytest.raises(anthropic.BadRequestError, match="`temperature` must be at most 1"):
        claude.messages.create(model=MODEL, messages=user, max_tokens=1, extra_body={"temperature": 1.1})
