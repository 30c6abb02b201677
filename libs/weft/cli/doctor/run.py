"""`weft doctor`: what a mesh would find on this machine, one line a check, with what to do about it. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from weft.cli.doctor import Finding, Severity, Subject
from weft.cli.doctor.machine import (
    check_clock,
    check_cores,
    check_gpu,
    check_ports,
    check_running,
    check_transport,
    check_versions,
)
from weft.cli.doctor.model import check_memory, check_model, check_shared_memory
from weft.cli.doctor.secrets import check_certificates, check_keys

MARKS = {
    Severity.OK: ("OK", "green"),
    Severity.WARNING: ("warning", "yellow"),
    Severity.FAILURE: ("failure", "bold red"),
}
CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    check_versions,
    check_gpu,
    check_transport,
    check_running,
    check_cores,
    check_clock,
    check_ports,
    check_keys,
    check_certificates,
    check_model,
    check_shared_memory,
    check_memory,
)


def run_doctor(subject: Subject, as_json: bool) -> int:
    """Print what was found; returns the exit status: 1 where something would not work."""
    console = Console(soft_wrap=True, highlight=False)
    findings = []
    for check in CHECKS:
        for finding in check(subject):
            findings.append(finding)
            if not as_json:
                console.print(_line(finding))
    worst = max((finding.level for finding in findings), key=list(Severity).index)
    if as_json:
        print(json.dumps({"worst": worst, "findings": [asdict(finding) for finding in findings]}, indent=2))
    return int(worst is Severity.FAILURE)


def _line(finding: Finding) -> Text:
    mark, style = MARKS[finding.level]
    line = Text.assemble((f"{mark:<8}", style), (f"{finding.check:<14}", "bold"), finding.says)
    if finding.advice:
        line.append(f"\n{'':<22}-> {finding.advice}", style="dim" if finding.level is Severity.OK else style)
    return line
