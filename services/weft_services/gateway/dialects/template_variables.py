"""Variables that a request passes to the chat template, among them the switches for thinking.

Clients of other servers write these switches in different fields. All become the variables that templates read; a
template without the switch decides by itself.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from weft.errors import InvalidRequest
from weft.tokenizer import SPECIAL_TOKENS
from weft_services.gateway.dialects.openai_messages import LenientModel

MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_TEXT = 4096
TEMPLATE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
# Names that the gateway itself passes to templates.
RESERVED_KWARGS = frozenset(SPECIAL_TOKENS).union(
    "messages tools documents add_generation_prompt raise_exception strftime_now chat_template tokenize "
    "continue_final_message".split()
)
# Names of the switch in templates: of Qwen, GLM and SmolLM; of DeepSeek and Granite.
SWITCHES = ("enable_thinking", "thinking")
NO_THOUGHTS = "none"
Effort = Annotated[str | None, Field(max_length=32)]


def check_template_kwargs(value: Any) -> dict[str, Any]:
    """Return plain values under allowed names. A request cannot replace the gateway's own variables."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"{len(value)} entries, at most {MAX_TEMPLATE_KWARGS}")
    for name, entry in value.items():
        if not TEMPLATE_NAME.fullmatch(name) or name in RESERVED_KWARGS:
            raise ValueError(f"{name[:64]!r} is not allowed as a template variable")
        if not (entry is None or isinstance(entry, bool | int | float | str)):
            raise ValueError(f"{name} must be a string, a number, a boolean or null")
        if isinstance(entry, str) and len(entry) > MAX_TEMPLATE_TEXT:
            raise ValueError(f"{name} is longer than {MAX_TEMPLATE_TEXT} characters")
    return value


class Thinking(LenientModel):
    """Anthropic's switch. DeepSeek's and GLM's servers accept it in chats too."""

    type: Literal["enabled", "adaptive", "disabled"]


class Reasoning(LenientModel):
    """OpenRouter's switch in chats, OpenAI's in responses."""

    enabled: bool | None = None
    effort: Effort = None


class TemplateVariables(LenientModel):
    """Body fields that reach the chat template."""

    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(check_template_kwargs), Field(default_factory=dict)]
    enable_thinking: bool | None = None  # Qwen's
    think: bool | None = None  # Ollama's
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort = None

    def variables(self) -> dict[str, Any]:
        """Return the template's variables; `chat_template_kwargs` takes precedence.

        Raises InvalidRequest for fields that no template can express, such as a thinking budget.
        """
        self._check_budgets()
        reasoning = self.reasoning or Reasoning()
        effort = self.reasoning_effort or reasoning.effort
        found: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        thinks = self._thinks(effort)
        if thinks is not None and not any(name in self.chat_template_kwargs for name in SWITCHES):
            found |= dict.fromkeys(SWITCHES, thinks)
        return found | self.chat_template_kwargs

    def _thinks(self, effort: str | None) -> bool | None:
        """Return the first switch that is set, None if the template decides."""
        wanted = (
            self.enable_thinking,
            self.think,
            self.thinking.type != "disabled" if self.thinking else None,
            self.reasoning.enabled if self.reasoning else None,
            False if effort == NO_THOUGHTS else None,
        )
        return next((each for each in wanted if each is not None), None)

    def _check_budgets(self) -> None:
        for name, field in (("thinking", "budget_tokens"), ("reasoning", "max_tokens"), ("reasoning", "exclude")):
            switch = getattr(self, name)
            if switch is not None and (switch.model_extra or {}).get(field) not in (None, False):
                path = f"{name}.{field}"
                instead = "leave thoughts unread" if field == "exclude" else "max_tokens bounds thoughts and answer"
                raise InvalidRequest(f"{path} is not supported here; {instead}", path, "unsupported_parameter")
