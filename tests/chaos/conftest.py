"""How often the matrix runs, and the table of its cells at the end.

Without `--rounds` (as in `make test`) a selection of cells runs once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

from tests.weft.engine.tiny_heads import headed
from tests.weft.tiny_llama import Tiny, make_tiny

# as on one machine, and as between two
TRANSPORTS = ["auto", "mooncake"]
# cells inside one process: what tests call them, all of them, the quick ones
IN_PROCESS = [
    ("cell", "CELLS", "QUICK"),
    ("far_cell", "FAR_CELLS", "FAR_QUICK"),
    ("shortage", "SHORTAGES", "SHORTAGES"),
    ("store_cell", "CELLS", "QUICK"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make chaos` sets the number of rounds."""
    parser.addoption("--heads", action="store_true", help="cells inside one process draft with a head")
    parser.addoption("--rounds", type=int, default=0, help="run the whole fault matrix so many times")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cells, or faults that strike in all states at once: all of them so many times, or the quick ones.

    Of processes, half of the rounds hand off in one way, half in the other.
    """
    rounds, module = metafunc.config.getoption("--rounds", default=0), metafunc.module
    if "strike" in metafunc.fixturenames:
        metafunc.parametrize("strike", [*module.FAULTS] * ((rounds + 1) // 2) or module.QUICK)
        metafunc.parametrize("chaos_mesh", TRANSPORTS if rounds else TRANSPORTS[:1], indirect=True)
    if "group_round" in metafunc.fixturenames:
        metafunc.parametrize("group_round", range(rounds))
    for name, once, quick in IN_PROCESS:
        if name in metafunc.fixturenames:
            cells = [*getattr(module, once)] * rounds or getattr(module, quick)
            metafunc.parametrize(name, cells, ids=[f"{fault}-{state}" for fault, state in cells])


@pytest.fixture(autouse=True)
def _noted(request: pytest.FixtureRequest) -> None:
    """Each cell's place in the table."""
    for name in {name for name, _, _ in IN_PROCESS}.intersection(request.fixturenames):
        fault, state = request.getfixturevalue(name)
        way = ", Mooncake" if name == "far_cell" else ""
        request.node.user_properties.append(("cell", (fault + way, state)))
    if "strike" in request.fixturenames:
        fault = request.getfixturevalue("strike")
        request.node.user_properties.extend(("cell", (fault, state)) for state in request.module.states(fault))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Faults as rows, states as columns: cells passed of cells run."""
    run: Counter[tuple[str, str]] = Counter()
    passed: Counter[tuple[str, str]] = Counter()
    for report in _reports(terminalreporter):
        for cell in (value for name, value in report.user_properties if name == "cell"):
            assert isinstance(cell, tuple)
            run[cell] += 1
            passed[cell] += report.passed
    if not run:
        return
    states: dict[str, list[str]] = defaultdict(list)
    for fault, state in run:
        mark = f"{passed[fault, state]}/{run[fault, state]}"
        states[fault].append(f"{state} {mark}")
    terminalreporter.write_sep("-", f"fault matrix: {passed.total()} of {run.total()} cells passed")
    for fault, marks in states.items():
        terminalreporter.write_line(f"{fault:>34}  {'   '.join(marks)}")


def _reports(terminalreporter: pytest.TerminalReporter) -> Iterable[pytest.TestReport]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call":
                yield report


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Tiny:
    """Random weights, shared key heads; with `--heads` also those of a draft head."""
    tiny = make_tiny("grouped", tmp_path_factory.mktemp("tiny"))
    return headed(tiny) if request.config.getoption("--heads", default=False) else tiny
