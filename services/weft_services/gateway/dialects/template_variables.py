"""What a request gives to the chat template besides messages and tools, and the switches of thinking among it.

Clients of other servers write these switches in places of their own. All of them end up as the variables that templates
read; a template without that switch decides by itself.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.openai_fields import check_template_kwargs
from weft_services.gateway.dialects.openai_messages import Lenient

# as templates call the switch: Qwen's, GLM's and SmolLM's; DeepSeek's and Granite's
SWITCHES = ("enable_thinking", "thinking")
NO_THOUGHTS = "none"
Effort = Annotated[str | None, Field(max_length=32)]


class Thinking(Lenient):
    """Anthropic's, which DeepSeek's and GLM's servers take in chats, too."""

    type: Literal["enabled", "adaptive", "disabled"]


class Reasoning(Lenient):
    """OpenRouter's in chats, OpenAI's in responses."""

    enabled: bool | None = None
    effort: Effort = None


class TemplateVariables(Lenient):
    """The fields of a body that reach its chat template."""

    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(check_template_kwargs), Field(default_factory=dict)]
    enable_thinking: bool | None = None  # Qwen's, at the top
    think: bool | None = None  # Ollama's
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort = None

    def variables(self) -> dict[str, Any]:
        """For the template: what `chat_template_kwargs` says counts first. Raises InvalidRequest for what no template
        can be told, such as a budget of thoughts."""
        self._check_budgets()
        reasoning = self.reasoning or Reasoning()
        effort = self.reasoning_effort or reasoning.effort
        found: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        thinks = self._thinks(effort)
        if thinks is not None and not any(name in self.chat_template_kwargs for name in SWITCHES):
            found |= dict.fromkeys(SWITCHES, thinks)
        return found | self.chat_template_kwargs

    def _thinks(self, effort: str | None) -> bool | None:
        """What the plainest field says; None where the template is to decide."""
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
            held = getattr(self, name)
            if held is not None and (held.model_extra or {}).get(field) not in (None, False):
                path = f"{name}.{field}"
                instead = "leave thoughts unread" if field == "exclude" else "max_tokens bounds thoughts and answer"
                raise InvalidRequest(f"{path} is not supported here; {instead}", path, "unsupported_parameter")
