"""Bodies of /tokenize and /detokenize, compatible with vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.openai_messages import CHECKED, LenientModel, Message, for_template
from weft_services.gateway.dialects.openai_requests import Tool, parse_body
from weft_services.gateway.dialects.openai_tools import MAX_TOOLS, as_function
from weft_services.gateway.dialects.template_variables import TemplateVariables
from weft_services.gateway.dialects.unsupported_fields import check_supported
from weft_services.gateway.generation import Conversation, Prompt, TokenizeRequest

MAX_TOKENS = 1_000_000
# Other unsupported chat fields have no effect on token ids.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {"chat_template": (), "continue_final_message": (False,)}
TokenId = Annotated[int, Field(ge=0)]


class TokenizeBody(TemplateVariables):
    """Body of POST /tokenize: a prompt, or messages for the chat template. The model is optional."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, *CHECKED] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def asked(self) -> TokenizeRequest:
        """Convert to the internal request. By default a prompt gets special tokens; a template writes its own."""
        check_supported(self.model_extra or {}, NEUTRAL_VALUES)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: expected either prompt or messages", "prompt")
        prompt: Prompt = self.prompt or ""
        if self.messages is not None:
            messages, tools = for_template(self.messages), tuple(map(as_function, self.tools or ()))
            prompt = Conversation(messages, tools, self.variables(), self.add_generation_prompt)
        is_special = self.messages is None if self.add_special_tokens is None else self.add_special_tokens
        field = "prompt" if self.messages is None else "messages"
        return TokenizeRequest(self.model or "", prompt, field, is_special, bool(self.return_token_strs))


class DetokenizeBody(LenientModel):
    """Fields of the body of POST /detokenize."""

    model: str | None = None
    # An error takes a kilobyte, so stop at the first.
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS), FailFast()]


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parse a body. Raises InvalidRequest naming the field."""
    return parse_body(TokenizeBody, body).asked()


def parse_detokenize(body: bytes) -> tuple[str, list[int]]:
    """Return the model's name, empty if not given, and the ids. Raises InvalidRequest naming the field."""
    asked = parse_body(DetokenizeBody, body)
    return asked.model or "", asked.tokens
