"""Models by their name on the Hub: the real library and the real command against a local server."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE

from tests.weft.hub_server import Hub, Repository, serving
from tests.weft.tiny_tekken import tiny_tekken
from weft.cli.layout import free_ports
from weft.config import model_name
from weft.file_io import foreign_path
from weft.hub import HubName, hub_name

NANO = Path(__file__).parents[2] / "models" / "weft-nano"
NAME = "weft-lab/nano"
PATIENCE_SECONDS = 40.0
MEGABYTES = 24


def nano_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in NANO.iterdir() if path.is_file()}


def sharded_files() -> dict[str, bytes]:
    """Two shards of random bytes; a download compares checksums, and only a load reads tensors."""
    shards = {f"model-0000{number}-of-00002.safetensors": random.randbytes(MEGABYTES << 20) for number in (1, 2)}
    index = {"weight_map": {f"tensor.{number}": file for number, file in enumerate(shards)}}
    small = {name: content for name, content in nano_files().items() if not name.endswith(".safetensors")}
    return {
        **small,
        **shards,
        "consolidated.safetensors": b"the same once more",
        "model.safetensors.index.json": json.dumps(index).encode(),
    }


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(
        Hub({NAME: Repository({**nano_files(), "pytorch_model.bin": b"pickle", "onnx/model.onnx": b"x"})})
    ) as hub:
        yield hub


class Client:
    """Runs commands with a cache of their own."""

    def __init__(self, hub: Hub, home: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "WEFT_"))}
        self.cache = home / "hub"
        self.environ = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}

    def start(self, *words: str, **settings: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "weft.cli.main", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env={**self.environ, **settings}, stdout=pipe, stderr=pipe, text=True)

    def run(self, *words: str, **settings: str) -> tuple[int, str, str]:
        """Return status, standard output and standard error."""
        process = self.start(*words, **settings)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, out, err

    def pull(self, name: str = NAME, **settings: str) -> Path:
        """Return the snapshot."""
        status, out, err = self.run("pull", name, **settings)
        assert status == 0, err
        return Path(out.strip())

    def refused(self, *words: str, **settings: str) -> str:
        """Return the one line that a failing command wrote."""
        status, _, err = self.run(*words, **settings)
        assert status, err
        return next(line for line in err.splitlines() if line.startswith(f"weft {words[0]}: "))


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub, tmp_path / "home")


def partial_weights(client: Client) -> list[Path]:
    return list(client.cache.glob(f"*/blobs/{'?' * 64}.incomplete"))


@contextmanager
def stalled(client: Client, hub: Hub, num_bytes: int, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """A download for which the server has stopped sending after this many bytes of each file."""
    hub.stall_after = num_bytes
    process = client.start("pull", NAME, **settings)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(path.stat().st_size for path in partial_weights(client)):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    yield process
    hub.stall_after = None
    hub.sent.clear()


def test_name_is_organisation_and_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B", "main")
    assert hub_name("Qwen/Qwen3-0.6B@refs/pr/1") == HubName("Qwen/Qwen3-0.6B", "refs/pr/1")
    assert hub_name("Qwen/" + "x" * 300) is None
    for path in ("./Qwen/x", "/Qwen/x", "../x", "Qwen", "a/b/c", "Qwen/x/", "Qwen/x@", "Qwen/x@../y", "s3://a/b", ""):
        assert hub_name(path) is None
    (tmp_path / "Qwen" / "x").mkdir(parents=True)
    assert hub_name("Qwen/x") is None


@pytest.mark.parametrize("has_both", [False, True])
def test_pull_fetches_tekken_without_tokenizer_json(hub: Hub, client: Client, has_both: bool) -> None:
    files = nano_files() | {"tekken.json": json.dumps(tiny_tekken()).encode()}
    if not has_both:
        del files["tokenizer.json"]
    hub.models[NAME] = Repository(files)
    snapshot = client.pull()
    assert (snapshot / "tekken.json").exists() != has_both
    assert (snapshot / "tokenizer.json").exists() == has_both
    assert client.pull(HF_HUB_OFFLINE="1") == snapshot


def test_missing_directory_that_looks_like_a_name_names_pull() -> None:
    assert "`weft pull org/model`" in foreign_path(Path("org/model"))


def test_pull_fetches_only_needed_files(client: Client, hub: Hub) -> None:
    snapshot = client.pull()
    assert model_name(snapshot) == "nano"
    assert (snapshot / "model.safetensors").is_symlink()
    assert (snapshot / "model.safetensors").read_bytes() == nano_files()["model.safetensors"]
    assert not any("pytorch_model" in path or "onnx" in path or "README" in path for path in hub.paths("GET"))


def test_plan_fetches_only_the_configuration(client: Client, hub: Hub) -> None:
    status, out, err = client.run("plan", NAME)
    assert status == 0, err
    assert out == client.run("plan", str(NANO))[1]
    files = [path.rpartition("/")[2] for path in hub.paths("GET") if "/resolve/" in path]
    assert files == ["config.json"]
    hub.asked.clear()
    assert client.run("plan", NAME)[:2] == (0, out)
    assert hub.asked == []
    client.pull()
    assert any(path.endswith("/model.safetensors") for path in hub.paths("GET"))


def test_draft_head_is_fetched_by_name(client: Client, hub: Hub) -> None:
    head = NANO / "draft"
    hub.models["lab/head"] = Repository({path.name: path.read_bytes() for path in head.iterdir()})
    status, out, err = client.run("plan", str(NANO), "--draft", "lab/head")
    assert status == 0, err
    assert out == client.run("plan", str(NANO), "--draft", str(head))[1]
    assert client.pull("lab/head") == client.pull("lab/head", HF_HUB_OFFLINE="1")
    assert "lab/none: no directory here and no public model" in client.refused("up", "--draft", "lab/none")


def test_plan_offline_names_pull(client: Client) -> None:
    assert f"run `weft pull {NAME}`" in client.refused("plan", NAME, HF_HUB_OFFLINE="1")


def test_second_pull_fetches_nothing(client: Client, hub: Hub) -> None:
    snapshot = client.pull()
    hub.asked.clear()
    assert client.pull() == snapshot
    assert [path.partition("?")[0] for path in hub.paths("GET")] == [f"/api/models/{NAME}/revision/main"]
    assert hub.paths("HEAD") == []


def test_full_cache_makes_no_request_offline_or_for_a_commit(client: Client, hub: Hub) -> None:
    snapshot = client.pull()
    hub.asked.clear()
    assert client.pull(HF_HUB_OFFLINE="1") == snapshot
    assert client.pull(f"{NAME}@{'a' * 40}") == snapshot
    assert hub.asked == []


def test_empty_cache_is_explained_when_offline(client: Client, hub: Hub) -> None:
    line = client.refused("pull", NAME, HF_HUB_OFFLINE="1")
    assert "the cache" in line
    assert f"run `weft pull {NAME}` with a network" in line
    assert hub.asked == []


def test_unreachable_hub_serves_the_cache(client: Client, hub: Hub) -> None:
    line = client.refused("pull", NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in line
    snapshot = client.pull()
    assert client.pull(HF_ENDPOINT="http://127.0.0.1:9") == snapshot
    hub.models[NAME].is_listed = False
    assert client.pull() == snapshot


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ended_download_resumes_and_fetches_only_the_rest(client: Client, hub: Hub, number: signal.Signals) -> None:
    hub.models[NAME].files = files = sharded_files()
    with stalled(client, hub, (MEGABYTES - 8) << 20) as process:
        process.send_signal(number)
        process.communicate(timeout=5)  # although the server sends nothing
    kept = sum(path.stat().st_size for path in partial_weights(client))
    assert kept
    snapshot = client.pull()
    total = sum(len(content) for name, content in files.items() if name.startswith("model-"))
    assert sum(hub.sent.values()) == total - kept
    assert all((snapshot / name).read_bytes() == content for name, content in files.items() if "model-" in name)


def test_two_pulls_at_once_fetch_once(client: Client, hub: Hub) -> None:
    hub.models[NAME].files = files = sharded_files()
    processes = [client.start("pull", NAME) for _ in range(2)]
    outputs = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert hub.sent == {name: len(content) for name, content in files.items() if name.startswith("model-")}


def test_flipped_byte_of_a_download_is_fetched_again(client: Client, hub: Hub) -> None:
    hub.flipped = 1
    snapshot = client.pull()
    assert hub.flipped == 0
    assert (snapshot / "model.safetensors").read_bytes() == nano_files()["model.safetensors"]
    (snapshot / "model.safetensors").resolve().unlink()
    hub.flipped = 2
    assert "model.safetensors has a wrong checksum after a second download" in client.refused("pull", NAME)


def test_flipped_byte_on_disk_is_detected(client: Client) -> None:
    blob = (client.pull() / "model.safetensors").resolve()
    content, stat = bytearray(blob.read_bytes()), blob.stat()
    content[1000] ^= 1
    blob.write_bytes(content)
    os.utime(blob, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "model.safetensors in" in client.refused("pull", NAME, HF_HUB_OFFLINE="1")
    client.pull()
    assert blob.read_bytes() == nano_files()["model.safetensors"]


def test_gated_model_wants_a_token_which_stays_at_the_hub(client: Client, hub: Hub) -> None:
    hub.models[NAME].token = "hf_secret"
    assert f"accept its terms at {hub.url}/{NAME}, then set HF_TOKEN" in client.refused("pull", NAME)
    assert client.pull(HF_TOKEN="hf_secret").is_dir()
    assert hub.leaked_tokens == []


def test_missing_model_and_revision_are_explained(client: Client, hub: Hub) -> None:
    assert "no public model at" in client.refused("pull", "weft-lab/nothing")
    assert "has no revision 'v9'" in client.refused("pull", f"{NAME}@v9")
    assert "expected ORG/REPO" in client.refused("pull", "nano")


def test_unsupported_model_is_refused_before_its_weights(client: Client, hub: Hub) -> None:
    files = hub.models[NAME].files
    files["config.json"] = json.dumps({"architectures": ["MambaForCausalLM"]}).encode()
    assert "MambaForCausalLM is not supported" in client.refused("pull", NAME)
    assert hub.sent == {}
    hub.models[NAME].files = {"config.json": nano_files()["config.json"], "pytorch_model.bin": b"pickle"}
    hub.models[NAME].commit = "b" * 40
    assert "pickled" in client.refused("pull", NAME)
    hub.models[NAME].files = {"nano-Q4_K_M.gguf": b"GGUF"}
    hub.models[NAME].commit = "c" * 40
    assert (
        f"has only GGUF files; make a checkpoint of one with `weft convert FILE` after `hf download {NAME} FILE`"
        in (client.refused("pull", NAME))
    )


def test_too_small_disk_is_refused_before_the_weights(client: Client, hub: Hub) -> None:
    hub.models[NAME].claimed_sizes = {"model.safetensors": 1 << 60}
    line = client.refused("pull", NAME)
    assert "1152921504.6 GB are missing" in line
    assert "set HF_HOME to a directory on a larger disk" in line
    assert hub.sent == {}


@pytest.fixture
def small_disk(client: Client) -> Iterator[Path]:
    """A file system of 64 MiB under the client's cache."""
    home = client.cache.parent
    home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(home)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield home
    subprocess.run(["umount", "--lazy", str(home)], check=True)


