"""/v1/responses through the openai client."""

import json
import time

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from conftest import CITY_SCHEMA, MODEL

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": CITY_SCHEMA,
    "strict": True,
}


def respond(oai, input="Name three colours.", **settings):
    return oai.responses.create(model=MODEL, input=input, **({"max_output_tokens": 24, "temperature": 0} | settings))


def test_a_response_has_text_usage_and_a_status(oai):
    response = respond(oai)
    assert response.object == "response" and response.id.startswith("resp_")
    assert response.status in ("completed", "incomplete")
    assert response.output[0].type == "message" and response.output[0].role == "assistant"
    assert response.output_text
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.input_tokens_details.cached_tokens >= 0


def test_events_come_in_order_and_add_up(oai):
    whole = respond(oai)
    events = list(respond(oai, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    deltas = names.count("response.output_text.delta")
    assert deltas > 1
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response." + whole.status,
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.id == events[0].response.id
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_an_answer_cut_short_says_so(oai):
    response = respond(oai, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 2


def test_items_and_instructions_make_the_prompt(oai):
    alone = respond(oai, [{"role": "user", "content": "Hello"}])
    told = respond(oai, [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
                   instructions="You speak like a pirate, always.")
    assert told.usage.input_tokens != alone.usage.input_tokens
    assert told.instructions.startswith("You speak")


def test_a_stored_response_is_continued_listed_and_deleted(oai):
    first = respond(oai, "My name is Ada.")
    second = respond(oai, "What is my name?", previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens
    assert oai.responses.retrieve(first.id).output_text == first.output_text
    items = list(oai.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    oai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="Previous response with id .* not found") as caught:
        respond(oai, previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


def test_state_of_other_kinds_is_refused(oai):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(oai, conversation="conv_1")
    assert caught.value.param == "conversation"
    assert caught.value.code == "unsupported_parameter"


def test_a_response_in_the_background_is_asked_for_until_it_is_there(oai):
    response = respond(oai, background=True)
    assert response.status in ("queued", "in_progress", "completed")
    while response.status in ("queued", "in_progress"):
        time.sleep(0.05)
        response = oai.responses.retrieve(response.id)
    assert response.status in ("completed", "incomplete") and response.output_text


def test_a_schema_is_kept(oai):
    text = {"format": {"type": "json_schema", "name": "trip", "schema": CITY_SCHEMA, "strict": True}}
    response = respond(oai, "Where do you travel?", text=text, max_output_tokens=100)
    jsonschema.validate(json.loads(response.output_text), CITY_SCHEMA)


class Trip(BaseModel):
    days: int
    by_train: bool


def test_the_clients_own_parser_accepts_a_schema(oai):
    response = oai.responses.parse(model=MODEL, input="Two days by train.", text_format=Trip, max_output_tokens=100, temperature=0)
    assert isinstance(response.output_parsed, Trip)


def test_a_tool_is_called_and_its_result_taken(oai):
    question = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
    choice = {"type": "function", "name": "weather"}
    response = respond(oai, question, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=120)
    call = response.output[-1]
    assert call.type == "function_call" and call.name == "weather" and call.status == "completed"
    jsonschema.validate(json.loads(call.arguments), CITY_SCHEMA)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = respond(oai, [*question, *response.output, result], tools=[WEATHER])
    assert after.usage.input_tokens > response.usage.input_tokens


def test_a_calls_arguments_are_streamed(oai):
    with oai.responses.stream(model=MODEL, input="What is the weather in Paris for two days?", tools=[WEATHER],
                              tool_choice="required", parallel_tool_calls=False, max_output_tokens=120, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    names = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert names.index("response.output_item.added") < names.index("response.function_call_arguments.delta")
    assert names.index("response.function_call_arguments.done") < names.index("response.output_item.done")
    assert names[-1] == "response.completed"
    call = final.output[-1]
    assert call.arguments == "".join(deltas)
    jsonschema.validate(json.loads(call.arguments), CITY_SCHEMA)


def test_log_probabilities_come_with_the_text(oai):
    response = respond(oai, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=6)
    part = response.output[0].content[0]
    assert "".join(token.token for token in part.logprobs) == part.text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


def test_a_custom_tool_is_called_with_a_text(oai):
    grammar = {"type": "grammar", "syntax": "regex", "definition": "(red|blue), please"}
    tool = {"type": "custom", "name": "pick", "description": "Picks a colour", "format": grammar}
    with oai.responses.stream(model=MODEL, input="Pick one.", tools=[tool], tool_choice={"type": "custom", "name": "pick"},
                              max_output_tokens=60, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        final = stream.get_final_response()
    call = final.output[-1]
    assert call.type == "custom_tool_call" and call.name == "pick"
    assert call.input in ("red, please", "blue, please") and "".join(deltas) == call.input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    assert respond(oai, [{"role": "user", "content": "Pick one."}, *final.output, result], tools=[tool]).output


def test_hosted_tools_are_left_out_and_images_refused_by_name(oai):
    assert respond(oai, tools=[{"type": "web_search"}], max_output_tokens=1).tools == []
    with pytest.raises(openai.BadRequestError, match="input_image"):
        respond(oai, [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}])
