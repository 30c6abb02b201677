"""Cuts OpenAI's document down to what Weft serves: `python -m tests.clients.openapi.cut FULL.yml > openai.json`.

Paths and whatever they refer to, as they are, without prose and examples. Nothing is added or loosened here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SERVED = {
    "/chat/completions": ["post"],
    "/completions": ["post"],
    "/embeddings": ["post"],
    "/models": ["get"],
    "/models/{model}": ["get"],
    "/responses": ["post"],
    "/responses/input_tokens": ["post"],
    "/responses/{response_id}": ["get", "delete"],
    "/responses/{response_id}/input_items": ["get"],
}
# what no path refers to: the body of every error
ERROR = "#/components/schemas/ErrorResponse"
# for readers and generators of documentation; no schema means anything else by these names
PROSE = {"description", "summary", "example", "examples", "externalDocs", "tags"}

# keywords whose keys are names that the API chose
NAMING = ("properties", "schemas", "mapping")


def references(node: Any) -> Iterator[str]:
    """Every `$ref` in there, and what discriminators point to."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        yield from (target for target in node.get("mapping", {}).values() if isinstance(target, str))
        for each in node.values():
            yield from references(each)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


def bare(node: Any, is_named: bool = False) -> Any:
    """Without prose. `is_named`: the keys are names that the API chose."""
    if isinstance(node, list):
        return [bare(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = node if is_named else {key: value for key, value in node.items() if not is_prose(key)}
    return {
        key: bare(value, key in ("properties", "schemas", "mapping") and not is_named) for key, value in kept.items()
    }


def is_prose(key: str) -> bool:
    return key in PROSE or key.startswith("x-")


def cut(full: dict[str, Any]) -> dict[str, Any]:
    """The document, smaller."""
    paths = {path: {method: full["paths"][path][method] for method in methods} for path, methods in SERVED.items()}
    components: dict[str, dict[str, Any]] = {"securitySchemes": full["components"]["securitySchemes"]}
    waiting = [ERROR, *references(paths)]
    while waiting:
        _, _, kind, name = waiting.pop().split("/")
        if name not in components.setdefault(kind, {}):
            components[kind][name] = full["components"][kind][name]
            waiting += references(components[kind][name])
    head = {"openapi": full["openapi"], "info": {key: full["info"][key] for key in ("title", "version", "license")}}
    kept = {"servers": full["servers"], "security": full["security"], "paths": paths, "components": components}
    return {**head, **bare(kept)}


if __name__ == "__main__":
    json.dump(cut(yaml.safe_load(Path(sys.argv[1]).read_text())), sys.stdout, indent=1, sort_keys=True)
    print()