def fill(folder: Path, left: int) -> Path:
    """Fill the disk up to this many bytes with a file."""
    (filler := folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - left))
    return filler


def test_disk_that_fills_up_is_named_and_the_rest_resumes(client: Client, hub: Hub, small_disk: Path) -> None:
    hub.models[NAME].files["model.safetensors"] = random.randbytes(MEGABYTES << 20)
    with stalled(client, hub, 12 << 20, HF_HUB_DOWNLOAD_TIMEOUT="1") as process:
        (part,) = partial_weights(client)
        while part.stat().st_size < DOWNLOAD_CHUNK_SIZE:  # nothing is written during the stall
            time.sleep(0.02)
        filler = fill(small_disk, left=5 << 20)
        hub.stall_after = None
        hub.released.set()
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2
    advice = "delete models there, or set HF_HOME to a directory on a larger disk"
    assert err.endswith(f"weft pull: {NAME}: the disk of {client.cache} is full; {advice}\n")
    filler.unlink()
    kept = part.stat().st_size
    assert kept >= DOWNLOAD_CHUNK_SIZE
    client.pull()
    assert hub.sent["model.safetensors"] == (MEGABYTES << 20) - kept


def test_full_disk_is_explained_in_one_line(client: Client, small_disk: Path) -> None:
    fill(small_disk, left=16 << 10)
    status, _, err = client.run("pull", NAME)
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith(f"weft pull: {NAME}: the disk of {client.cache} is full; ")


