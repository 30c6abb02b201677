"""The format of a model's tool calls is the one in which its template writes them."""

from __future__ import annotations

import pytest

from tests.services.gateway.test_templates import SPECIAL, TEMPLATES
from weft_services.gateway.model import rendered_call
from weft_services.gateway.text.chat_template import ChatTemplate
from weft_services.gateway.text.tool_formats import choose_format

EACH = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
)
GENERATION = "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
JSON_ARGUMENTS = "{{ f.arguments | tojson }}"
ARG_TAGS = (
    "{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}"
)
PARAMETERS = "{% for k, v in f.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}"
NAMED_PARAMETERS = (
    '{% for k, v in f.arguments.items() %}<PREparameter name="{{ k }}"TYPE>{{ v }}</PREparameter>\n{% endfor %}'
)
OBJECT = '{"name": "{{ f.name }}", "arguments": ' + JSON_ARGUMENTS + "}"
# calls as templates write them, each in a template that speaks of other formats too
OBJECTS = "<tool_call>{{ {'arguments': f.arguments, 'name': f.name} | tojson }}</tool_call>"
WRITTEN_CALLS = {
    "hermes": '<tool_call>{"name":"{{ f.name }}","arguments":' + JSON_ARGUMENTS + "}</tool_call>",
    "glm": "\n<tool_call>{{ f.name }}\n" + ARG_TAGS + "</tool_call>",
    "hy3": "<tool_calls>\n<tool_call>{{ f.name }}<tool_sep>\n" + ARG_TAGS + "</tool_call>\n</tool_calls>",
    "seed": "\n<seed:tool_call>\n<function={{ f.name }}>\n" + PARAMETERS + "</function>\n</seed:tool_call>",
    "minimax-m2": '\n<minimax:tool_call>\n<invoke name="{{ f.name }}">\n'
    + NAMED_PARAMETERS.replace("PRE", "").replace("TYPE", "")
    + "</invoke>\n</minimax:tool_call>",
    "deepseek-v3.2": '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ f.name }}">\n'
    + NAMED_PARAMETERS.replace("PRE", "｜DSML｜").replace("TYPE", ' string="true"')
    + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}
WRITTEN_CALLS |= {
    "nemotron-v2": '<TOOLCALL>[{"name": "{{ f.name }}", "arguments": ' + JSON_ARGUMENTS + "}]</TOOLCALL>",
    "command-r": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": '
    + JSON_ARGUMENTS
    + "}\n]<|END_ACTION|>",
    "functionary": "<function={{ f.name }}>" + JSON_ARGUMENTS + "</function>",
    "harmony": "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    + JSON_ARGUMENTS
    + "<|call|>",
    "deepseek-v4": '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{{ f.name }}">\n'
    + NAMED_PARAMETERS.replace("PRE", "｜DSML｜").replace("TYPE", ' string="true"')
    + "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "hy3-open": "<tool_calls:opensource>\n<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n"
    + ARG_TAGS.replace("arg_key", "arg_key:opensource").replace("arg_value", "arg_value:opensource")
    + "</tool_call:opensource>\n</tool_calls:opensource>",
    "minicpm5": '<function name="{{ f.name }}"><param name="city">{{ f.arguments.city }}</param></function>',
    "apriel": "<tool_calls>[" + OBJECT + "]</tool_calls>",
    "minimax-m1": "<tool_calls>\n" + OBJECT + "\n</tool_calls>",
    "phi-4": "<|tool_call|>[" + OBJECT + "]<|/tool_call|>",
    "granite-3": "<|tool_call|>[" + OBJECT + "]",
    "apertus": '<|tools_prefix|>[{"{{ f.name }}": ' + JSON_ARGUMENTS + "}]<|tools_suffix|>",
    "solar": "<|tool_calls|><|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
    + JSON_ARGUMENTS
    + "<|tool_call:end|><|calls|>",
    "gigachat": "<|function_call|>" + OBJECT,
    "gigachat-3": "<|message_sep|>\n\nfunction call<|role_sep|>\n" + OBJECT,
    "gemma4": '<|tool_call>call:{{ f.name }}{city:<|"|>{{ f.arguments.city }}<|"|>}<tool_call|>',
    "function-gemma": "<start_function_call>call:{{ f.name }}{city:<escape>{{ f.arguments.city }}<escape>}"
    "<end_function_call>",
    "olmo3": "<function_calls>\n{{ f.name }}(city='{{ f.arguments.city }}')\n</function_calls>",
    "lfm2-json": "<|tool_call_start|>\n" + OBJECT + "\n<|tool_call_end|>",
    "pythonic": "<|python_start|>[{{ f.name }}(city='{{ f.arguments.city }}')]<|python_end|>",
    "granite-20b": "<function_call> " + OBJECT,
    "internlm2": "<|action_start|><|plugin|>\n" + OBJECT.replace('arguments":', 'parameters":') + "<|action_end|>",
    "lfm2": "<|tool_call_start|>[{{ f.name }}(city='{{ f.arguments.city }}')]<|tool_call_end|>",
}
OTHER_CALLS = {
    "an unknown tag": '<call>{"name": "{{ f.name }}", "parameters": ' + JSON_ARGUMENTS + "}</call>",
    "a list": '[{"name": "{{ f.name }}", "parameters": ' + JSON_ARGUMENTS + "}]",
    "left out": "",
}
OF_TEMPLATES = {
    "deepseek-r1-distill-qwen-32b": "deepseek-v3",
    "deepseek-v3": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3.1",
    "devstral-small-2507": "mistral-args",
    "hermes-3-llama-3.1-8b-tool-use": "hermes",
    "kimi-k2": "kimi",
    "kimi-k2-thinking": None,  # it needs what only llama.cpp's Jinja has
    "llama-2-chat": None,
    "llama-3-8b-instruct": None,
    "llama-3.1-8b-instruct": "llama",
    "llama-3.2-3b-instruct": "llama",
    "llama-3.3-70b-instruct": "llama",
    "llama-4": "llama",
    "ministral-3-14b-reasoning-2512": "mistral-args",
    "mistral-nemo-instruct-2407": "mistral",
    "mistral-small-3.2-24b-instruct-2506": "mistral-args",
    "mistral-v1": None,
    "qwen2.5-7b-instruct": "hermes",
    "qwen3-0.6b": "hermes",
    "qwen3-coder": "qwen-xml",
    "qwen3-instruct-2507": "hermes",
    "qwq-32b": "hermes",
    "smollm3-3b": None,
}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        *((TEMPLATES[template], name) for template, name in OF_TEMPLATES.items()),
        *((f"{EACH}{call}{GENERATION}", name) for name, call in WRITTEN_CALLS.items()),
        *((f"{EACH}{call}{GENERATION}", None) for call in OTHER_CALLS.values()),
        (f"{EACH}{OBJECTS}{GENERATION}", "hermes"),
        ("{{ messages[0].content }} <tool_call>", None),
        ("{{ raise_exception('no') }}", None),
    ],
    ids=[*OF_TEMPLATES, *WRITTEN_CALLS, *OTHER_CALLS, "name last", "prose", "a refusal"],
)
def test_format_is_the_one_in_which_the_template_writes_calls(template: str, name: str | None) -> None:
    rendered = rendered_call(ChatTemplate(f"{template}{{# <tool_call> [TOOL_CALLS] #}}", SPECIAL))
    chosen = choose_format("auto", rendered)
    assert (chosen.name if chosen else None) == name
    assert choose_format("none", rendered) is None
