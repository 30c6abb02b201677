"""For every command in README and docs: the test that runs it as written, or the reason why none does."""

from __future__ import annotations

# Run by tests/mesh/test_readme.py on a mesh, with options that make them end soon.
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
# Run by tests/docs/test_commands.py.
ALONE: dict[str, list[str]] = {
    "plan": [],
    "doctor": [],
    "keys": [],
    "certs": [],
}
# Need a Hub: the tests that run them against a local server.
HUB: dict[str, str] = {
    "pull": "weft/test_hub.py::test_pull_fetches_only_needed_files",
    "models": "weft/test_hub.py::test_models_lists_the_cache",
}
# Need a GGUF file: the tests that make one.
GGUF: dict[str, str] = {
    "convert": "weft/gguf_import/test_conversion.py::test_command_makes_a_directory_named_like_the_file",
}
# Run by the bundle program, to which these commands are passed on.
BUNDLES: dict[str, list[str]] = {
    "compress": ["--threads", "1"],
    "decompress": ["--threads", "1"],
    "verify": ["--threads", "1"],
    "inspect": [],
}
TWO_NODES = "services/weights/test_two_nodes.py::test_the_second_node_loads_over_the_network_and_samples_its_disk"
# Options of `weft up`, and the fixture or test that uses each.
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
    "--tp": "mesh/test_groups.py::groups",
    "--ep": "weft/cli/test_main.py::test_up_refuses_layouts_that_do_not_fit",
    "--draft": "weft/cli/test_main.py::test_draft_is_a_choice_or_an_absolute_directory",
}
# Targets of make: what runs each, or why no test does.
MAKE: dict[str, str] = {
    "serve": "loadtest.quickstart does, from a clone; it installs for a minute",
    "smollm2": "downloads 93 MB; tests/smollm2 converts and serves the same",
    "smollm2-test": "downloads 93 MB and takes a quarter of an hour; nightly",
    "formats-test": "ten minutes; tests/weft/model/test_formats.py writes and reads the same formats",
    "test": ".ci/run",
    "lint": ".ci/run",
    "help": "prints",
    "protos": "tests/contract/test_generated.py compiles them",
    "client-test": ".ci/run",
    "page-test": ".ci/run, by its script",
    "wheel-test": "installs torch; `make test` runs the same tests on the unpacked wheel",
    "template-test": "needs templates of other people's models; tests/loadtest/test_templates.py runs its parts",
    "agents": "installs 1 GB of agents; its tests are in tests/agents",
    "soak": "half an hour; make test runs some hundreds of the same steps",
    "chaos": "minutes; make test runs one round",
    "pauses": "half an hour; tests/mesh/test_pauses.py runs each kind of pause once",
}
OTHERS: dict[str, str] = {
    "docker": "needs a daemon; tests/contract/test_compose.py starts the same services as processes",
    "curl": "tests/mesh/test_readme.py",
    "grpcurl": "tests/mesh/test_readme.py makes the same calls by reflection",
    "pip": "installs; `make wheel-test` builds and installs the wheel",
    "git": "loadtest.quickstart",
    "loadtest/engine/peers.sh": "downloads other engines",
    "loadtest/gateway/peers.sh": "downloads other routers",
}
# Modules: benchmarks only print figures, so tests run the code that they measure with.
MODULES: dict[str, str] = {
    "weft_services": "tests/mesh runs all of them as processes",
    "weft_kernels.native": "scripts/install.sh, for this processor",
    "loadtest.fleet": "tests/loadtest/test_fleet.py",
    "loadtest.gateway": "tests/loadtest/test_gateway.py",
    "loadtest": "benchmarks for a quiet machine; tests here import them and check their options",
    "training": "trains the shipped model for hours; its parts: tests/training",
}
