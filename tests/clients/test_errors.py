"""What goes wrong, as the openai client sees it; who may ask; and what is told about the server itself."""

import http.client
import json
import time
from urllib.parse import urlsplit

import openai
import pytest

from conftest import KEY, MODEL, TIMEOUT_S, URL


def send(method, path, body=None, **headers):
    """Status, headers and body of a request that no client would make."""
    where = urlsplit(URL)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=TIMEOUT_S)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"} | headers
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    status, headers, text = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return status, headers, text


def metric(name):
    """The sum of a metric over its labels."""
    lines = send("GET", "/metrics")[2].splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith((name + " ", name + "{"))]
    assert values, f"no metric {name}"
    return sum(map(float, values))


def settle(name, holds):
    """Waits until a metric is as it must be: the engine tells its numbers after a step, not in it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds(metric(name)):
        assert time.monotonic() < deadline, f"{name} stays {metric(name)}"
        time.sleep(0.02)


def refused(oai, error, **settings):
    with pytest.raises(error) as caught:
        oai.chat.completions.create(**({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1} | settings))
    return caught.value


def test_an_unknown_model_is_not_found(oai):
    assert refused(oai, openai.NotFoundError, model="nobody/nothing").code == "model_not_found"


@pytest.mark.parametrize(
    "param, value",
    [("temperature", -1.0), ("top_p", 2.0), ("n", 0), ("top_logprobs", 99), ("max_tokens", -1), ("messages", "hello"),
     ("stop", [""]), ("logit_bias", {"999999999": 1})],
)
def test_the_setting_at_fault_is_named(oai, param, value):
    settings = {param: value} | ({"logprobs": True} if param == "top_logprobs" else {})
    error = refused(oai, openai.BadRequestError, **settings)
    assert error.param == param, error
    assert error.type == "invalid_request_error"


def test_a_prompt_that_can_never_fit_is_refused_with_the_limit(oai):
    error = refused(oai, openai.BadRequestError, messages=[{"role": "user", "content": "again and " * 20_000}])
    assert error.code == "context_length_exceeded"
    assert any(character.isdigit() for character in error.message)


def test_what_cannot_be_done_is_refused_and_not_ignored(oai):
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    refused(oai, openai.BadRequestError, messages=[{"role": "user", "content": image}])
    refused(oai, openai.BadRequestError, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})


def test_a_grammar_that_makes_no_sense_is_refused(oai):
    refused(oai, openai.BadRequestError, extra_body={"structured_outputs": {"regex": "("}})
    refused(oai, openai.BadRequestError, extra_body={"structured_outputs": {"grammar": "start: nothing"}})
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}, "strict": True}}
    refused(oai, openai.BadRequestError, response_format=schema)


def test_unknown_fields_are_ignored(oai):
    answer = oai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=1,
                                         extra_body={"no_such_field": {"a": 1}})
    assert answer.choices


@pytest.mark.parametrize("key", ["wrong", KEY + "x", KEY[:-1]])
def test_a_wrong_key_is_refused(key):
    stranger = openai.OpenAI(base_url=URL + "/v1", api_key=key, timeout=TIMEOUT_S, max_retries=0)
    error = refused(stranger, openai.AuthenticationError)
    assert error.code == "invalid_api_key"
    assert send("GET", "/v1/models", authorization="")[0] == 401


def test_errors_outside_the_apis_have_the_envelope_too():
    for method, path, body, status in [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/chat/completions", None, 405),
        ("POST", "/v1/chat/completions", "{", 400),
        ("POST", "/v1/chat/completions", "[]", 400),
        ("DELETE", "/v1/models", None, 405),
    ]:
        found, _, text = send(method, path, body)
        assert (found, type(json.loads(text)["error"]["message"])) == (status, str), (method, path)
    page = {"content_type": "text/plain", "origin": "http://localhost"}
    assert send("POST", "/v1/chat/completions", "{}", **page)[0] == 415
    status, _, text = send("POST", "/v1/messages", "{")
    assert status == 400 and json.loads(text)["type"] == "error"


def test_a_body_that_is_too_long_is_refused_unread():
    where = urlsplit(URL)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=TIMEOUT_S)
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in [("authorization", f"Bearer {KEY}"), ("content-type", "application/json"), ("content-length", str(1 << 40))]:
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["message"]
    connection.close()


def test_hanging_up_in_mid_stream_frees_everything(oai):
    for _ in range(3):
        stream = oai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Tell me a very long story."}],
                                             max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
        for number, _ in enumerate(stream):
            if number == 3:
                break
        stream.close()
    settle("consort_requests_running", lambda requests: requests == 0)
    settle("consort_kv_pages_used", lambda pages: pages == 0)


def test_the_server_tells_how_it_is(oai):
    assert send("GET", "/health")[0] == 200
    status, _, text = send("GET", "/ready")
    assert status == 200, text
    before = metric("consort_generated_tokens_total")
    oai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, extra_body={"ignore_eos": True})
    settle("consort_generated_tokens_total", lambda tokens: tokens == before + 4)
    for name in ["requests_running", "requests_waiting", "kv_usage_ratio", "prefix_hit_tokens_total", "prompt_tokens_total",
                 "time_to_first_token_seconds_count", "time_between_tokens_seconds_count", "requests_finished_total"]:
        metric("consort_" + name)


def test_the_document_describes_every_endpoint():
    paths = json.loads(send("GET", "/openapi.json")[2])["paths"]
    expected = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/v1/models/{model}",
                "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/tokenizer_info", "/health", "/ready", "/metrics"]
    assert set(expected) <= set(paths)
