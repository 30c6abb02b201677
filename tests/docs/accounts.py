"""Every command of README and docs: which test runs it as it stands there, or why none does."""

from __future__ import annotations

# run by tests/mesh/test_readme.py against a mesh, and what is added so that they end soon
ON_A_MESH: dict[str, list[str]] = {
    "chat": [],
    "generate": [],
    "status": [],
    "top": ["--once"],
    "drain": [],
    "undrain": [],
    "set-role": [],
    "sleep": [],
    "wake": [],
    "bench": ["--requests", "4", "--prompt-tokens", "32", "--output-tokens", "4"],
}
# run by tests/docs/test_commands.py
ALONE: dict[str, list[str]] = {
    "plan": [],
    "doctor": [],
    "keys": [],
    "certs": [],
}
# by the program that these become
BUNDLES: dict[str, list[str]] = {
    "compress": ["--threads", "1"],
    "decompress": ["--threads", "1"],
    "verify": ["--threads", "1"],
    "inspect": [],
}
TWO_NODES = "services/weights/test_two_nodes.py::test_the_second_node_loads_over_the_network_and_samples_its_disk"
# the options of `weft up`, and what starts a mesh with them, or tries what they ask for
UP: dict[str, str] = {
    "--model": "mesh/conftest.py::mesh",
    "--both": "clients/conftest.py::whole_mesh",
    "--gateways": "clients/conftest.py::whole_mesh",
    "--keys": "clients/conftest.py::whole_mesh",
    "--timeline": "clients/conftest.py::whole_mesh",
    "--weight-format": "clients/conftest.py::whole_mesh",
    "--max-seqs": "weft/cli/test_mesh.py::test_workers_are_told_how_many_sequences_a_step_may_have",
    "--dtype": "mesh/conftest.py::mesh",
    "--prefill": "mesh/test_planner.py::planned",
    "--decode": "mesh/test_planner.py::planned",
    "--port": "mesh/conftest.py::mesh",
    "--cors-origins": "weft/cli/test_config_check.py::test_wrong_cors_origin_is_refused_before_the_start",
    "--host": "weft/cli/test_main.py::test_up_opens_no_listener_to_others_without_keys",
    "--allow-unauthenticated": "services/gateway/test_keys.py::test_a_listener_that_others_can_reach_wants_keys",
    "--disk": "weft/cli/test_mesh.py::test_the_store_is_told_of_its_disk",
    "--disk-gib": "weft/cli/test_mesh.py::test_the_store_is_told_of_its_disk",
    "--weights-from": TWO_NODES,
    "--weights-listen": TWO_NODES,
}
# targets of make, and what runs them, or why no test does
MAKE: dict[str, str] = {
    "serve": "loadtest.quickstart does, from a clone; it installs for a minute",
    "test": ".ci/run",
    "lint": ".ci/run",
    "help": "prints",
    "protos": "tests/contract/test_generated.py compiles them",
    "client-test": ".ci/run",
    "page-test": ".ci/run, by its script",
    "agents": "installs 1 GB of other people's agents; its tests are in tests/agents",
    "soak": "half an hour; the same for some hundreds of steps is in make test",
    "chaos": "minutes; one round is in make test",
    "pauses": "half an hour; tests/mesh/test_pauses.py has each kind of pause once",
}
OTHERS: dict[str, str] = {
    "docker": "wants a daemon; tests/contract/test_compose.py starts what the compose files start, as processes",
    "curl": "tests/mesh/test_readme.py",
    "grpcurl": "its calls by its own way, reflection: tests/mesh/test_readme.py",
    "pip": "installs; `make serve` installs the same from constraints.txt",
    "git": "loadtest.quickstart",
    "loadtest/engine/peers.sh": "downloads engines of other people",
    "loadtest/gateway/peers.sh": "downloads routers of other people",
}
# modules: benchmarks print figures and judge nothing, so what they measure with is run by these
MODULES: dict[str, str] = {
    "weft_services": "tests/mesh runs all of them as processes",
    "weft_kernels.native": "scripts/install.sh, for whatever runs here",
    "loadtest.fleet": "tests/loadtest/test_fleet.py",
    "loadtest.gateway": "tests/loadtest/test_gateway.py",
    "loadtest": "a benchmark, for a quiet machine; that it can be imported and has these options is tested here",
    "training": "trains the shipped model, for hours; its parts: tests/training",
}
