"""Dashboard, alerts and scrape configuration speak of metrics, labels and services that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram

from weft import metrics
from weft.worker import draft_metrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "observability"
DASHBOARD = FOLDER / "grafana" / "weft.json"
# what Prometheus adds to every series
SCRAPED = {"job", "instance", "service"}


def known() -> dict[str, set[str]]:
    """The labels of every series, by its name."""
    series = {"up": set(SCRAPED)}
    for metric in vars(metrics).values():
        if isinstance(metric, Counter | Gauge | Histogram):
            labels = set(getattr(metric, "_labelnames", ())) | SCRAPED
            if isinstance(metric, Counter):
                series[f"{metric._name}_total"] = labels
            elif isinstance(metric, Gauge):
                series[metric._name] = labels
            else:
                series[f"{metric._name}_bucket"] = labels | {"le"}
                series |= {f"{metric._name}_{kind}": labels for kind in ("sum", "count")}
    for family in draft_metrics.COLLECTOR.collect():
        for sample in family.samples:
            series[sample.name] = set(sample.labels) | SCRAPED
    return series


def expressions() -> list[str]:
    """Of the dashboard's panels and of the alerts; Grafana's own variable in a number's place."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    return [text.replace("$__rate_interval", "1m") for text in (*shown, *alerts)]


def parts(node: Any) -> Iterator[Any]:
    """An expression and all that it is made of."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if isinstance(inner := getattr(node, name, None), promql_parser.Expr):
            yield from parts(inner)
    for inner in getattr(node, "args", None) or ():
        yield from parts(inner)


@pytest.mark.parametrize("text", expressions())
def test_every_expression_parses_and_asks_for_what_there_is(text: str) -> None:
    series = known()
    found = list(parts(promql_parser.parse(text)))
    selectors = [part for part in found if isinstance(part, promql_parser.VectorSelector)]
    assert selectors, text
    labels: set[str] = set()
    for selector in selectors:
        assert selector.name in series, f"{selector.name} is no metric"
        labels |= series[selector.name]
        assert {matcher.name for matcher in selector.matchers.matchers} <= series[selector.name]
    for part in found:
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            assert set(part.modifier.labels) <= labels, text


def test_an_alert_for_what_is_absent_says_so_without_labels_which_it_has_not_got() -> None:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "absent(" in rule["expr"]]
    assert rules
    for text in (text for rule in rules for text in rule["annotations"].values()):
        assert "$labels" not in re.sub(r"\{\{ with .*?\{\{ end \}\}", "", text)


def test_what_was_thrown_away_counts_leases_that_ended_badly_and_no_client_that_left() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text().replace("\\|", "|")
    (badly,) = [part.removesuffix("}") for part in page.split("`") if part.startswith("weft_kv_leases_total{")]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = [each["expr"] for panel in panels if panel["title"] == "Thrown away" for each in panel["targets"]]
    assert sum(badly in text for text in shown) == 1
    assert "cancelled" not in badly


def test_the_check_would_notice_a_metric_that_was_renamed() -> None:
    (selector,) = [
        part
        for part in parts(promql_parser.parse('sum by (x) (rate(weft_gone_total{a="b"}[1m])) / 2'))
        if isinstance(part, promql_parser.VectorSelector)
    ]
    assert selector.name == "weft_gone_total"
    assert selector.name not in known()


def test_panels_do_not_overlap_and_use_the_provisioned_source() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    sources = {each["uid"] for each in yaml.safe_load((FOLDER / "grafana/datasources.yml").read_text())["datasources"]}
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in mine) < 24
        assert not mine & cells, panel["title"]
        cells |= mine
        assert panel["type"] == "row" or panel["datasource"]["uid"] in sources
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_service_that_has_metrics_is_scraped_where_it_shows_them() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for each in job["static_configs"] for target in each["targets"]}
    expected = set()
    for name, service in services.items():
        if "profiles" not in service and "weft_services" in " ".join(service["command"]):
            environment = service["environment"]
            expected.add(f"{name}:{environment.get('WEFT_PRIVATE_PORT', environment['WEFT_METRICS_PORT'])}")
    assert targets == expected


def test_what_compose_mounts_is_there() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observability"]
        for volume in services[name]["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
