"""Where Weft departs from OpenAI's document, each with its reason; docs/reference says the same to users.

Nothing here touches what an answer must look like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

NO_STATE = "nothing but answers is kept between requests"
TEXT_ONLY = "the served models read and write text"
FUNCTIONS_ONLY = "functions are the only tools"
NULL_FIRST = "the first token of an echo has null for its logprob, as OpenAI's own has, and the document no room for it"

# request properties that are refused when they are given: {component: {property: reason}}
UNSERVED_PROPERTIES = {
    "CreateChatCompletionRequest": {
        "audio": TEXT_ONLY,
        "modalities": TEXT_ONLY,
        "function_call": "deprecated, use tool_choice",
        "functions": "deprecated, use tools",
        "web_search_options": FUNCTIONS_ONLY,
    },
    "CreateCompletionRequest": {
        "echo": NULL_FIRST,
        "suffix": "no model that fills in is served",
    },
    "CreateEmbeddingRequest": {"dimensions": "a mean of hidden states cannot be shortened"},
    "CreateResponse": {"context_management": NO_STATE, "conversation": NO_STATE},
    "ResponseProperties": {"background": NO_STATE, "prompt": NO_STATE},
    "TokenCountsBody": {"conversation": NO_STATE},
}
# of the kinds of message, part, item and tool these are served: {component or component.property: (kinds, reason)}
SERVED_VARIANTS: dict[str, tuple[list[str], str]] = {
    "ChatCompletionRequestMessage": (
        [f"ChatCompletionRequest{role}Message" for role in ("Developer", "System", "User", "Assistant", "Tool")],
        "function messages are deprecated",
    ),
    "ChatCompletionRequestUserMessageContentPart": (["ChatCompletionRequestMessageContentPartText"], TEXT_ONLY),
    "ChatCompletionMessageToolCalls": (["ChatCompletionMessageToolCall"], FUNCTIONS_ONLY),
    "CreateChatCompletionRequest.tools": (["ChatCompletionTool"], FUNCTIONS_ONLY),
    "ChatCompletionToolChoiceOption": (["ChatCompletionNamedToolChoice"], FUNCTIONS_ONLY),
    "InputContent": (["InputTextContent"], TEXT_ONLY),
    "FunctionCallOutputItemParam.output": (["InputTextContentParam"], TEXT_ONLY),
    "InputItem": (["EasyInputMessage", "Item"], NO_STATE),
    "Item": (
        ["InputMessage", "OutputMessage", "FunctionToolCall", "FunctionCallOutputItemParam", "ReasoningItem"],
        FUNCTIONS_ONLY,
    ),
    "Tool": (["FunctionTool"], FUNCTIONS_ONLY),
    "ToolChoiceParam": (["ToolChoiceOptions", "ToolChoiceFunction"], FUNCTIONS_ONLY),
}
# properties of which less is served: (component, property, further keywords, reason)
NARROWED: list[tuple[str, str, dict[str, Any], str]] = [
    ("CreateChatCompletionRequest", "n", {"maximum": 16}, "a cap"),
    ("CreateCompletionRequest", "n", {"maximum": 16}, "a cap"),
    ("CreateCompletionRequest", "max_tokens", {"minimum": 1}, "zero is for echo: " + NULL_FIRST),
    ("CreateCompletionRequest", "best_of", {"minimum": 1}, "of none there is no best"),
    ("CreateChatCompletionRequest", "max_tokens", {"minimum": 1}, "an answer has a token"),
    ("CreateChatCompletionRequest", "max_completion_tokens", {"minimum": 1}, "an answer has a token"),
    ("ResponseProperties", "truncation", {"anyOf": [{"enum": ["disabled"]}]}, "prompts are not cut"),
    ("TokenCountsBody", "truncation", {"enum": ["disabled"]}, "prompts are not cut"),
    (
        "CreateEmbeddingRequest",
        "encoding_format",
        {"enum": ["float"]},
        "base64 is an array by the document",
    ),
]


@dataclass(frozen=True, slots=True)
class Allowed:
    """A refusal of what the document allows, told by its error body."""

    reason: str
    param: str = ".*"
    message: str = ".*"

    def covers(self, error: dict[str, Any]) -> bool:
        """Is this the refusal."""
        return bool(re.fullmatch(self.param, error["param"] or "") and re.search(self.message, error["message"]))


# what the document forbids and Weft lets through: {which part of the request, in Schemathesis' words: reason}
IGNORED = {
    r"\b(verbosity|prediction|store|generate_summary|reasoning -> summary)\b": "a wish, and changes nothing",
    r"\b(reasoning_effort|effort)\b": "which efforts there are is for the model's template to say",
    r"(format|json_schema) -> .*\b(name|description)\b": "what a format is called is not shown to the model",
    r"(format|json_schema) -> strict": "a schema is kept whether it says strict or not",
    r"input -> .*\b(id|status|phase)\b": "what an item was when it was made is not shown to the model",
    r"(input|tools) -> .*\btype\b": "kinds of other servers are left out of what the model sees",
    r"content -> .*\b(annotations|logprobs)\b": "an assistant's text is shown to the model, and nothing about it",
    r"\b(tool_call_id|call_id)\b": "most templates go by the order of calls and results",
    r"messages -> .*: name: Incorrect type": "null is as good as no name",
    r"messages -> .*\b(audio|function_call|refusal)\b": "what other servers leave in a history is passed over",
    r"messages -> .*: (content|tool_calls): Incorrect type": "null is as good as an empty one, as others write it",
    r"include -> .*: Invalid enum value": "what belongs to tools that are not served is passed over",
    r"\(was \w+, became null\)": "null is as good as no field, wherever it is let through",
    r"(content|stop): Array with fewer items": "an empty list is as good as an empty text, or none",
    r"parameter.* `include`.* in query": "what was not kept with an answer cannot be included later",
    "Missing required property: model": "where one model is served it needs no name",
    "max_output_tokens: Value smaller than minimum": "an answer may have fewer than 16 tokens",
    "seed: Value greater than maximum": "all numbers of 64 bits are seeds, signed or not",
}
# what the document allows and Weft refuses
REFUSED = [
    Allowed("the served model has so many tokens", message="maximum context length|token ids are from"),
    Allowed("said in words: token ids are its names", "logit_bias", "is not a token id|bias must be a number"),
    Allowed("said in words: it is required", "messages.*", "except in assistant messages and empty tool results"),
    Allowed("said in words: names have letters", ".*", "name must be a string of 1 to 128 characters"),
    Allowed(
        "there is nothing to answer",
        "input|prompt",
        "is empty|at least (one|1) item|expected a string|no item contains",
    ),
    Allowed("they are there to be chosen from", "tool_choice", "the request has no tools|no tool is named"),
    Allowed("said in words: it needs the other", "top_logprobs", "needs logprobs to be true"),
    Allowed(
        "said in words: more than n, and no stream", "best_of", "must be at least n|cannot be streamed|at most 128"
    ),
    Allowed("an empty one would end every answer at once", r"stop\.\d+", "at least 1 character"),
    Allowed("the document rounds the bounds of 64 bits", "seed", "greater than or equal|less than"),
    Allowed("a format by schema has a schema", r"response_format\.json_schema", "expected an object with a schema"),
    Allowed("prompts are not cut", "truncation"),
    Allowed("an answer is found by its id", "previous_response_id", "is stored"),
    Allowed("an answer that is complete has nothing to wait for", "stream", "cannot be streamed"),
    Allowed("events are counted from 0", "starting_after", "expected a number"),
    Allowed("said in words: 1 to 100", "limit", "expected 1 to 100"),
    Allowed("items are found by their ids", "after", "no item of that id"),
    *(Allowed(reason, name, "not supported") for each in UNSERVED_PROPERTIES.values() for name, reason in each.items()),
]
