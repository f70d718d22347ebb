"""The command `rsrv`, which shows and controls a running server. Only subcommands import heavy modules."""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from rsrv.address import LOOPBACK, bare
from rsrv.command import COMMANDS, EXIT_STATUS, CommandParser, command, end_in_order
from rsrv.extras import install_command
from rsrv.gpu.report import PARTS
from rsrv.text import nearest
from rsrv.triton_command_line import DEFAULT_PORTS
from rsrv.units import parse_time
from rsrv_gen.cli import add_compile_for


@command("rsrv", extra="serve")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:
        end_in_order()
    # Words after -- are flags for tritonserver.
    cut = words.index("--") if words[:1] == ["serve"] and "--" in words else len(words)
    options = parser().parse(words[:cut])
    options.arguments = words[cut + 1 :]
    if options.command == "help":
        options = parser().parse([*options.words, "--help"])
    if options.command == "version":
        options = parser().parse(["--version"])
    # Disable gRPC's own log, because the command itself explains a failure of the connection.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if options.command == "gateway":
        from rsrv.cli import gateway_commands

        return gateway_commands.run(options)
    if options.command == "serve":
        from rsrv.serve import command

        return command.run(options)
    if options.command == "openai":
        from rsrv.openai import command as openai

        return openai.run(options)
    if options.command in ("infer", "map") or (options.command == "doctor" and options.url):
        from rsrv.cli import data_commands

        return data_commands.run(options)
    if options.command == "replay":
        from rsrv.cli import replay

        return replay.run(options)
    if options.command == "plan":
        from rsrv.sim import run

        return run.run_plan(options)
    if options.command == "triton":
        return _triton(options)
    if options.command == "check-triton":
        from rsrv.gpu import triton

        return triton.run(options.tritonserver)
    if options.command == "gpu":
        return _run_on_gpu(options)
    if options.command == "completion":
        return _print_completion(options.shell)
    from rsrv.cli import server_commands

    return server_commands.run(options)


def _triton(options: argparse.Namespace) -> int:
    """Carry out `rsrv triton install` or `rsrv triton pip`, and return the exit status."""
    from rsrv.triton_install import Installation, InstallError, default_folder

    installation = Installation.at(options.dir or default_folder())
    if options.verb == "pip":
        if not installation.stub_python.exists():
            print("rsrv triton pip: run `rsrv triton install` first", file=sys.stderr)
            return 1
        return subprocess.call([str(installation.stub_python), "-m", "pip", *options.arguments])
    try:
        installation.install(lambda line: print(line, flush=True))
    except InstallError as error:
        print(f"rsrv triton install: {error}", file=sys.stderr)
        return 1
    print(f"tritonserver: {installation.launcher}")
    print(f"perf_analyzer: {installation.perf_analyzer}")
    return 0


def _run_on_gpu(options: argparse.Namespace) -> int:
    """Carry out `rsrv gpu profile` or `rsrv gpu check`, and return the exit status."""
    from rsrv_gen.run import run_in_runtime

    if options.verb == "profile":
        return run_in_runtime("rsrv.runtime.card_profile", options.repository, options.file)
    keys = ("bundles", "models", "parts", "minutes", "cpu", "quick", "json")
    return run_in_runtime("rsrv.gpu", json.dumps({key: getattr(options, key) for key in keys}))


