"""The conversations that the check of templates renders, as bodies of chat completions."""

from __future__ import annotations

import json
from typing import Any

Body = dict[str, Any]
Message = dict[str, Any]
# what Jinja, HTML or a template would take for its own
ODD = "naïve 🙂 <b> & \"q\" 'x' \\n {{ messages }} {% if x %}\n\n  日本語\ttab "
ARGUMENTS = {"city": "Paris"}
NESTED = {"a": [1, 2.5, {"b": None}], "text": 'say "hi"\n<b>é</b>', "on": True, "far": 1e22, "none": None, "empty": {}}


def message(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def user(content: Any = "How is the weather in Paris?") -> Message:
    return message("user", content)


def answer(content: Any = "It is sunny.", **fields: Any) -> Message:
    return message("assistant", content, **fields)


def call(place: int = 1, name: str = "get_weather", arguments: dict[str, Any] | str = ARGUMENTS) -> dict[str, Any]:
    """Return a call with an id that every family accepts: nine letters and digits."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call{place:05}", "type": "function", "function": {"name": name, "arguments": text}}


def calls(*made: dict[str, Any], content: str | None = None, **fields: Any) -> Message:
    return answer(content, tool_calls=list(made), **fields)


def result(place: int = 1, content: Any = '{"degrees": 21}', **fields: Any) -> Message:
    return message("tool", content, tool_call_id=f"call{place:05}", **fields)


def tool(name: str, properties: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, "required": list(properties or {})[:1]}
    function = {"name": name, "description": f"Call {name}.", "parameters": parameters, **fields}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", {"city": {"type": "string", "description": "The city, e.g. Rome"}})
TIME = tool(
    "get_time",
    {"zone": {"type": "string", "description": "The zone"}, "short": {"type": "boolean", "description": "Short"}},
)
RICH = tool(
    "search",
    {
        "query": {"type": "string", "description": "What <to> find", "enum": ["a", "b & c"], "default": "a"},
        "limit": {"type": ["integer", "null"], "description": "How many", "minimum": 1},
        "filter": {
            "type": "object",
            "description": "é",
            "properties": {"tags": {"type": "array", "items": {"type": "string"}, "description": "Tags"}},
            "required": ["tags"],
        },
        "range": {"type": "array", "items": {"type": "number"}, "description": "Range"},
    },
    strict=True,
)
LOOSE = tool("pick", {"value": {"anyOf": [{"type": "string"}, {"type": "number"}], "description": "Any of two"}})
NONE = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}}
TALK = [user("hi"), answer("Hello."), user()]
LOOKED = [user(), calls(call()), result()]
TWO = (call(1), call(2, "get_time", {"zone": "UTC"}))
TWICE = [*LOOKED, calls(call(2, "get_time", {"zone": "UTC"})), result(2, "noon")]
GO_ON: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}


def with_tools(*messages: Message, tools: tuple[dict[str, Any], ...] = (WEATHER, TIME), **switches: Any) -> Body:
    return {"messages": list(messages), "tools": list(tools), **switches}


def plain(*messages: Message, **fields: Any) -> Body:
    return {"messages": list(messages), **fields}


def switched(*messages: Message, **switches: Any) -> Body:
    return plain(*messages, chat_template_kwargs=switches)


CONVERSATIONS: dict[str, Body] = {
    "question": plain(user()),
    "system": plain(message("system", "Be brief."), user()),
    "developer": plain(message("developer", "Be brief."), user()),
    "turns": plain(*TALK),
    "system and turns": plain(message("system", "Be brief."), *TALK, answer("Sunny."), user("And Rome?")),
    "odd letters": plain(message("system", ODD), user(ODD), answer(ODD), user(ODD)),
    "white space": plain(user("  a \n\n b  "), answer("\n c \n"), user("\n\nd\n")),
    "long": plain(user("word " * 2000), answer("yes " * 500), user("ok")),
    "parts": plain(user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
    "empty question": plain(user("")),
    "empty answer": plain(user("hi"), answer(""), user()),
    "answered": plain(user(), answer()),
    "user twice": plain(user("a"), user("b")),
    "assistant first": plain(answer("Welcome."), user()),
    "system alone": plain(message("system", "Be brief.")),
    "system twice": plain(message("system", "Be brief."), message("system", "Be kind."), user()),
    "system amid": plain(user("a"), answer("b"), message("system", "Be brief."), user("c")),
    "tools": with_tools(user()),
    "tools and system": with_tools(message("system", "Be brief."), user()),
    "tools and turns": with_tools(*TALK),
    "rich tool": with_tools(user(), tools=(RICH,)),
    "loose tool": with_tools(user(), tools=(LOOSE,)),
    "bare tool": with_tools(user(), tools=(NONE,)),
    "call": with_tools(*LOOKED),
    "call and answer": with_tools(*LOOKED, answer()),
    "call, answer, question": with_tools(*LOOKED, answer(), user("And Rome?")),
    "call after text": with_tools(user(), calls(call(), content="Let me look."), result()),
    "call after empty text": with_tools(user(), calls(call(), content=""), result()),
    "call without a result": with_tools(user(), calls(call())),
    "calls at once": with_tools(user(), calls(*TWO), result(1), result(2, "noon")),
    "calls at once, answered": with_tools(user(), calls(*TWO), result(1), result(2, "noon"), answer(), user("more")),
    "calls twice": with_tools(*TWICE),
    "calls twice, answered": with_tools(*TWICE, answer(), user("And Rome?"), *LOOKED[1:]),
    "nested arguments": with_tools(user(), calls(call(arguments=NESTED)), result(), tools=(RICH,)),
    "no arguments": with_tools(user(), calls(call(name="now", arguments={})), result(), tools=(NONE,)),
    "broken arguments": with_tools(user(), calls(call(arguments='{"city": ')), result()),
    "text result": with_tools(user(), calls(call()), result(content="21 degrees & <sunny>\n")),
    "named result": with_tools(user(), calls(call()), result(name="get_weather")),
    "call without tools": plain(*LOOKED),
    "thoughts": plain(user("hi"), answer("Hello.", reasoning_content="A greeting."), user()),
    "thoughts last": plain(user("hi"), answer("Hello.", reasoning_content="A greeting.\n\nTwo lines.")),
    "thoughts in text": plain(user("hi"), answer("<think>\nA greeting.\n</think>\n\nHello."), user()),
    "thoughts and call": with_tools(user(), calls(call(), reasoning_content="I need it."), result()),
    "thoughts, text, call": with_tools(
        user(), calls(call(), content="Let me look.", reasoning_content="I need it."), result()
    ),
    "continued": plain(user(), answer("It is"), **GO_ON),
    "continued with tools": with_tools(*LOOKED, answer("It is <"), **GO_ON),
    "thinking off": switched(*TALK, enable_thinking=False, thinking=False),
    "thinking on": switched(*TALK, enable_thinking=True, thinking=True),
    "effort": switched(*TALK, reasoning_effort="high"),
}
