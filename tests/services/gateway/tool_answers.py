"""What models write when they call tools, in every format, and the text and calls that must be read from it."""

from __future__ import annotations

import json
from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "n": {"type": "array"}}},
    "add": {"properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "number"}, {"type": "null"}]}}},
}
SEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
SEEK_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
SEEK_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
ROME = '{"city": "Rome <\\"}{[\\\\", "n": [1, {"a": null}]}'
ADD = '{"a": 1, "b": -2.5e3}'
BOTH = [("get_weather", ROME), ("add", ADD)]

NOT_JSON = ["{1, 2}", 'b"x"', "1j", "...", "1e999", "{[]: 1}", "{(1, 2): 3}", "'\\ud83d'"]
HALF = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
ADD_CALL = '{"name": "add", "arguments": {"a": 1}}'
SEEK_NONE = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁call▁end｜>"
XML = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"

# format, what the model writes, its text, its calls
ANSWERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "hermes": (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>\n'
        f'<tool_call>{{"name": "add", "arguments": {ADD}}}</tool_call>',
        "Let me see.",
        BOTH,
    ),
    "hermes, arguments first": (
        "hermes",
        f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call>',
        "",
        [BOTH[1]],
    ),
    "hermes, arguments as a string": (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(ADD)}}}</tool_call>',
        "",
        [BOTH[1]],
    ),
    "hermes, no arguments": ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "hermes, null arguments": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": null}</tool_call>',
        "",
        [("add", "{}")],
    ),
    "hermes, no end tag": ("hermes", f'<tool_call>{{"name": "add", "arguments": {ADD}}}', "", [BOTH[1]]),
    "hermes, ended within": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1}')]),
    "hermes, broken": (
        "hermes",
        "Well <tool_call>nothing</tool_call> so",
        "Well <tool_call>nothing</tool_call> so",
        [],
    ),
    "hermes, cut before the name": ("hermes", 'x <tool_call>{"na', 'x <tool_call>{"na', []),
    "hermes, no call": ("hermes", "a < b <tool and so on <tool_cal", "a < b <tool and so on <tool_cal", []),
    "xml": (
        "qwen-xml",
        'Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome "<b>\n\n</parameter>\n'
        '<parameter=n>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nNone\n</parameter>\n"
        "<parameter=c>7</parameter></function>\n</tool_call>",
        "Let me see.",
        [
            ("get_weather", '{"city": "Rome \\"<b>\\n", "n": [1, {"a": null}]}'),
            ("add", '{"a": 1, "b": null, "c": "7"}'),
        ],
    ),
    "xml, no arguments": ("qwen-xml", "<tool_call>\n<function=add>\n</function>\n</tool_call>", "", [("add", "{}")]),
    "xml, no outer tag": (
        "qwen-xml",
        "<function=add>\n<parameter=a>\nmany\n</parameter>\n</function>",
        "",
        [("add", '{"a": "many"}')],
    ),
    "xml, ended within": (
        "qwen-xml",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo",
        "",
        [("get_weather", '{"city": "Ro"}')],
    ),
    "xml, no call": ("qwen-xml", "a <tool_call>b <function=c\nd", "a <tool_call>b <function=c\nd", []),
    "glm": (
        "glm",
        'Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome "<b>\n</arg_value>\n'
        '<arg_key>n</arg_key>\n<arg_value>[1, {"a": null}]</arg_value>\n</tool_call>\n'
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>null</arg_value>"
        "</tool_call>",
        "Let me see.",
        [("get_weather", '{"city": "Rome \\"<b>\\n", "n": [1, {"a": null}]}'), ("add", '{"a": 1, "b": null}')],
    ),
    "granite-20b": (
        "granite-20b",
        f'Let me see.\n<function_call> {{"name": "get_weather", "arguments": {ROME}}}\n'
        f'<function_call> {{"name": "add", "arguments": {ADD}}}',
        "Let me see.",
        BOTH,
    ),
    "internlm2": (
        "internlm2",
        f'Let me see.<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {ROME}}}<|action_end|>',
        "Let me see.",
        [BOTH[0]],
    ),
    "gemma4": (
        "gemma4",
        'Let me see.\n<|tool_call>call:get_weather{city:<|"|>Rome "<b>,\n}<|"|>,n:[1,{a:null,<|"|>b:<|"|>:[true]},[]]}'
        "<tool_call|><|tool_call>call:add{a:1,b:None}<tool_call|>",
        "Let me see.",
        [
            ("get_weather", '{"city": "Rome \\"<b>,\\n}", "n": [1, {"a": null, "b:": [true]}, []]}'),
            ("add", '{"a": 1, "b": null}'),
        ],
    ),
    "gemma4, no arguments": ("gemma4", "<|tool_call>call:now{}<tool_call|>", "", [("now", "{}")]),
    "gemma4, ended within": (
        "gemma4",
        '<|tool_call>call:add{a:[1,{b:<|"|>x',
        "",
        [("add", '{"a": [1, {"b": "x"}]}')],
    ),
    "gemma4, bare words": (
        "gemma4",
        "<|tool_call>call:add{a: some words , b:-2.5e3, c}<tool_call|>",
        "",
        [("add", '{"a": "some words", "b": -2.5e3}')],
    ),
    "gemma4, unclosed": ("gemma4", "<|tool_call>call:add{a:[1<tool_call|>", "", [("add", '{"a": [1]}')]),
    "gemma4, no call": ("gemma4", "a <|tool_call>b <|tool_call>call:c d", "a <|tool_call>b <|tool_call>call:c d", []),
    "function-gemma": (
        "function-gemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>",
        "",
        [("get_weather", '{"city": "Rome"}')],
    ),
    "apertus": (
        "apertus",
        f'Let me see.<|tools_prefix|>[{{"get_weather": {ROME}}}, {{"add": {ADD}}}]<|tools_suffix|>',
        "Let me see.",
        BOTH,
    ),
    "apertus, no call": ("apertus", "<|tools_prefix|>[1]", "<|tools_prefix|>[1]", []),
    "apertus, no name": ("apertus", '<|tools_prefix|>[{"": {}}]', '<|tools_prefix|>[{"": {}}]', []),
    "solar": (
        "solar",
        f"Let me see.<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>{ROME}"
        f"<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>add<|tool_call:args|>{ADD}<|tool_call:end|><|calls|>",
        "Let me see.",
        BOTH,
    ),
    "minimax-m1": (
        "minimax-m1",
        f'Let me see.\n<tool_calls>\n{{"name": "get_weather", "arguments": {ROME}}}\n'
        f'{{"name": "add", "arguments": {ADD}}}\n</tool_calls>',
        "Let me see.",
        BOTH,
    ),
    "granite-3": (
        "granite-3",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ROME}}}, {{"name": "add", "arguments": {ADD}}}]',
        "",
        BOTH,
    ),
    "gigachat": (
        "gigachat",
        f'Let me see.<|function_call|>{{"name": "get_weather", "arguments": {ROME}}}'
        f'<|function_call|>{{"name": "add", "arguments": {ADD}}}',
        "Let me see.",
        BOTH,
    ),
    "minicpm5": (
        "minicpm5",
        'Let me see.\n<function name="get_weather"><param name="city">Rome</param></function>\n'
        '<function name="add"><param name="a">1</param></function>',
        "Let me see.",
        [("get_weather", '{"city": "Rome"}'), ("add", '{"a": 1}')],
    ),
    "minicpm5, quoted": (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[ a\n</param> <b> "c"]]></param>'
        '<param name="n"><![CDATA[x]]></param></function>',
        "",
        [("get_weather", '{"city": " a\\n</param> <b> \\"c\\"", "n": "x"}')],
    ),
    "olmo3": (
        "olmo3",
        "Let me see.\n<function_calls>\nget_weather(city='Rome', n=[1, {\"a\": null}])\nadd(a=1, b=null)\n"
        "</function_calls>",
        "Let me see.",
        [("get_weather", '{"city": "Rome", "n": [1, {"a": null}]}'), ("add", '{"a": 1, "b": null}')],
    ),
    "olmo3, unknown": (
        "olmo3",
        "<function_calls>\nother(a=1)\n</function_calls>",
        "<function_calls>\nother(a=1)\n</function_calls>",
        [],
    ),
    "lfm2, fenced": (
        "lfm2",
        "<|tool_call_start|>\n```python\nadd(a=1)\n```\n<|tool_call_end|>",
        "",
        [("add", '{"a": 1}')],
    ),
    "harmony": (
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD}<|call|>",
        "",
        BOTH,
    ),
    "harmony, no arguments": (
        "harmony",
        " to=functions.add<|channel|>commentary<|message|><|call|>",
        "",
        [("add", "{}")],
    ),
    "harmony, ended within": (
        "harmony",
        '<|channel|>commentary to=add<|message|>{"a": 1',
        "",
        [("add", '{"a": 1}')],
    ),
    "harmony, no object": (
        "harmony",
        "<|channel|>commentary to=functions.add code<|message|>1 + 1<|call|>",
        "1 + 1",
        [],
    ),
    "harmony, no header": ("harmony", "So to=functions.add", "So to=functions.add", []),
    "glm, no arguments": ("glm", "<tool_call>now\n</tool_call>", "", [("now", "{}")]),
    "glm, no call": (
        "glm",
        "a `<tool_call>` opens, `</tool_call>` closes",
        "a `<tool_call>` opens, `</tool_call>` closes",
        [],
    ),
    "seed": (
        "seed",
        "So.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome\n</parameter>\n<parameter=n>[1]</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=add>\n</function>\n</seed:tool_call>",
        "So.",
        [("get_weather", '{"city": "Rome\\n", "n": [1]}'), ("add", "{}")],
    ),
    "hy3": (
        "hy3",
        "So.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "</tool_call>\n<tool_call>add<tool_sep></tool_call>\n</tool_calls>",
        "So.",
        [("get_weather", '{"city": "Rome"}'), ("add", "{}")],
    ),
    "minimax": (
        "minimax-m2",
        'So.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome <invoke></parameter>\n'
        '<parameter name="n">[1]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "So.",
        [("get_weather", '{"city": "Rome <invoke>", "n": [1]}'), ("now", "{}")],
    ),
    "minimax, no section": (
        "minimax-m2",
        '<invoke name="add"><parameter name="a">1</parameter></invoke>',
        "",
        [("add", '{"a": 1}')],
    ),
    "minimax, no call": (
        "minimax-m2",
        'write <minimax:tool_call> and <invoke name="x">',
        'write <minimax:tool_call> and <invoke name="x">',
        [],
    ),
    "deepseek v3.2": (
        "deepseek-v3.2",
        'So.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="m" string="false">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "So.",
        [("get_weather", '{"city": "7", "m": 7, "n": [1]}')],
    ),
    "deepseek v4": (
        "deepseek-v3.2",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        [("now", "{}")],
    ),
    "mistral list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME}}}, {{"name": "add", "arguments": {ADD}}}]',
        "",
        BOTH,
    ),
    "mistral names": (
        "mistral-args",
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{ADD}",
        "Sure.",
        BOTH,
    ),
    "nemotron": (
        "nemotron-v2",
        f'So.\n\n<TOOLCALL>[{{"name": "get_weather", "arguments": {ROME}}}, '
        f'{{"name": "add", "arguments": {ADD}}}]</TOOLCALL>',
        "So.",
        BOTH,
    ),
    "nemotron, no call": ("nemotron-v2", "a <TOOLCALL> b <TOOLCALL>[1]", "a <TOOLCALL> b <TOOLCALL>[1]", []),
    "command r": (
        "command-r",
        f'Hm.<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ROME}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "add", "parameters": {ADD}}}\n]<|END_ACTION|>',
        "Hm.",
        BOTH,
    ),
    "functionary": (
        "functionary",
        f"So.\n<function=get_weather>{ROME}</function><function=add>{ADD}</function>",
        "So.",
        BOTH,
    ),
    "functionary, no call": ("functionary", "a <function=NAME> and so on", "a <function=NAME> and so on", []),
    "lfm2": (
        "lfm2",
        "So. <|tool_call_start|>[add(a=1, b=[True, None, 'x)]']), get_weather()]<|tool_call_end|>",
        "So.",
        [("add", '{"a": 1, "b": [true, null, "x)]"]}'), ("get_weather", "{}")],
    ),
    "lfm2, no call": (
        "lfm2",
        "a <|tool_call_start|>[open('x')]<|tool_call_end|> b",
        "a <|tool_call_start|>[open('x')]<|tool_call_end|> b",
        [],
    ),
    "deepseek v3": (
        "deepseek-v3",
        "Now. " + SEEK.format(SEEK_V3.format("get_weather", ROME) + "\n" + SEEK_V3.format("add", ADD)),
        "Now.",
        BOTH,
    ),
    "deepseek v3.1": (
        "deepseek-v3.1",
        SEEK.format(SEEK_V31.format("get_weather", ROME) + SEEK_V31.format("add", ADD)),
        "",
        BOTH,
    ),
    "kimi": (
        "kimi",
        "Hm." + KIMI.format(KIMI_CALL.format("get_weather:0", ROME) + KIMI_CALL.format("add:1", ADD)),
        "Hm.",
        BOTH,
    ),
    "llama": (
        "llama",
        f'{{"name": "get_weather", "parameters": {ROME}}}; {{"name": "add", "parameters": {ADD}}}',
        "",
        BOTH,
    ),
    "llama with a tag": (
        "llama",
        f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {ADD}}}',
        "",
        [BOTH[1]],
    ),
    "llama, an object that is no call": ("llama", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    "llama, text": ("llama", "The answer is {x}.", "The answer is {x}.", []),
    "llama in python": (
        "llama",
        "<|python_start|>[add(a=1, b=[True, None, 'x)]']), get_weather()]<|python_end|>",
        "",
        [("add", '{"a": 1, "b": [true, null, "x)]"]}'), ("get_weather", "{}")],
    ),
    "llama, a list that is no call": ("llama", "[1, 2] is a list", "[1, 2] is a list", []),
    "llama, python that is no call": ("llama", "[open('/etc/passwd')]", "[open('/etc/passwd')]", []),
}
NEARLY_CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    *(("llama", f"[add(a={value})]", f"[add(a={value})]", list[tuple[str, str]]()) for value in NOT_JSON),
    ("llama", f"<|python_start|>{ADD_CALL}<|python_end|>", "", [("add", '{"a": 1}')]),
    ("mistral", f"[TOOL_CALLS]{ADD_CALL}", "", [("add", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]{"city": "Rome"}', '[TOOL_CALLS]{"city": "Rome"}', []),
    ("mistral-args", '[TOOL_CALLS][ARGS]{"a": 1}', '[TOOL_CALLS][ARGS]{"a": 1}', []),
    ("kimi", "<|tool_call_begin|>{}", "<|tool_call_begin|>{}", []),
    ("deepseek-v3.1", SEEK_V31.format("", "{}"), "{}", []),
    ("deepseek-v3.1", f"{SEEK_NONE}{SEEK_V31.format('add', '{}')}", "get_time", [("add", "{}")]),
    ("hermes", HALF, HALF, []),
    ("hermes", f"{HALF} So?", f"{HALF} So?", []),
    ("hermes", f"<tool_call>[1]</tool_call>{HALF}", f"<tool_call>[1]</tool_call>{HALF}", []),
    ("hermes", 2 * f'<tool_call>{{"id": null, {ADD_CALL[1:]}</tool_call>', "", 2 * [("add", '{"a": 1}')]),
    ("hermes", 2 * '<tool_call>{"name": "add", "id": null}</tool_call>', "", 2 * [("add", "{}")]),
    ("qwen-xml", "<function=add><parameter=a>NaN</parameter></function>", "", [("add", '{"a": "NaN"}')]),
    ("qwen-xml", XML.format("{'b': [True, None]}"), "", [("add", '{"a": {"b": [true, null]}}')]),
    ("qwen-xml", XML.format("{'b': {1, 2}}"), "", [("add", """{"a": "{'b': {1, 2}}"}""")]),
    ("qwen-xml", XML.format("True"), "", [("add", '{"a": true}')]),
    ("hermes", f'<tool_call>{ADD_CALL[:-1]}, "parameters": {{"b": 2}}}}</tool_call>', "", [("add", '{"a": 1}')]),
    (
        "kimi",
        '<|tool_call_begin|>functions.get_weather<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>',
        "",
        [("get_weather", '{"city": "Oslo"}')],
    ),
    (
        "deepseek-v3.1",
        f"{SEEK_V31.format('ping', '')}{SEEK_V31.format('add', '{}')}",
        "",
        [("ping", "{}"), ("add", "{}")],
    ),
]
