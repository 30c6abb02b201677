"""The simulator against arithmetic, and the policy in it against the others: small traces, simulated time."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, astuple, replace
from pathlib import Path

import pytest
from loadtest.fleet.baselines import baselines
from loadtest.fleet.experiments import holds
from loadtest.fleet.figures import Targets, average, summarize, weighted_percentile
from loadtest.fleet.machine import H100, load_machine
from loadtest.fleet.scheduler import Signals, SimulatedScheduler
from loadtest.fleet.simulator import FleetPlan, Outcome, Scenario, Simulation
from loadtest.fleet.trace import BLOCK_TOKENS, Request, enlarge, faster, ideal_cached, ideal_seconds, read_trace
from loadtest.fleet.worker import BlockCache, Job, SimulatedWorker

from weft_services.scheduler.admission import NO_SLO
from weft_services.scheduler.role_balancer import BalancerLimits, RoleBalancer

PLAN = FleetPlan(H100, num_prefill=2, num_decode=2)


def request(number: int, at: float, prompt: int = 4096, output: int = 50, keys: tuple[bytes, ...] = ()) -> Request:
    return Request(number, at, prompt, output, keys, b"")


def conversations(num_sessions: int, num_turns: int, seed: int = 3) -> list[Request]:
    """Sessions that all begin alike and grow by a few blocks a turn."""
    rng = random.Random(seed)
    asked = []
    for session in range(num_sessions):
        keys, at = [b"system"], rng.uniform(0, 60)
        for turn in range(num_turns):
            keys = [*keys, *(f"{session}/{turn}/{n}".encode() for n in range(rng.randint(2, 8)))]
            asked.append(Request(0, at, len(keys) * BLOCK_TOKENS + 9, 40, tuple(keys), f"{session}".encode()))
            at += rng.uniform(5, 20)
    asked.sort(key=lambda each: each.at)
    return [Request(n, r.at, r.prompt_tokens, r.output_tokens, r.keys, r.session) for n, r in enumerate(asked)]


def run(policy: SimulatedScheduler, requests: list[Request], plan: FleetPlan = PLAN) -> Outcome:
    outcome = Simulation(plan, policy).run(requests)
    assert sorted(job.request.number for job in outcome.jobs) == list(range(len(requests)))
    for job in outcome.jobs:
        assert job.request.at < job.first_token_at <= job.ended_at
    for worker in outcome.workers:
        assert (worker.reserved_tokens, worker.queued_tokens, len(worker.prompts), len(worker.batch)) == (0, 0, 0, 0)
    return outcome


def test_single_request_takes_the_machines_time() -> None:
    (job,) = run(SimulatedScheduler(), [request(0, 1.0, prompt=4096, output=101)]).jobs
    handoff = H100.handoff + H100.handoff_token * 4096
    assert job.first_token_at - 1.0 == pytest.approx(H100.prefill(4096, 0) + handoff)
    assert (job.ended_at - job.first_token_at) / 100 == pytest.approx(H100.step(1, 4096), rel=0.02)


def test_prompts_queue_and_answers_share_steps() -> None:
    plan = FleetPlan(H100, num_prefill=1, num_decode=1)
    jobs = run(SimulatedScheduler(), [request(n, 0.0) for n in range(3)], plan).jobs
    waits = sorted(job.first_token_at for job in jobs)
    one = H100.prefill(4096, 0)
    assert waits[2] - waits[0] == pytest.approx(2 * one, rel=0.01)
    together = sorted((job.ended_at - job.first_token_at) / 49 for job in jobs)
    assert H100.step(1, 4096) < together[0] < together[-1] < H100.step(3, 3 * 4300)


def test_prefill_slows_decoding_on_the_same_worker() -> None:
    plan = FleetPlan(H100, num_prefill=0, num_decode=0, num_both=1)
    alone = run(SimulatedScheduler(), [request(0, 0.0, output=200)], plan).jobs[0]
    beside = run(SimulatedScheduler(), [request(0, 0.0, output=200), request(1, 0.5, prompt=60_000)], plan).jobs[0]
    assert beside.ended_at > alone.ended_at + 0.5 * H100.prefill(60_000, 0)


@pytest.mark.parametrize("policy", baselines(H100), ids=lambda policy: policy.name)
def test_every_policy_brings_every_request_to_its_end(policy: SimulatedScheduler) -> None:
    run(policy, conversations(20, 3))


def test_prefix_index_finds_nearly_all_hits() -> None:
    requests, plan = faster(conversations(200, 5), 3.0), FleetPlan(H100, 4, 4, cache_tokens=4_000_000)
    figures = {
        policy.name: summarize(policy.name, requests, run(policy, requests, plan), Targets())
        for policy in (SimulatedScheduler("blind", Signals(sessions=False, prefixes=False)), SimulatedScheduler("weft"))
    }
    assert figures["weft"].of_ideal > 0.9 > figures["blind"].of_ideal + 0.2
    assert figures["weft"].imbalance < 1.3
    assert figures["weft"].ttft_mean < figures["blind"].ttft_mean


def test_stored_prefix_is_a_hit_on_every_worker() -> None:
    requests = conversations(30, 4)
    plan = FleetPlan(H100, 4, 4, store_tokens=1 << 40)
    figures = summarize("s", requests, run(SimulatedScheduler("s", Signals(store=True)), requests, plan), Targets())
    assert figures.of_ideal > 0.97


def test_fetches_take_turns_while_other_prompts_are_computed() -> None:
    cpu = replace(H100, store_token=1e-3)
    worker, store = SimulatedWorker(0, "prefill", cpu, 1000), BlockCache(1000)
    keys = (b"a", b"b")
    store.put(keys)
    prompts = [Request(n, 0.0, 3 * BLOCK_TOKENS, 1, keys, b"") for n in range(2)]
    jobs = [Job(each, worker, worker) for each in prompts]
    one = 2 * BLOCK_TOKENS * cpu.store_token
    assert [worker.fetch(job, store) for job in jobs] == pytest.approx([one, 2 * one])
    assert worker.fetched_tokens == 4 * BLOCK_TOKENS
    assert worker.fetching_seconds == pytest.approx(2 * one)
    other = Job(request(2, 0.0), worker, worker)
    assert worker.fetch(other, None) == 0.0
    worker.enqueue(other)
    assert worker.advance(cpu.prefill(4096, 0) + 1e-6).computed == [other]


def test_fetch_ends_before_the_rest_is_computed() -> None:
    keys, others = (tuple(b"%s%d" % (name, n) for n in range(12)) for name in (b"a", b"b"))
    asked = [Request(n, 10.0 * n, 13 * BLOCK_TOKENS, 2, each, b"") for n, each in enumerate((keys, others, keys))]
    # of the first prompt it keeps four blocks
    plan = FleetPlan(replace(H100, store_token=1e-3), 1, 1, cache_tokens=16 * BLOCK_TOKENS, store_tokens=1 << 40)
    *_, job = run(SimulatedScheduler("s", Signals(store=True)), asked, plan).jobs
    assert (job.cached_tokens, job.stored_tokens) == (4 * BLOCK_TOKENS, 8 * BLOCK_TOKENS)
    least = 1e-3 * job.stored_tokens + H100.prefill(BLOCK_TOKENS, 12 * BLOCK_TOKENS)
    assert job.first_token_at - job.request.at == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 7), (7, 1)])
def test_role_balancer_raises_goodput_of_a_lopsided_fleet(num_prefill: int, num_decode: int) -> None:
    requests = faster(conversations(300, 5), 1.5)
    plan = FleetPlan(H100, num_prefill, num_decode, cache_tokens=4_000_000)
    planner = RoleBalancer(BalancerLimits(wait_seconds=0.2, itl_seconds=0.015, pause_seconds=5.0))
    fixed, planned = (
        summarize(policy.name, requests, run(policy, requests, plan), Targets(ttft=1.0, itl=0.015))
        for policy in (SimulatedScheduler("fixed"), SimulatedScheduler("planned", planner=planner))
    )
    assert planned.goodput > 1.3 * fixed.goodput


def test_the_same_run_twice_is_the_same_run() -> None:
    requests = conversations(20, 3)
    first, second = (run(SimulatedScheduler(), requests) for _ in range(2))
    assert [job.ended_at for job in first.jobs] == [job.ended_at for job in second.jobs]


@pytest.mark.parametrize("name", ["random", "power of two", "Mooncake conductor"])
def test_ties_depend_on_the_seed_only(name: str) -> None:
    requests = conversations(20, 3)

    def ends(seed: int) -> list[float]:
        policy = next(policy for policy in baselines(H100, seed) if policy.name == name)
        return [job.ended_at for job in run(policy, requests).jobs]

    first, other, again = ends(0), ends(1), ends(0)
    assert first == again
    assert first != other


def test_figures_of_runs_that_differ_by_chance_are_their_mean() -> None:
    requests = conversations(20, 3)
    rows = [
        summarize("a", requests, run(policy, requests), Targets())
        for policy in (baselines(H100)[0], baselines(H100, 1)[0])
    ]
    assert rows[0] != rows[1]
    assert astuple(average(rows))[1:] == pytest.approx(
        [sum(pair) / 2 for pair in zip(astuple(rows[0])[1:], astuple(rows[1])[1:], strict=True)]
    )


def test_sessions_are_found_in_a_trace_that_names_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines_ = [
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1]}',
        '{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 2]}',
        '{"timestamp": 3000, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 3, 4]}',
    ]
    path.write_text("\n".join(lines_))
    trace = read_trace(path)
    assert trace[0].session == trace[2].session != trace[1].session
    assert [len(each.keys) for each in trace] == [2, 2, 3]
    assert sum(ideal_cached(trace)) == 512 + 1024
    many = enlarge(trace, 3, 100)
    assert len({each.session for each in many}) == 6
    assert sum(ideal_cached(many)) == 3 * sum(ideal_cached(trace))
    assert faster(many, 2.0)[-1].at == many[-1].at / 2


def test_an_azure_trace_is_read_without_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.9799600,3180,8"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    first, second = read_trace(path)
    assert (first.prompt_tokens, second.output_tokens, len(second.keys)) == (4808, 8, 0)
    assert second.at == pytest.approx(1.0)


def test_a_scenario_has_the_load_it_names() -> None:
    requests = Scenario(num_workers=8, load=0.5, num_requests=150).requests(conversations(40, 4), H100)
    span = requests[-1].at - requests[0].at
    assert ideal_seconds(requests, H100) / (4 * span) == pytest.approx(0.5)


def test_copies_of_a_trace_share_only_common_blocks() -> None:
    trace = conversations(40, 4)
    both = enlarge(trace, 2, 10_000)
    assert len(both) == 2 * len(trace)
    assert len({request.session for request in both}) == 80
    owners: dict[bytes, set[bytes]] = {}
    for request in both:
        for key in request.keys:
            owners.setdefault(key, set()).add(request.session)
    assert len(owners.pop(b"system")) == 80
    assert {len(sessions) for sessions in owners.values()} == {1}


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(asdict(H100)))
    assert load_machine(str(tmp_path / "m.json")) == H100


def test_percentiles_of_weights() -> None:
    assert weighted_percentile({1.0: 1, 2.0: 98, 3.0: 1}, 50) == 2.0
    assert weighted_percentile({1.0: 1, 2.0: 98, 3.0: 1}, 99.5) == 3.0
    assert weighted_percentile({1.0: 1, 2.0: 1, 9.0: 0}, 50) == 1.5


@pytest.mark.parametrize(("num_sessions", "speed"), [(400, 1.5), (1000, 2.5)])
def test_admission_keeps_goodput_in_overload(num_sessions: int, speed: float) -> None:
    requests = faster(conversations(num_sessions, 5), speed)
    plan = FleetPlan(H100, 4, 4, cache_tokens=4_000_000, clients_retry=False)
    ours, everything = (
        summarize(policy.name, requests, Simulation(plan, policy).run(requests), Targets())
        for policy in (SimulatedScheduler(), SimulatedScheduler("all", targets=NO_SLO))
    )
    assert ours.goodput > 1.3 * everything.goodput
    assert ours.rejected > everything.rejected


def test_admission_refuses_nothing_below_capacity() -> None:
    plan = FleetPlan(H100, 4, 4, cache_tokens=4_000_000, clients_retry=False)
    num_rejected = len(Simulation(plan, SimulatedScheduler()).run(conversations(400, 5)).rejected)
    assert num_rejected == 0


@pytest.mark.parametrize(
    ("goodputs", "expected"),
    [([5.0, 9.0, 8.2, 8.9], True), ([5.0, 9.0, 8.0, 8.9], False), ([5.0, 9.0, 12.0, 30.0], True)],
)
def test_overload_bar_is_of_the_best_goodput_so_far(goodputs: list[float], expected: bool) -> None:
    assert holds([0.5, 0.9, 1.1, 4.0], goodputs) is expected


def test_overload_bar_leaves_loads_below_capacity_alone() -> None:
    assert holds([0.5, 0.8, 0.95], [5.0, 9.0, 1.0])


def test_goodput_excludes_answers_after_the_last_arrival() -> None:
    requests = [request(n, 0.001 * n) for n in range(4)]
    assert summarize("weft", requests, run(SimulatedScheduler(), requests), Targets(ttft=1e9)).goodput == 0.0


def test_uncached_prompts_wait_no_longer_than_by_least_requests() -> None:
    rng = random.Random(7)
    times = sorted(rng.uniform(0, 60) for _ in range(1500))
    requests = [request(n, at, prompt=int(rng.lognormvariate(8.0, 1.0)) + 1, output=20) for n, at in enumerate(times)]
    plan = FleetPlan(H100, 4, 4)
    rules: list[SimulatedScheduler] = [
        SimulatedScheduler("weft", targets=NO_SLO),
        *(rule for rule in baselines(H100) if rule.name == "least requests"),
    ]
    ours, theirs = (summarize(rule.name, requests, run(rule, requests, plan), Targets()) for rule in rules)
    assert ours.prefill_busy > 0.5
    assert ours.ttft_mean <= 1.01 * theirs.ttft_mean
