"""/v1/completions, /v1/embeddings, /v1/models, /tokenize and /detokenize through the openai client."""

import base64
import math
import struct

import openai
import pytest

from conftest import MODEL

PROMPT = "The capital of France is"


def complete(oai, prompt=PROMPT, **settings):
    return oai.completions.create(model=MODEL, prompt=prompt, **({"max_tokens": 8, "temperature": 0} | settings))


def tokenize(oai, **body):
    return oai.post("/../tokenize", cast_to=object, body={"model": MODEL, **body})


def test_a_prompt_is_continued(oai):
    answer = complete(oai)
    assert answer.object == "text_completion"
    assert "Paris" in answer.choices[0].text
    assert answer.usage.completion_tokens <= 8


def test_a_stream_says_what_the_whole_answer_says(oai):
    chunks = list(complete(oai, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == complete(oai).choices[0].text
    assert chunks[-1].usage.completion_tokens > 0


def test_several_prompts_get_several_answers(oai):
    prompts = [PROMPT, "One, two, three,"]
    answer = complete(oai, prompts, n=2, best_of=openai.omit)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == complete(oai, prompts[0]).choices[0].text
    assert answer.choices[2].text == complete(oai, prompts[1]).choices[0].text


def test_a_prompt_may_be_tokens(oai):
    tokens = tokenize(oai, prompt=PROMPT)["tokens"]
    assert complete(oai, tokens).choices[0].text == complete(oai).choices[0].text
    assert complete(oai, [tokens]).choices[0].text == complete(oai).choices[0].text


def test_echo_gives_the_prompt_and_its_log_probabilities(oai):
    answer = complete(oai, echo=True, logprobs=2, max_tokens=1)
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT)
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == choice.text
    for offset, token in zip(logprobs.text_offset, logprobs.tokens):
        assert choice.text[offset : offset + len(token)] == token


def test_a_prompt_can_be_scored_without_an_answer(oai):
    choice = complete(oai, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.text == PROMPT
    # The likely word is likelier than an unlikely one: what lm-eval asks.
    score = lambda text: sum(complete(oai, text, echo=True, logprobs=1, max_tokens=0).choices[0].logprobs.token_logprobs[1:])
    assert score(PROMPT + " Paris.") > score(PROMPT + " Tuesday.")


def test_a_suffix_is_refused(oai):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(oai, suffix="!")
    assert caught.value.param == "suffix"


def test_the_model_is_listed(oai):
    assert [model.id for model in oai.models.list()] == [MODEL]
    assert oai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        oai.models.retrieve("nobody/nothing")
    assert caught.value.code == "model_not_found"


def test_embeddings_have_one_length_and_mean_something(oai):
    texts = ["The cat sleeps.", "A cat is sleeping.", "Interest rates rose by half a percent."]
    # The client asks for base64 unless told otherwise, and unpacks it.
    answer = oai.embeddings.create(model=MODEL, input=texts)
    vectors = [item.embedding for item in answer.data]
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert len({len(vector) for vector in vectors}) == 1
    near = lambda a, b: sum(x * y for x, y in zip(a, b)) / math.hypot(*a) / math.hypot(*b)
    assert near(vectors[0], vectors[1]) > near(vectors[0], vectors[2])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_embeddings_are_the_same_as_floats_and_as_base64(oai):
    floats = oai.embeddings.create(model=MODEL, input="Hello", encoding_format="float").data[0].embedding
    raw = oai.post("/embeddings", cast_to=object, body={"model": MODEL, "input": "Hello", "encoding_format": "base64"})
    packed = base64.b64decode(raw["data"][0]["embedding"])
    assert struct.unpack(f"<{len(packed) // 4}f", packed) == pytest.approx(floats)


def test_tokens_make_the_text_they_came_from(oai):
    text = "Grüße aus dem Wald 🌲"
    tokens = tokenize(oai, prompt=text, add_special_tokens=False)
    assert tokens["count"] == len(tokens["tokens"])
    back = oai.post("/../detokenize", cast_to=object, body={"model": MODEL, "tokens": tokens["tokens"]})
    assert back["prompt"] == text


def test_a_conversation_can_be_counted(oai):
    messages = [{"role": "user", "content": "Hello"}]
    counted = tokenize(oai, messages=messages)["count"]
    answer = oai.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert counted == answer.usage.prompt_tokens
