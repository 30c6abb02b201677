"""What Schemathesis is told beyond OpenAI's document: the served model, the body of errors, and `exceptions`."""

from __future__ import annotations

import itertools
import json
import os
import re
import urllib.request
from typing import Any

import jsonschema_rs
import schemathesis
from schemathesis.specs.openapi.checks import (
    AcceptedNegativeData,
    RejectedPositiveData,
    negative_data_rejection,
    positive_data_acceptance,
)

from tests.clients.openapi.exceptions import IGNORED, NARROWED, REFUSED, SERVED_VARIANTS, UNSERVED_PROPERTIES

MODEL = os.environ["WEFT_MODEL_NAME"]
STREAMING = ("/chat/completions", "/completions", "/responses")
# of answers whose request sets no length, by the name that each path has for it; 0: as long as the model likes
LONGEST_ANSWER = int(os.environ.get("WEFT_LONGEST_ANSWER", "0"))
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
TURNS = itertools.cycle((True, False))
EVENTS: dict[str, Any] = {}


def before_load_schema(context: Any, schema: dict[str, Any]) -> None:
    """Requests as far as they are served. Answers stay as OpenAI has them; errors, which the document lacks, too."""
    components = schema["components"]["schemas"]
    _spell_nullable(schema["components"])
    _forget_discriminators(schema["components"])
    for component, properties in UNSERVED_PROPERTIES.items():
        for name in properties:
            del _properties(components[component])[name]
    for component, name, keywords, _ in NARROWED:
        _properties(components[component])[name].update(keywords)
    for place, (variants, _) in SERVED_VARIANTS.items():
        component, _, name = place.partition(".")
        part = _properties(components[component])[name] if name else components[component]
        assert _keep(part, [f"#/components/schemas/{variant}" for variant in variants]), f"{place} has nothing else"
    for path in STREAMING:
        # Schemathesis would hold the frame of an event to the schema of what is in it; see `streams_keep_their_schema`.
        # Of completions it is said in words only: a stream's chunks have the form of a whole answer.
        content = schema["paths"][path]["post"]["responses"]["200"]["content"]
        EVENTS[path] = content.get("text/event-stream", content["application/json"])["schema"]
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"]["4XX"] = {"description": "refused", "content": error}
            if "requestBody" in operation:
                content = {"application/json": operation["requestBody"]["content"]["application/json"]}
                operation["requestBody"] = {"required": True, "content": content}


def _spell_nullable(part: Any) -> None:
    """The document says that it is OpenAPI 3.1, and writes `nullable` as in 3.0, where 3.1 does not know it."""
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _spell_nullable(each)
    if isinstance(part, dict) and part.get("nullable") is True:
        del part["nullable"]
        meant = dict(part)
        part.clear()
        part["anyOf"] = [meant, {"type": "null"}]


def _forget_discriminators(part: Any) -> None:
    """They have no mapping, so that kinds would go by the names of their schemas, which is not what the schemas say."""
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _forget_discriminators(each)
    if isinstance(part, dict) and "mapping" not in part.get("discriminator", {"mapping": {}}):
        del part["discriminator"]


def _properties(component: dict[str, Any]) -> dict[str, Any]:
    """An object's own."""
    own = component if "properties" in component else next(p for p in component["allOf"] if "properties" in p)
    properties: dict[str, Any] = own["properties"]
    return properties


def _keep(part: Any, kept: list[str]) -> bool:
    """Of the components to choose from in there, these; whether others went."""
    nodes = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    has_cut = sum(_keep(each, kept) for each in nodes) > 0
    for key in {"oneOf", "anyOf"} & set(part if isinstance(part, dict) else ()):
        chosen = [each for each in part[key] if each.get("$ref", kept[0]) in kept]
        has_cut |= len(chosen) < len(part[key])
        part[key] = chosen
    return has_cut


def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """A model that is served, where a model is named, an answer that is kept, and a stream every other time."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    if "model" in (case.path_parameters or {}):
        case.path_parameters["model"] = MODEL
    if "response_id" in (case.path_parameters or {}) and case.meta.generation.mode.is_positive:
        case.path_parameters["response_id"] = kept_answer()
    if case.operation.path in STREAMING and isinstance(case.body, dict):
        if case.meta.generation.mode.is_positive:
            case.body["stream"] = next(TURNS)
        if LONGEST_ANSWER and not any(name in case.body for name in LENGTHS):
            case.body[LENGTHS[STREAMING.index(case.operation.path)]] = LONGEST_ANSWER


def kept_answer() -> str:
    """The id of a new one."""
    headers = {"authorization": f"Bearer {os.environ['WEFT_KEY']}", "content-type": "application/json"}
    body = json.dumps({"model": MODEL, "input": "Keep this.", "max_output_tokens": 4}).encode()
    request = urllib.request.Request(f"{os.environ['WEFT_URL']}/v1/responses", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        name: str = json.load(answer)["id"]
    return name


def streams_keep_their_schema(context: Any, response: Any, case: Any) -> None:
    """Every event of a stream has the form that the document gives it."""
    if response.status_code != 200 or not response.headers["content-type"][0].startswith("text/event-stream"):
        return
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    if case.operation.path != "/responses":
        assert events.pop() == "[DONE]", "a stream ends with [DONE]"
    assert events, "a stream has an event"
    components = case.operation.schema.raw_schema["components"]
    validate = jsonschema_rs.validator_for({**EVENTS[case.operation.path], "components": components})
    for event in map(json.loads, events):
        if case.operation.path == "/completions":
            _end_choices(event)
        problems = [f"{problem.instance_path}: {problem.message}" for problem in validate.iter_errors(event)]
        assert not problems, f"{problems} in {event}"


def _end_choices(event: dict[str, Any]) -> None:
    """The document has one schema for whole answers and chunks, where a choice that goes on has no reason to end."""
    for choice in event["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"


def valid_requests_are_answered(context: Any, response: Any, case: Any) -> None:
    """Schemathesis' own check, but for refusals that `exceptions` has a reason for."""
    try:
        positive_data_acceptance(context, response, case)
    except RejectedPositiveData:
        error = response.json()["error"]
        if any(each.covers(error) for each in REFUSED):
            return
        raise


def invalid_requests_are_refused(context: Any, response: Any, case: Any) -> None:
    """Likewise, but for fields that change nothing."""
    try:
        negative_data_rejection(context, response, case)
    except AcceptedNegativeData as failure:
        if any(re.search(part, failure.message) for part in IGNORED) or _is_null(case.body, failure.message):
            return
        if not _is_valid(case):
            raise


def _is_valid(case: Any) -> bool:
    """Schemathesis counts as wrong what is wrong by one of several kinds, though it may be right by another."""
    body = case.operation.definition.raw.get("requestBody", {}).get("content", {}).get("application/json")
    if body is None:
        return False
    components = case.operation.schema.raw_schema["components"]
    return bool(jsonschema_rs.validator_for({**body["schema"], "components": components}).is_valid(case.body))


def _is_null(body: Any, message: str) -> bool:
    """In an optional field null is as good as no field: many SDKs write what they were not given."""
    named = re.search(r"in body - (\w+(?: -> \w+)*): Incorrect type", message)
    for name in named[1].split(" -> ") if named else ():
        body = body.get(name, "") if isinstance(body, dict) else ""
    return bool(named) and body is None


for hook in (before_load_schema, before_call):
    schemathesis.hook(hook)
for check in (streams_keep_their_schema, valid_requests_are_answered, invalid_requests_are_refused):
    schemathesis.check(check)