def _print_completion(shell: str) -> int:
    """Carry out `rsrv completion`, and return its exit status."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        print(
            f"rsrv completion: argcomplete is not installed; run {install_command('bundles')}",
            file=sys.stderr,
        )
        return 1
    print(shellcode(COMMANDS, shell=shell))
    return 0


#: The commands by their purpose, in the order of the help.
_GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "serve": ("serve", "openai", "check-triton", "triton", "gpu", "gateway"),
    "see what a server does": ("status", "top", "watch", "health", "memory", "load", "placement"),
    "find out why": ("doctor", "why", "history", "timeline", "profile"),
    "models and their weights": (
        "alias",
        "prefetch",
        "evict",
        "pin",
        "unpin",
        "residency",
        "reload",
        "compact",
    ),
    "requests and their order": ("policy", "scheduler", "pause", "continue", "abort"),
    "devices": ("restart", "sleep", "wake"),
    "send requests": ("infer", "map"),
    "recorded traffic": ("record", "replay", "plan"),
    "about this command": ("help", "version", "completion"),
}


def parser() -> CommandParser:
    top = CommandParser(
        prog="rsrv",
        description="Serve bundles, and show and control a server. Without a command, show the server that runs on this machine.",
        epilog=EXIT_STATUS,
    )
    top.add_version()
    top.command_groups = _GROUPS
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    top.set_defaults(command="status", model="", watch=False, bare=True)

    def command(name: str, help: str, *aliases: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, aliases=aliases)
        _add_connection(added, "server", "control.listen", hidden=True)
        # Set the command's full name, because argparse would store the alias by which the command was called.
        added.set_defaults(command=name, bare=False)
        return added

    status = command("status", "the server and its models, or the details of one model", "ls")
    status.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="name, or a pattern with * and ?"
    )
    status.add_argument("--watch", action="store_true", help="show it again every 2 seconds, until Ctrl-C")
    doctor = command("doctor", "what is wrong or could be better, why, and what to do")
    doctor.add_argument(
        "--url",
        help="show instead whether large requests from here to this server use shared memory, and why not; "
        "HOST:PORT of gRPC, or http://HOST:PORT",
    )
    health = command("health", "check whether the server, or a model, can serve")
    health.add_argument("model", nargs="?", default="", metavar="MODEL")
    command("memory", "what uses the memory of the devices and the host, and what models share")
    command("load", "the requests that wait, and the time that they will take")
    history = command("history", "what happened to a model recently, and why; newest last")
    history.add_argument("model", metavar="MODEL")
    history.add_argument("--follow", action="store_true", help="also print new events, until Ctrl-C")
    why = command("why", "why a request took so long, or is still not answered")
    why.add_argument(
        "request",
        nargs="?",
        default="",
        metavar="REQUEST",
        help="the request's id from the client, or its number",
    )
    why.add_argument(
        "--slowest", metavar="MODEL", help="list this model's slowest requests, with their numbers"
    )
    timeline = command("timeline", "the device's recent work, as a trace for Perfetto or chrome://tracing")
    timeline.add_argument("--seconds", type=_seconds, default=30.0, metavar="S", help="default: %(default)g")
    timeline.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    record = command(
        "record", "record the arriving requests, without their contents, for rsrv-sim, replay and plan"
    )
    record.add_argument("output", type=Path, metavar="OUT.csv", help="the models are written to OUT.yaml")
    record.add_argument("--seconds", type=_seconds, metavar="S", help="default: until Ctrl-C or SIGTERM")
    command("top", "the live page in the terminal, until Ctrl-C")
    command("watch", "the models' states, and each change until Ctrl-C")

    pin = command("pin", "keep a model's weights on the device")
    pin.add_argument("model", metavar="MODEL")
    pin.add_argument("--wait", action="store_true", help="return when the weights are on the device")
    unpin = command("unpin", "keep a model's weights in host memory, and on the device on demand")
    unpin.add_argument("model", metavar="MODEL")
    residency = command("residency", "set where a model's weights are always kept")
    residency.add_argument("model", metavar="MODEL")
    residency.add_argument("residency", choices=("unpinned", "system", "device"))
    prefetch = command(
        "prefetch",
        "load a model's weights before its requests arrive, but after the weights that requests wait for",
    )
    prefetch.add_argument("model", nargs="*", metavar="MODEL", help="with --warm, also a pattern: 'team-a-*'")
    prefetch.add_argument("--warm", action="store_true", help="start cold models; returns when they are warm")
    prefetch.add_argument("--all", action="store_true", help="with --warm: all models")
    prefetch.add_argument("--wait", action="store_true", help="return when the weights are on the device")
    evict = command("evict", "evict weights that are not pinned")
    _target(evict)
    _add_device(prefetch, "the devices where placement puts the model")
    _add_device(evict, "all")
    placement = command("placement", "show on which devices models run, why, and what would move next")
    placement.add_argument(
        "--dry-run", action="store_true", help="pack all models with the changes below, and change nothing"
    )
    placement.add_argument(
        "--without-device",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="as if this device did not exist",
    )
    placement.add_argument(
        "--without-model", action="append", default=[], metavar="NAME", help="as if this model did not exist"
    )
    placement.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="NAME:BYTES:UTIL",
        help="with a further model: bytes of its weights, such as 2GB, and device seconds per second",
    )
    command("compact", "evict all weights that are not pinned, and load them again without gaps")

    policy = command("policy", "set a model's share of the device, and its queue")
    policy.add_argument("model", metavar="MODEL")
    policy.add_argument("--weight", type=float, metavar="W", help="share relative to other models")
    policy.add_argument(
        "--max-delay-us",
        type=_microseconds,
        metavar="TIME",
        help="time to wait for more requests of a batch, such as 5ms; a number without a unit is in microseconds",
    )
    policy.add_argument("--max-queue-depth", type=int, metavar="N", help="requests that may wait")
    scheduler = command("scheduler", "show or change the scheduler's settings")
    scheduler.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="as in rsrv.yaml")

    alias = command("alias", "show the aliases, or point one at other models")
    alias.add_argument("name", nargs="?", default="", metavar="ALIAS")
    alias.add_argument(
        "targets",
        nargs="*",
        default=[],
        metavar="MODEL[=WEIGHT]",
        help="the models that share the alias's requests; =shadow: the model gets copies of them",
    )
    alias.add_argument("--remove", action="store_true", help="remove the alias")

    pause = command("pause", "stop executing for a while")
    _target(pause)
    pause.add_argument(
        "--mode",
        choices=("drain", "hold", "reject"),
        default="hold",
        help="drain: new requests are refused; hold (default): all wait; reject: all are refused",
    )
    _target(command("continue", "end a pause", "resume"))
    abort = command("abort", "cancel waiting requests by their client's id")
    abort.add_argument("id", metavar="ID")

    reload = command("reload", "load a model's bundle as it is now; return when it is served")
    reload.add_argument("model", metavar="MODEL")
    restart = command(
        "restart", "replace the runtimes, so that rsrv.yaml and the installed packages are read again"
    )
    sleep = command("sleep", "free the devices' memory for other programs; the next request wakes them")
    for subcommand, force in (
        (restart, "at the limit, restart although work is unfinished; that work begins again"),
        (
            sleep,
            "at the limit, sleep although work is unfinished; requests that wait wake the device at once",
        ),
    ):
        _add_device(subcommand, "all, one after another")
        subcommand.add_argument(
            "--drain",
            type=_seconds,
            default=30.0,
            metavar="S",
            help="limit of executions and runs of meta models in progress; default: %(default)g",
        )
        subcommand.add_argument("--force", action="store_true", help=force)
    _add_device(command("wake", "start sleeping devices again"), "all")
    profile = command("profile", "record a profile of the runtime and its device")
    profile.add_argument("action", nargs="?", choices=("start", "stop"))
    profile.add_argument("--seconds", type=_seconds, metavar="S", help="start, and stop after this time")
    _add_serve(commands)
    _add_data(commands)
    _add_openai(commands)
    help = "send the requests of a trace to a server at their recorded times, and report the outcomes"
    replay = commands.add_parser("replay", help=help, description=help)
    replay.add_argument(
        "trace", type=Path, metavar="TRACE.csv", help="made by rsrv record, or with columns t,model,rows,..."
    )
    replay.add_argument(
        "--url", default="localhost:8001", metavar="HOST:PORT", help="Triton's gRPC; default: %(default)s"
    )
    replay.add_argument(
        "--speed", type=_factor, default=1.0, metavar="F", help="how many times as fast; default: %(default)g"
    )
    replay.add_argument(
        "--inputs",
        type=_named_file,
        action="append",
        default=[],
        metavar="MODEL=FILE.npz",
        help="a row of each input of a model whose shapes or texts cannot be guessed; default: zeros",
    )
    replay.add_argument(
        "--fit",
        action="store_true",
        help="write to TRACE.yaml the time that answers took outside the runtime (front_s), for rsrv plan and later replays",
    )
    replay.add_argument(
        "--out", type=Path, metavar="DIR", help="write latency.png to DIR: measured and simulated latencies"
    )
    replay.add_argument("--json", action="store_true", help="print the report as JSON, for programs")
    help = "how many more models, how small a budget, how few cards and which batch sizes meet a goal, by simulation"
    plan = commands.add_parser("plan", help=help, description=help)
    plan.add_argument(
        "trace",
        type=Path,
        metavar="TRACE.csv",
        help="made by rsrv record, with its TRACE.yaml in the same folder",
    )
    plan.add_argument(
        "--p99",
        type=_latency,
        required=True,
        metavar="TIME",
        help="goal for the p99 latency of all requests, such as 50ms or 2s",
    )
    plan.add_argument("--json", action="store_true", help="print the answers as JSON, for programs")
    help = "install a tritonserver for this user"
    triton = commands.add_parser("triton", help=help, description=help)
    verbs = triton.add_subparsers(dest="verb", metavar="COMMAND", required=True, title="commands")
    help = "fetch tritonserver 24.10, its Python backend and perf_analyzer (100 MB; Linux on x86-64)"
    install = verbs.add_parser("install", help=help, description=help)
    help = (
        "run pip in the Python of the stubs, where hooks run, such as rsrv triton pip install opencv-python"
    )
    pip = verbs.add_parser("pip", help=help, description=help)
    pip.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="an argument for pip")
    for verb in (install, pip):
        verb.add_argument("--dir", type=Path, metavar="DIR", help="default: in the user's cache")
    help = "check in a minute whether rsrv works with the tritonserver of this machine, on the CPU and without bundles"
    check_triton = commands.add_parser("check-triton", help=help, description=help)
    _add_tritonserver(check_triton)
    help = "the GPU of this machine"
    gpu = commands.add_parser("gpu", help=help, description=help)
    verbs = gpu.add_subparsers(dest="verb", metavar="COMMAND", required=True, title="commands")
    help = "tune models on the GPU, for `rsrv-gen --compile-for FILE` on other machines; no server may hold the GPU's memory"
    profile = verbs.add_parser("profile", help=help, description=help)
    profile.add_argument(
        "repository", metavar="GEN", type=Path, help="the model repository that rsrv-gen made"
    )
    profile.add_argument("file", metavar="FILE", type=Path, help="the file to write, such as h100.profile")
    help = "check and measure rsrv on the GPU in ten minutes; no server may hold the GPU's memory meanwhile"
    check = verbs.add_parser("check", help=help, description=help)
    check.add_argument(
        "bundles", metavar="BUNDLES", nargs="*", help="bundles, or folders of them; default: the demo's"
    )
    check.add_argument(
        "--models",
        metavar="FOLDER",
        help="folder with the bundles resnet18, vit_tiny and minilm_encoder of `make bundles`, for part models",
    )
    check.add_argument(
        "--parts",
        metavar="LIST",
        type=_parts,
        help=f"some of {', '.join(PARTS)}, separated by commas; default: all",
    )
    check.add_argument(
        "--minutes",
        metavar="N",
        type=_minutes,
        default=10.0,
        help="time for all parts; a part that does not fit is not run; default: 10",
    )
    check.add_argument(
        "--quick", action="store_true", help="use small amounts, only to see that every part works"
    )
    check.add_argument("--cpu", action="store_true", help="use the CPU, with small amounts")
    check.add_argument(
        "--json", metavar="FILE", help="also write all figures to FILE, again after each new figure"
    )
    help = "several servers behind one endpoint"
    gateway = commands.add_parser("gateway", help=help, description=help)
    _add_gateway(gateway)
    help = 'print a script that completes all of rsrv\'s commands: eval "$(rsrv completion bash)"'
    completion = commands.add_parser("completion", help=help, description=help)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    help = "the help of a command, as its --help"
    described = commands.add_parser("help", help=help, description=help)
    described.add_argument("words", nargs="*", metavar="COMMAND")
    help = "rsrv's version, as --version"
    commands.add_parser("version", help=help, description=help)
    # Add these options last, so that their help is below the commands.
    _add_connection(top, "server", "control.listen")
    return top


def _add_data(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    help = "send one request, and print the model's outputs"
    infer = commands.add_parser("infer", help=help, description=help)
    infer.add_argument("model", metavar="MODEL")
    infer.add_argument(
        "inputs",
        nargs="+",
        type=_named_value,
        metavar="NAME=VALUE",
        help="a file .npy, numbers such as [[1, 2]], a text, or another file for an input of bytes",
    )
    infer.add_argument(
        "--parameter",
        action="append",
        default=[],
        type=_named_value,
        metavar="NAME=VALUE",
        help="a parameter of the request, such as max_tokens=40",
    )
    infer.add_argument("--out", type=Path, metavar="FILE.npz", help="write the outputs to this file")
    infer.add_argument("--json", action="store_true", help="print the outputs as JSON, for programs")
    help = "send all rows of a file, and write the answers to another file"
    map_ = commands.add_parser("map", help=help, description=help)
    map_.add_argument("model", metavar="MODEL")
    map_.add_argument(
        "rows",
        type=Path,
        metavar="ROWS",
        help="a file .npy, .npz, .parquet or .txt (a text per line), or a folder (a row per file)",
    )
    map_.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="a file .npy or .parquet")
    map_.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="write only this output; default: all"
    )
    map_.add_argument("--resume", action="store_true", help="continue an interrupted run, if there is one")
    map_.add_argument(
        "--rows-per-request",
        type=_positive,
        metavar="N",
        help="default: the largest number that the model accepts",
    )
    map_.add_argument(
        "--in-flight",
        type=_positive,
        metavar="N",
        help="concurrent requests; default: increased while the throughput grows",
    )
    for subcommand in (infer, map_):
        subcommand.add_argument(
            "--url",
            default="localhost:8001",
            help="HOST:PORT of gRPC, or http://HOST:PORT; default: %(default)s",
        )
        subcommand.add_argument(
            "--timeout",
            type=_seconds,
            default=60.0,
            metavar="S",
            help="for each request; default: %(default)g",
        )
        subcommand.add_argument(
            "--token-file", type=Path, metavar="FILE", help="file with the token of a gateway"
        )
        subcommand.add_argument(
            "--tls-ca", type=Path, metavar="FILE", help="use TLS; trust these authorities (PEM)"
        )


def _add_serve(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    help = "serve bundles on this machine, and follow their changes, until Ctrl-C"
    serve = commands.add_parser("serve", help=help, description=help)
    sources = serve.add_mutually_exclusive_group()
    sources.add_argument(
        "bundles",
        metavar="BUNDLES",
        nargs="*",
        type=Path,
        default=[],
        help="a directory of bundles, or a bundle",
    )
    sources.add_argument(
        "--demo",
        action="store_true",
        help="serve seven small models that come with rsrv, copied to DIR/bundles, with a budget too small for all of them",
    )
    serve.add_argument(
        "--hf",
        metavar="MODEL",
        nargs="+",
        type=Path,
        default=[],
        help="directories of Hugging Face, exported to DIR/hf first; needs the extra export-hf",
    )
    serve.add_argument("--config", metavar="FILE", type=Path, help="settings (rsrv.yaml); default: none")
    serve.add_argument(
        "--devices",
        metavar="LIST",
        type=_devices,
        help="numbers, UUIDs or cpu, separated by commas (runtime.devices)",
    )
    serve.add_argument(
        "--host",
        metavar="IP",
        type=_ip_address,
        default=LOOPBACK,
        help="address of this machine for clients and metrics; 0.0.0.0: all addresses; default: %(default)s",
    )
    for kind, port in DEFAULT_PORTS.items():
        serve.add_argument(
            f"--{kind}-port", type=int, default=port, metavar="PORT", help="default: %(default)d"
        )
    serve.add_argument(
        "--directory",
        metavar="DIR",
        type=Path,
        default=Path(".rsrv"),
        help="folder for the generated repository and the log, on the bundles' file system; default: %(default)s",
    )
    _add_tritonserver(serve)
    serve.add_argument(
        "--client-shm",
        action="store_true",
        help="let clients register shared memory, as perf_analyzer --shared-memory does; only for clients that you trust",
    )
    add_compile_for(serve)
    serve.add_argument(
        "--drain",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="limit of requests in flight when the server stops; default: %(default)g",
    )
    serve.add_argument(
        "--log", metavar="FILE", type=Path, help="default: DIR/serve.log; -: standard output, for containers"
    )
    serve.add_argument("--dry-run", action="store_true", help="print the command, and run nothing")
    serve.epilog = "Words after -- are flags for tritonserver, which take precedence: rsrv serve bundles/ -- --log-verbose=1"


def _add_openai(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    help = "serve clients of OpenAI, Cohere and vLLM, in front of a server or a gateway, until Ctrl-C"
    openai = commands.add_parser("openai", help=help, description=help)
    openai.add_argument(
        "--server",
        metavar="HOST:PORT",
        default="127.0.0.1:8001",
        help="gRPC of the server or the gateway; default: %(default)s",
    )
    openai.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:8005", help="default: %(default)s"
    )
    openai.add_argument(
        "--keys",
        metavar="FILE",
        type=Path,
        help="the callers' keys; without it, the process listens only on addresses of this machine",
    )
    openai.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve the usage of keys and models at /metrics; default: nowhere",
    )
    openai.add_argument(
        "--operator-key",
        metavar="FILE",
        type=Path,
        help="the key with which `rsrv serve` lists its models (.rsrv/operator-key); without it, only models that clients have named are listed",
    )


def _add_gateway(gateway: argparse.ArgumentParser) -> None:
    commands = gateway.add_subparsers(
        dest="gateway_command", metavar="COMMAND", required=True, title="commands"
    )
    _add_connection(gateway, "gateway", "gateway.control_listen")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        _add_connection(added, "gateway", "gateway.control_listen", hidden=True)
        return added

    status = command("status", "workers, models and their placement; or one model")
    status.add_argument("model", nargs="?", default="", metavar="MODEL")
    health = command("health", "check whether the gateway, or a model, serves")
    health.add_argument("model", nargs="?", default="", metavar="MODEL")
    policy = command("policy", "show or change how models are packed and requests are routed")
    policy.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="as in rsrv.yaml; `default`: the value of rsrv.yaml"
    )
    place = command("place", "set the placement of one model, in place of earlier settings")
    place.add_argument("model", metavar="MODEL")
    place.add_argument(
        "--replicas", metavar="N", help="how many workers share the model's requests, or `auto` or `all`"
    )
    place.add_argument("--fill", choices=("least", "rr"), help="which replica is filled next")
    place.add_argument("--fill-factor", type=float, metavar="F", help="the quantum, in largest executions")
    place.add_argument("--unknown", action="store_true", help="set it also if no worker serves the model yet")
    repack = command("repack", "pack all models again")
    repack.add_argument(
        "--no-wait", action="store_true", help="return at once, not when the models are packed"
    )
    locate = command("locate", "the workers to send a model's requests to, the best first")
    locate.add_argument("model", metavar="MODEL")


def _add_connection(parser: argparse.ArgumentParser, kind: str, listen: str, *, hidden: bool = False) -> None:
    """Add the connection options, which all commands for a server or a gateway have.

    If `hidden` is True, the command's help does not list these options, but names the help that lists them.
    """
    group = parser.add_argument_group("connection")
    if hidden:
        page = "rsrv --help" if kind == "server" else "rsrv gateway --help"
        parser.epilog = f"`{page}` lists --json, --server, --timeout, and the options for TLS and tokens."

    def option(name: str, help: str, **how: Any) -> None:
        group.add_argument(name, help=argparse.SUPPRESS if hidden else help, default=argparse.SUPPRESS, **how)

    option("--json", "print the answer as JSON, for programs", action="store_true")
    where = "FOLDER of its settings" if kind == "gateway" else "PORT or FOLDER of its models"
    option("--server", f"the {kind}: {where}; unix:PATH; or HOST:PORT of {listen}", metavar="WHICH")
    option("--timeout", "seconds to wait for an answer", type=_seconds, metavar="S")
    option("--token-file", "file with the token that HOST:PORT requires", type=Path, metavar="FILE")
    option("--tls", "use TLS; trust the system's authorities", action="store_true")
    option("--tls-ca", "use TLS; trust these authorities", type=Path, metavar="PEM")
    option("--tls-cert", "this client's certificate", type=Path, metavar="PEM")
    option("--tls-key", "the key of this client's certificate", type=Path, metavar="PEM")


def _add_device(to: argparse.ArgumentParser, default: str) -> None:
    to.add_argument(
        "--device",
        type=int,
        action="append",
        metavar="N",
        help=f"a device's number; may be repeated (default: {default})",
    )


def _add_tritonserver(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--tritonserver",
        metavar="PROGRAM",
        help="default: the first found on PATH, in NVIDIA's folder, or from `rsrv triton install`",
    )


def _target(of: argparse.ArgumentParser) -> None:
    which = of.add_mutually_exclusive_group(required=True)
    which.add_argument("model", nargs="?", metavar="MODEL")
    which.add_argument("--all", action="store_true", help="all models")


def _parts(text: str) -> list[str]:
    for word in (words := text.split(",")):
        if word not in PARTS:
            raise argparse.ArgumentTypeError(f"there is no part {word!r}{nearest(word, PARTS)}")
    return words


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if 0 < (minutes := float(text)) < math.inf:
            return minutes
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes")


def _latency(text: str) -> float:
    if text[-1:].isalpha():
        return _seconds(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a time, such as 50ms or 2s")


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _named_file(text: str) -> tuple[str, str]:
    name, _, file = text.partition("=")
    if not (name and file):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL=FILE.npz")
    return name, file


def _named_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _devices(text: str) -> str | list[int | str]:
    if text == "all":
        return text
    words = [word.strip() for word in text.split(",") if word.strip()]
    return [int(word) if word.isdecimal() else word for word in words]


def _ip_address(text: str) -> str:
    try:
        return str(ip_address(bare(LOOPBACK if text == "localhost" else text)))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an IP address, such as 127.0.0.1, 0.0.0.0 (all IPv4 addresses) or ::"
        ) from None


def _microseconds(text: str) -> int:
    try:
        value = parse_time(text, "us")
    except ValueError:
        value = -1.0
    if value < 0 or not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in whole microseconds, such as 5ms or 500")
    return int(value)


def _seconds(text: str) -> float:
    try:
        value = parse_time(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0, such as 30, 500ms or 5m")
    return value


if __name__ == "__main__":
    sys.exit(main())
