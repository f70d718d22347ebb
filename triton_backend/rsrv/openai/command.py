"""`rsrv openai`: its command line, its start and its end."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from aiohttp import web

from rsrv import logs
from rsrv.address import Address, parse_address
from rsrv.listening import KnownHosts
from rsrv.openai.app import Api
from rsrv.openai.catalog import TaskCatalog
from rsrv.openai.inference import Backend, Metadata
from rsrv.openai.keys import Keys, KeysError, read_keys
from rsrv.openai.port import OPERATOR, closed_reason
from rsrv.openai.usage import Usage
from rsrv.renewal import Renewals
from rsrv.settings import SettingsError, read_settings
from rsrv.text import os_error
from rsrv.tokens import TokenError, read_token
from rsrv.triton_command_line import OPERATOR_HEADER, restriction

log = logging.getLogger(__name__)

#: Seconds that calls in progress get before the process ends.
_DRAIN_S = 30.0
#: aiohttp logs requests that it cannot read, with parts of headers and bodies, such as keys. `Api` logs its own faults.
_SILENT = logging.getLogger(f"{__name__}.aiohttp")
_SILENT.setLevel(logging.CRITICAL)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal. Return the exit status, which is 0, or 1 if the server cannot start."""
    try:
        logs.setup(read_settings(None).logs.format)
        asyncio.run(_serve(options, _operator(options.operator_key)))
    except (KeysError, SettingsError, TokenError, ValueError) as error:
        print(f"rsrv openai: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"rsrv openai: {options.listen}: {os_error(error)}", file=sys.stderr)
        return 1
    return 0


def _operator(key_file: Path | None) -> Metadata:
    """Return the header that the server requires to list its models, or nothing. Raises TokenError."""
    if key_file is not None:
        return (restriction(OPERATOR_HEADER, read_token(key_file, "--operator-key").decode()),)
    # Remove the variable, so that the process of chat templates does not inherit it.
    name, _, value = os.environ.pop(OPERATOR, "").partition("=")
    return (restriction(name, value),) if name else ()


async def _serve(options: argparse.Namespace, operator: Metadata) -> None:
    where = parse_address(options.listen, any_host=True, any_port=True)
    if reason := closed_reason(options.listen, options.keys):
        raise KeysError(f"{reason}. Name a file of keys with --keys, or listen on 127.0.0.1")
    parse_address(options.server)
    renewals = Renewals()
    keys: Callable[[], Keys] | None = None
    if options.keys is not None:
        renewed = renewals.of("--keys", [options.keys], partial(read_keys, options.keys))
        keys = partial(getattr, renewed, "value")
    backend, usage = Backend(options.server, operator), Usage()
    catalog = TaskCatalog(backend)
    api = Api(backend, catalog, usage, keys)
    # With keys, requests from pages of other sites need no check: such a page has no key.
    app = api.application(*([] if keys else [KnownHosts(options.listen).middleware]))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        for work in (catalog.follow(), renewals.run()):
            stack.callback(asyncio.ensure_future(work).cancel)
        if options.metrics is not None:
            metrics = web.Application(middlewares=[KnownHosts(options.metrics).middleware])
            metrics.add_routes([web.get("/metrics", partial(_show_metrics, usage))])
            await listen(metrics, parse_address(options.metrics, any_port=True), stack)
        address = await listen(app, where, stack)
        log.info("serving http://%s/v1 for %s%s", address, options.server, "" if keys else ", without keys")
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()


async def listen(app: web.Application, where: Address, stack: AsyncExitStack) -> Address:
    """Serve an application until the stack ends, and return its address. Several processes may share a port. Raises OSError."""
    runner = web.AppRunner(
        app, access_log=None, logger=_SILENT, handler_cancellation=True, shutdown_timeout=_DRAIN_S
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    # For aiohttp, None means all addresses of IPv4 and IPv6.
    host = None if where.host in ("", "0.0.0.0", "::") else where.host
    site = web.TCPSite(runner, host, where.port, reuse_port=True, reuse_address=True)
    await site.start()
    return Address(where.host, runner.addresses[0][1])


async def _show_metrics(usage: Usage, _: web.Request) -> web.Response:
    return web.Response(
        body=usage.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )
