"""Names in README and docs exist: links, commands, options, make targets, modules, settings, metrics."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.docs.pages import PAGES, ROOT, named
from weft.cli.main import PassedOn, app
from weft.config import Settings, variable_name
from weft.metrics import REGISTRY
from weft.model.config import FAMILIES
from weft.worker import draft_metrics as draft_metrics
from weft.worker.config import WorkerConfig
from weft_bundle.__main__ import app as bundle_program
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.dialects.answer_format import GUIDED
from weft_services.gateway.mesh.routing_hints import CLASSES
from weft_services.kvstore.config import KvStoreConfig as KvStoreConfig
from weft_services.scheduler.config import SchedulerConfig as SchedulerConfig
from weft_services.weights.config import WeightsConfig as WeightsConfig

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LINK_TEXT = re.compile(r"\[([^\]]*)\]\([^)]*\)")
OTHERS_PAGES = {"https://github.com/kvcache-ai/Mooncake"}
CONFIGS = (GatewayConfig, SchedulerConfig, WorkerConfig, KvStoreConfig, WeightsConfig)
SETTING = re.compile(r"\bWEFT_[A-Z0-9_]+\b")
READ = re.compile(r'environ(?:\.get\(|\[)"([A-Z_]+)"')
OPTION = re.compile(r'envvar=("\w+"|\[[^]]*\])')
FILE = re.compile(r"`((?:\w[\w.-]*/)+[\w.-]+\.(?:py|cpp|h|sh|jinja))`")
MODULE = re.compile(r"`(weft(?:_\w+)?(?:\.\w+)+)`")
SOURCES = ("", "libs/weft", "services/weft_services", "libs", "services", "kernels", "bundle")
OTHER_NAMES = {"weft/mesh", "weft/timeline"}  # the name in certificates, and an event
METRIC = re.compile(r"`(weft_(?!bundle|kernels|services)[a-z_]+)")
ARCHITECTURE = re.compile(r"For(CausalLM|ConditionalGeneration)$")
OTHERS_OWN = {"PATH", "GRPC_VERBOSITY", "OTEL_SDK_DISABLED"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text())
    # Tests have no network.
    assert {link for link in links if "://" in link} <= OTHERS_PAGES
    for link in (link for link in links if "://" not in link):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings as GitHub makes them, with a number for repeated headings."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = (re.sub(r"[^\w\- ]", "", LINK_TEXT.sub(r"\1", heading).lower()).replace(" ", "-") for heading in headings)
    seen: dict[str, int] = {}
    found = set()
    for name in plain:
        found.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return found


def test_anchors_are_made_as_github_makes_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Ports, and `who` [listens](x.md)\n```\n# no heading\n```\n## What's new\n## What's new\n")
    assert anchors_of(page) == {"ports-and-who-listens", "whats-new", "whats-new-1"}


def test_every_weft_command_and_option_exists() -> None:
    found = named("weft")
    assert len(found) > 5
    program, bundles = typer.main.get_command(app), typer.main.get_command(bundle_program)
    for page, words in found:
        command: Any = program
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{page}: weft {' '.join(words)}"
            command = command.commands[words.pop(0)]
        if isinstance(command, PassedOn):  # passed on to the bundle program
            command = bundles.commands[command.name]  # type: ignore[attr-defined]
        options = {"--help"}.union(*([*each.opts, *each.secondary_opts] for each in command.params))
        unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]
        assert not unknown, f"{page}: weft {command.name}: {unknown}"


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page, words in named("make"):
        assert words[0] in targets, f"{page}: make {words[0]}"


def test_every_module_and_its_options_exist() -> None:
    found = [(page, words) for page, words in named("python") if words[0] == "-m"]
    assert len(found) > 5
    for page, (_, module, *rest) in found:
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{page}: python -m {module}"
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
        assert spec, f"{page}: python -m {module}"
        if (source := Path(spec.origin or "")).is_relative_to(ROOT):
            text = "".join(each.read_text() for each in source.parent.glob("*.py"))
            unknown = [word for word in rest if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text]
            assert not unknown, f"{page}: python -m {module}: {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    files = {name for name in FILE.findall(text) if "OP" not in name}
    missing = {name for name in files if not any((ROOT / top / name).exists() for top in SOURCES)}
    modules = {name.replace(".", "/") for name in MODULE.findall(text)} - OTHER_NAMES
    for name in modules:
        if not any((ROOT / top / (name + suffix)).exists() for top in SOURCES for suffix in ("", ".py")):
            missing.add(name)
    assert not missing


def test_every_setting_is_read_somewhere() -> None:
    places = ("services", "libs", "kernels", "bundle", "scripts", "Makefile", "compose.yaml", "compose.tls.yaml")
    code = [path for place in places for path in _files(ROOT / place)]
    text = "".join(path.read_text() for path in code)
    known = set(SETTING.findall(text)) | {f"WEFT_{name.upper()}" for name in re.findall(r"^    (\w+): ", text, re.M)}
    for page in PAGES:
        unknown = {name for name in SETTING.findall(page.read_text()) if not name.endswith("_")} - known
        assert not unknown, f"{page.relative_to(ROOT)}: {unknown}"


def test_every_variable_that_is_read_is_explained() -> None:
    """Variables that are read from the environment directly, not by a Config field."""
    tops = ("libs", "kernels", "services", "bundle")
    code = [path.read_text() for top in tops for path in (ROOT / top).rglob("*.py")]
    read = set(READ.findall("".join(code)))
    read |= {name for names in OPTION.findall("".join(code)) for name in re.findall(r"\w+", names)}
    read |= {name for path in _files(ROOT / "scripts") for name in SETTING.findall(path.read_text())}
    explained = set(re.findall(r"`([A-Z_]+)`", (ROOT / "docs" / "reference" / "settings.md").read_text()))
    assert {"WEFT_MODEL", "XDG_CACHE_HOME"} < read
    assert not read - explained - OTHERS_OWN


def test_answer_formats_and_priority_classes_are_explained() -> None:
    page = (ROOT / "docs" / "reference" / "generation.md").read_text()
    assert set(GUIDED) <= set(re.findall(r"`(\w+)`", page))
    (row,) = (line for line in page.splitlines() if line.startswith("| priorities |"))
    assert set(CLASSES) <= set(re.findall(r"\w+", row))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__module__)
def test_every_setting_is_explained(config: type[Settings]) -> None:
    lines = (ROOT / "docs" / "reference" / "settings.md").read_text().splitlines()
    rows = "".join(line.partition(" | ")[0] for line in lines if line.startswith("| `"))
    unknown = {variable_name(name) for name in config.model_fields} - set(SETTING.findall(rows))
    assert not unknown


def test_every_metric_is_explained() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    named = {re.sub("_(total|sum)$", "", name) for name in re.findall(r"\bweft_[a-z_]+", page)}
    assert named == {metric.name for metric in REGISTRY.collect()}


def test_every_metric_that_a_page_names_exists() -> None:
    known = {metric.name for metric in REGISTRY.collect()}
    for page in PAGES:
        named = {re.sub("_(total|sum)$", "", name) for name in METRIC.findall(page.read_text())}
        assert not named - known, page


def test_every_family_is_listed_once() -> None:
    page = (ROOT / "docs" / "operate" / "your-model.md").read_text()
    table = page.partition("## Families\n")[2].partition("\n## ")[0]
    listed = re.findall(r"\w+", " ".join(re.sub(r"\([^)]*\)", "", row.split("|")[2]) for row in _rows(table)))
    assert sorted(listed) == sorted({ARCHITECTURE.sub("", name).replace("Kimi_", "Kimi") for name in FAMILIES})


def test_every_log_event_that_a_page_names_exists() -> None:
    code = "".join(path.read_text() for top in ("services", "libs") for path in _files(ROOT / top))
    rows = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text().splitlines()
    events = [event for row in rows for event in re.findall(r"`([a-z]+(?: [a-z]+)+)(?: \w+=)?`", row)]
    assert len(events) > 2
    assert not [event for event in events if not event.startswith("weft ") and event not in code]


def _rows(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("|")][2:]


def _files(top: Path) -> list[Path]:
    return [top] if top.is_file() else [path for kind in ("*.py", "*.sh") for path in top.rglob(kind)]
