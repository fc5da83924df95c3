"""A hook of schemathesis: requests that name some model name the one that is served, so that more is tried than its name."""

import os

import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and len(case.body["model"]) % 4 != 3:
        case.body["model"] = os.environ["CONSORT_MODEL"]
