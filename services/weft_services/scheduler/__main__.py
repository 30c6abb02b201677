"""`python -m weft_services.scheduler`: one scheduler process."""

import logging
from functools import partial

from weft import log, metrics, trace
from weft.config import read_config
from weft.rpc.server import RpcServer, freeze_startup_objects, run, until_signal
from weft.stall_clock import StallAwareClock
from weft_services.scheduler.admission import AdmissionQueue, parse_targets
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.config import SchedulerConfig
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.fleet_service import StoreUsagePoller
from weft_services.scheduler.prefixes import KvStoreClient, PrefixLocator
from weft_services.scheduler.role_balancer import LeaderLease, RoleBalancer
from weft_services.scheduler.router import Router
from weft_services.scheduler.service import NAMES, register


async def main(config: SchedulerConfig) -> None:
    """Serve until SIGTERM. Memberships end with the process, so there is nothing to drain."""
    logging.info("%s", config)
    trace.setup("scheduler")
    log.startup_phase("imports")
    affinity = AffinityStore(config.redis_url)
    lease = LeaderLease(config.redis_url, "planner")
    planner = RoleBalancer(config.role_balancer_limits, lambda: lease.is_held) if config.role_balancer_limits else None
    router = Router(config.silence_seconds, parse_targets(config.slo), planner=planner)
    kvstore = KvStoreClient(config.kvstore_addr) if config.kvstore_addr else None
    locator = PrefixLocator(kvstore.locate if kvstore else None)
    make_queue = partial(AdmissionQueue, config.max_queue, config.max_queue_wait_seconds)
    clock = StallAwareClock(on_standstill=metrics.STALLED_SECONDS.inc)
    dispatcher = Dispatcher(router, affinity, make_queue, clock, locator)
    rpc = RpcServer(NAMES)
    store = StoreUsagePoller(kvstore.describe) if kvstore else None
    register(rpc.server, dispatcher, config.report_interval_ms, config.silence_seconds, store, clock)
    metrics_port = metrics.expose(config.host, config.metrics_port)
    logging.info("listening at=%s metrics=%d", await rpc.start(config.host, config.port), metrics_port)
    await rpc.set_ready(True)
    freeze_startup_objects()
    await until_signal(
        clock.tick(), dispatcher.run(), *([store.run()] if store else []), *([lease.run()] if planner else [])
    )
    await rpc.stop(grace_seconds=0.5)
    if kvstore is not None:
        await kvstore.close()


if __name__ == "__main__":
    log.setup("scheduler")
    run(lambda: main(read_config(SchedulerConfig)))