def test_limit_of_file_sizes_is_explained(client: Client) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limits[1]))
    try:
        process = client.start("pull", NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2
    assert f"weft pull: {NAME}: {client.cache}: File too large; raise `ulimit -f`" in err


def test_gateway_fetches_no_weights(client: Client, hub: Hub) -> None:
    code = "from functools import partial; from weft.hub import fetch_model; from weft.weights.object_store import *; "
    code += "print(with_local_model(fetch=partial(fetch_model, has_weights=False)))"
    settings = {**client.environ, "WEFT_MODEL": f"a={NAME},b={NAME}@main"}
    ended = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)
    assert f"a={client.cache}" in ended.stdout
    assert hub.sent == {}
    assert client.refused("pull", NAME, HF_HUB_OFFLINE="1").endswith("without HF_HUB_OFFLINE")


def test_doctor_reads_the_cache_and_downloads_nothing(client: Client, hub: Hub) -> None:
    assert f"run `weft pull {NAME}`" in client.refused("doctor", "--model", NAME)
    assert hub.asked == []


def test_models_lists_the_cache(client: Client, hub: Hub) -> None:
    assert "no models" in client.run("models")[2]
    client.pull()
    hub.models["weft-lab/old"] = Repository({**nano_files()}, commit="c" * 40)
    config = (client.pull("weft-lab/old") / "config.json").resolve()
    config.write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    status, out, _ = client.run("models")
    assert status == 0
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows[1].startswith("weft-lab/nano main")
    assert rows[1].endswith("GB yes")
    assert "MambaForCausalLM is not supported" in rows[2]


