"""The `weft` command line. Each command imports its code only when it runs, which keeps `weft --help` fast."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from weft.cli.keys import app as keys_app
from weft.cli.up_command import up
from weft.errors import ConfigError
from weft.file_descriptors import ensure_stdio, flush_stdout_on_exit
from weft.options import DraftChoice, Dtype, WeightFormat, check_addresses

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys_app)


def _tell_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"weft {importlib.metadata.version('weft')}")
        raise typer.Exit


@app.callback()
def weft(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A mesh of small services that serves large language models on your own machines."""


class RoleOption(StrEnum):
    """Values of the role argument."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


app.command()(up)

Url = Annotated[str | None, typer.Option(help="URL of the gateway; default: the mesh on this machine.")]

ApiKey = Annotated[str, typer.Option(envvar="WEFT_API_KEY", help="API key, if the mesh has keys.")]
Model = Annotated[str, typer.Option(help="Model name; default: the first that the gateway lists.")]
Scheduler = Annotated[str, typer.Option(help="host:port of the scheduler; default: the mesh on this machine.")]
Worker = Annotated[str, typer.Argument(help="Worker id, as `weft status` lists it.")]
# of anything that a plan counts
MOST = 1 << 30


@app.command()
def chat(
    url: Url = None,
    api_key: ApiKey = "",
    model: Model = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    session: Annotated[str, typer.Option(help="Session id for cache affinity; default: a new one.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default: the model's.")] = None,
) -> None:
    """Chat with a model in the terminal, or with lines from a pipe."""
    from weft.cli.chat import Chat, run_chat

    raise typer.Exit(run_chat(Chat(_gateway(url), api_key, system, session, max_tokens, temperature, model)))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    url: Url = None,
    api_key: ApiKey = "",
    model: Model = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
) -> None:
    """Print one answer to standard output and its statistics to standard error."""
    from weft.cli.chat import run_generate

    options = {"model": model or None, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    wanted = {key: value for key, value in options.items() if value is not None}
    raise typer.Exit(run_generate(_gateway(url), api_key, prompt, wanted, raw))


@app.command()
def status(
    scheduler: Scheduler = "",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the workers with their load and caches."""
    address = _scheduler("status", scheduler)
    from weft.cli.status import status as show_status

    show_status(address, watch, as_json)


