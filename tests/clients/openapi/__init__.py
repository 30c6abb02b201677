"""OpenAI's OpenAPI document as far as Weft serves it, and what Schemathesis is told about it."""
