"""A live server, seen through the official clients.

CONSORT_URL is where it listens, CONSORT_MODEL what it serves, CONSORT_KEY a key that it takes. Nothing here looks inside
the server: what the clients' own types and exceptions say is what counts.
"""

import os

import anthropic
import openai
import pytest

URL = os.environ["CONSORT_URL"].rstrip("/")
MODEL = os.environ["CONSORT_MODEL"]
KEY = os.environ.get("CONSORT_KEY", "none")
TIMEOUT_S = 60.0

CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""Small enough that a small model finishes it within few tokens."""


@pytest.fixture(scope="session")
def oai():
    return openai.OpenAI(base_url=URL + "/v1", api_key=KEY, timeout=TIMEOUT_S, max_retries=0)


@pytest.fixture(scope="session")
def claude():
    return anthropic.Anthropic(base_url=URL, api_key=KEY, timeout=TIMEOUT_S, max_retries=0)


@pytest.fixture
def user():
    return [{"role": "user", "content": "Name three colours."}]