@app.command()
def top(
    scheduler: Scheduler = "",
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Show live throughput, hand-offs and cache use of each worker."""
    address = _scheduler("top", scheduler)
    from weft.cli.top import top as show_top

    show_top(address, once)


@app.command()
def drain(worker: Worker, scheduler: Scheduler = "") -> None:
    """Let a worker finish its requests and send it no new ones."""
    from weft.cli.fleet_commands import drain as ask_to_drain

    ask_to_drain(_scheduler("drain", scheduler), worker, undo=False)


@app.command()
def undrain(worker: Worker, scheduler: Scheduler = "") -> None:
    """Return a drained worker to service."""
    from weft.cli.fleet_commands import drain as ask_to_drain

    ask_to_drain(_scheduler("undrain", scheduler), worker, undo=True)


@app.command()
def sleep(
    worker: Worker,
    scheduler: Scheduler = "",
    even_last: Annotated[bool, typer.Option("--even-last", help="Even if no other ready worker has its role.")] = False,
) -> None:
    """Let a worker finish its requests and release weights and KV pool; its process stays."""
    from weft.cli.fleet_commands import sleep as ask_to_sleep

    ask_to_sleep(_scheduler("sleep", scheduler), worker, even_last)


@app.command()
def wake(worker: Worker, scheduler: Scheduler = "") -> None:
    """Make a sleeping worker load its model again."""
    from weft.cli.fleet_commands import wake as ask_to_wake

    ask_to_wake(_scheduler("wake", scheduler), worker)


@app.command("set-role")
def set_role(
    worker: Worker,
    role: Annotated[RoleOption, typer.Argument(help="The new role.")],
    scheduler: Scheduler = "",
) -> None:
    """Change the role of a worker; running requests finish."""
    from weft.cli.fleet_commands import set_role as ask_to_set_role

    ask_to_set_role(_scheduler("set-role", scheduler), worker, role.value)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or its config.json, or ORG/REPO of the Hub.")],
    gpu: Annotated[str, typer.Option(help="h100, h200, a100, l40s, rtx4090 or b200.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, max=4096, help="How many of them.")] = 1,
    tp: Annotated[int, typer.Option(min=0, help="GPUs that share each matrix; 0: all that divide.")] = 0,
    pp: Annotated[int, typer.Option(min=0, help="Pipeline stages; 0: all that divide.")] = 0,
    ep: Annotated[int, typer.Option(min=0, help="GPUs that share the experts; 0: all that divide.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV cache; auto: bfloat16.")] = Dtype.AUTO,
    weight_format: Annotated[
        WeightFormat, typer.Option(help="Weights in memory: as stored, or packed to 12 bits.")
    ] = WeightFormat.PLAIN,
    context: Annotated[int, typer.Option(min=0, help="Tokens a sequence; 0: 8192, or the model's.")] = 0,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences that generate at once.")] = 32,
    chunk_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="Prompt tokens in one step.")] = 2048,
    draft: Annotated[
        str, typer.Option(metavar="mtp|none|DIR|ORG/REPO", help="Draft model: a head, or mtp: the model's own layer.")
    ] = DraftChoice.NONE.value,
) -> None:
    """What a model needs on GPUs: weights, KV, the context that fits, and the limits, from its config alone."""
    from weft.cli.plan import PlanOptions, run_plan

    options = PlanOptions(
        model, gpu.lower(), gpus, tp, pp, ep, dtype, weight_format, context, batch, chunk_tokens, draft
    )
    raise typer.Exit(run_plan(options))


@app.command()
def bench(
    url: Url = None,
    model: Annotated[str, typer.Option(help="Default: the first that the server lists.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar=["WEFT_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
    ] = "",
    chat: Annotated[bool, typer.Option("--chat", help="/v1/chat/completions instead of /v1/completions.")] = False,
    requests: Annotated[int, typer.Option(min=0, help="How many; of a trace 0 takes all.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Closed loop: clients, each with one request.")] = 8,
    rate: Annotated[float, typer.Option(min=0.0, help="Open loop: requests a second, Poisson.")] = 0.0,
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Replay: JSON lines as in Mooncake's traces.")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Of the replay; 2 is twice as fast.")] = 1.0,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Of those, the same in every prompt.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    spread: Annotated[float, typer.Option(min=0.0, max=1.0, help="Lengths vary by this share.")] = 0.0,
    slo_ttft_ms: Annotated[float, typer.Option(min=0.0, help="A good request's first token; 0: any.")] = 0.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=0.0, help="A good request's mean time per token; 0: any.")] = 0.0,
    max_seconds: Annotated[float, typer.Option(min=1.0, help="What is not done by then has failed.")] = 600.0,
    seed: Annotated[int, typer.Option(help="The same seed asks the same things.")] = 0,
    report: Annotated[Path | None, typer.Option(help="An HTML page with plots.")] = None,
    raw: Annotated[Path | None, typer.Option(help="A JSON file with every request.")] = None,
) -> None:
    """Load an OpenAI-compatible server and say what its users felt: rates, latencies, goodput."""
    from weft.bench.main import BenchOptions, run_bench
    from weft.bench.stats import LatencySlo
    from weft.bench.workload import WorkloadSpec

    if shared_tokens >= prompt_tokens and trace is None:
        raise typer.BadParameter("prompts have fewer tokens in common than they are long", param_hint="--shared-tokens")
    if not requests and trace is None:
        raise typer.BadParameter("0 takes all of a trace, and there is none", param_hint="--requests")
    if rate and trace is not None:
        raise typer.BadParameter("a trace says itself when requests come; --speed has it faster", param_hint="--rate")
    recipe = WorkloadSpec(
        requests=requests,
        prompt_tokens=prompt_tokens,
        shared_tokens=shared_tokens,
        output_tokens=output_tokens,
        spread=spread,
        rate=rate,
        concurrency=concurrency,
        seed=seed,
    )
    promise = LatencySlo(slo_ttft_ms / 1000, slo_tpot_ms / 1000)
    options = BenchOptions(_gateway(url), model, api_key, chat, recipe, trace, speed, max_seconds, promise, report, raw)
    raise typer.Exit(run_bench(options))


@app.command()
def pull(
    names: Annotated[
        list[str], typer.Argument(metavar="ORG/REPO[@REVISION]...", help="Names on the Hugging Face Hub.")
    ],
) -> None:
    """Download models from the Hugging Face Hub into its cache and compare their checksums."""
    from weft.cli.hub_models import run_pull

    raise typer.Exit(run_pull(names))


@app.command()
def models() -> None:
    """List the models in the cache of the Hugging Face Hub: size, and whether Weft serves them."""
    from weft.cli.hub_models import run_models

    raise typer.Exit(run_models())


@app.command()
def convert(
    gguf: Annotated[Path, typer.Argument(help="A GGUF file, or a directory with one model or Mistral's params.json.")],
    out: Annotated[Path | None, typer.Argument(help="Directory to make; default: named like the file, here.")] = None,
) -> None:
    """Make a checkpoint that Weft serves out of a GGUF file or Mistral's own layout; GGUF's weights are expanded."""
    from weft.cli.convert import run_convert

    raise typer.Exit(run_convert(gguf, out))


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="What WEFT_TLS_DIR will name, on every machine of the mesh.")],
    host: Annotated[list[str] | None, typer.Option(help="A name that clients call the gateway by.")] = None,
) -> None:
    """Make a certificate authority and a certificate; where there is an authority, a new certificate by it."""
    from weft.cli.certs import make_certs
    from weft.file_io import format_os_error

    try:
        left = make_certs(folder, host or [])
    except (OSError, ValueError) as error:
        said = format_os_error(error) if isinstance(error, OSError) else error
        typer.secho(f"weft certs: {said}", fg="red", err=True)
        raise typer.Exit(1) from None
    print(f"{folder}: ca.pem, cert.pem and key.pem for every service; ca-key.pem makes new ones, keep it elsewhere")
    for command in left:
        typer.secho(f"run this so that services can read the new file: {command}", err=True)


@app.command()
def doctor(
    model: Annotated[list[str] | None, typer.Option(help="As for `weft up`: DIR or NAME=DIR, again for more.")] = None,
    host: Annotated[str, typer.Option(help="Where the gateway would listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Public gRPC.")] = 9000,
    workers: Annotated[int, typer.Option(min=1, help="On this machine, for each model.")] = 2,
    deep: Annotated[bool, typer.Option("--deep", help="Decode bundles and compare their checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what a mesh needs of this machine and say what to do; exits with 1 where something would not work."""
    from weft.cli.doctor import Subject
    from weft.cli.doctor.run import run_doctor
    from weft.cli.up import UsageError, find_models
    from weft.hub import cached_snapshot

    try:
        models = find_models(model or [], fetch=cached_snapshot)
    except UsageError as error:
        typer.secho(f"weft doctor: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    subject = Subject(models, host, port, grpc_port, workers * len(models), is_deep=deep)
    raise typer.Exit(run_doctor(subject, as_json))


class PassedOn(TyperCommand):
    """Passes all options on to the bundle program, also --help and `--` before names that begin with a dash."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments as typed, for the bundle program."""
        ctx.args = args
        return args


@app.command(cls=PassedOn)
def compress(context: typer.Context) -> None:
    """Make a bundle of a checkpoint, about a third smaller and the same to the bit: MODEL OUT [--threads N]."""
    _bundle_tool(context)


@app.command(cls=PassedOn)
def decompress(context: typer.Context) -> None:
    """Make the checkpoint again that a bundle was made of: BUNDLE OUT [--threads N]."""
    _bundle_tool(context)


@app.command(cls=PassedOn)
def verify(context: typer.Context) -> None:
    """Decode a whole bundle and compare its checksums: BUNDLE [--threads N]."""
    _bundle_tool(context)


@app.command(cls=PassedOn)
def inspect(context: typer.Context) -> None:
    """What each tensor of a bundle takes, beside its entropy: BUNDLE [--plot FILE.svg]."""
    _bundle_tool(context)


def _bundle_tool(context: typer.Context) -> NoReturn:
    """Become the bundle program: the command line itself starts without numpy and the kernels."""
    os.execv(sys.executable, [sys.executable, "-m", "weft_bundle", str(context.info_name), *context.args])


def _scheduler(command: str, named: str) -> str:
    """What --scheduler says, else that of the latest mesh on this machine."""
    from weft.cli.mesh_registry import running_meshes, runtime_folder

    address = named or next((mesh.scheduler for mesh in running_meshes()), "")
    if not address:
        typer.secho(
            f"weft {command}: no mesh runs that is noted in {runtime_folder()}: start one with", fg="red", err=True
        )
        indent = " " * len(f"weft {command}: ")
        typer.secho(
            f"{indent}`weft up`; if one runs (in containers, for another user, as a unit of systemd's),",
            fg="red",
            err=True,
        )
        typer.secho(f"{indent}name its scheduler with --scheduler HOST:PORT", fg="red", err=True)
        raise typer.Exit(1)
    check_addresses("--scheduler", address)
    return address


def _gateway(url: str | None) -> str:
    """What --url says, else the latest mesh on this machine, else the usual port."""
    from weft.cli.mesh_registry import running_meshes
    from weft.completion_client import DEFAULT_URL

    return (url or next((mesh.url for mesh in running_meshes()), DEFAULT_URL)).rstrip("/")


def main() -> None:
    """Entry point of the `weft` script."""
    # read when grpc is imported: its own lines about peers that leave would end up between ours
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # of all that this process starts, or becomes: with -m, Python looks for modules in the current directory first
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    ensure_stdio()
    with flush_stdout_on_exit():
        try:
            os.getcwd()  # MKL of the workers fails without one, in a message that names something else
            app()
        except ConfigError as error:  # of what every command reads, such as WEFT_TLS_DIR
            typer.secho(f"weft: {error}", fg="red", err=True)
            sys.exit(2)
        except FileNotFoundError as error:
            if error.filename is not None:
                raise
            typer.secho("weft: the current directory is there no more: go to another one", fg="red", err=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