def test_up_refuses_an_unknown_name_before_any_process(client: Client) -> None:
    assert "no public model at" in client.refused("up", "weft-lab/nothing")


def test_up_serves_a_model_by_name(client: Client, hub: Hub) -> None:
    http, grpc = free_ports(2)
    body = {"model": "nano", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
    up = client.start("up", NAME, "--both", "1", "--port", str(http), "--grpc-port", str(grpc))
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while True:
            assert up.poll() is None, up.communicate()
            assert time.monotonic() < deadline
            with suppress(httpx.TransportError):
                answer = httpx.post(f"http://127.0.0.1:{http}/v1/chat/completions", json=body, trust_env=False)
                if answer.status_code == 200:
                    break
            time.sleep(0.1)
    finally:
        up.terminate()
        up.communicate(timeout=PATIENCE_SECONDS)
    assert answer.json()["choices"][0]["message"]["content"]
    # one listing: the services received the snapshot's directory
    assert len([path for path in hub.paths("GET") if path.startswith("/api/models/")]) == 1


def test_cache_that_the_library_filled_is_served_as_it_is(client: Client, hub: Hub) -> None:
    code = f"from huggingface_hub import hf_hub_download as get; [get('{NAME}', name) for name in {list(nano_files())}]"
    subprocess.run([sys.executable, "-c", code], env=client.environ, check=True, capture_output=True)
    hub.sent.clear()
    hub.asked.clear()
    snapshot = client.pull(HF_HUB_OFFLINE="1")
    assert hub.asked == []
    assert client.pull() == snapshot
    assert hub.sent == {}
