"""The text of haproxy.cfg. Pure: what it says of workers is what holds at the start; later the admin socket changes that.

A frontend for each protocol finds the model of a request, and the maps tell where its requests go:

- gRPC: the first field of the message is the model's name. HAProxy holds the first 15 kB of a message at most, so the
  converter must be content with that (`protobuf`; `ungrpc` wants the whole message);
- HTTP: the model's name is in the path.

What cannot be read so, or is unusual, goes to the plane behind. So do requests of a sequence, which must meet in one
worker, and those whose parameters HAProxy does not hold to their end: they may name a sequence.

Each worker has a slot, which is a server of the same name in the backend of each protocol. Slots without a worker are in
maintenance. Whether a worker lives is told by calling a method that it does not have: the refusal shows that its gRPC
front end works. `/v2/health/ready` tells something else, as it is false while one of the models loads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.haproxy.files import Files
from rsrv_gateway.http_outcomes import STATUSES
from rsrv_gateway.outcomes import MEANT

GRPC_WORKERS = "grpc_workers"
HTTP_WORKERS = "http_workers"

#: nearly the longest that HAProxy can wait
_FOR_EVER = "24d"
#: after which a peer that acknowledges nothing is gone
_SILENCE = "20s"
#: bytes of a gRPC message in which parameters are looked for: twice as many digits still fit into a buffer
_FRONT = 8000
#: of the largest message, where there is no limit of our own
_ANY_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Target:
    """A worker's addresses, resolved."""

    grpc: tuple[str, int]
    http: tuple[str, int] | None = None
    #: what its certificate must bear; None: it shows none, or is known by an address only
    name: str | None = None


def configuration(
    section: GatewaySection,
    files: Files,
    slots: Sequence[str],
    targets: Mapping[str, Target],
    token: bytes | None = None,
) -> str:
    """`targets`: who is in which slot at the start. `token`: what clients must send in `authorization`, after `Bearer`."""
    parts = [_global(section, files, token), _defaults(section)]
    if section.grpc is not None:
        parts.append(_grpc_frontend(section, section.grpc, files))
    if section.http is not None:
        parts.append(_http_frontend(section, section.http, files))
    parts += [
        _grpc_workers(section, files, {slot: targets.get(slot) for slot in slots}),
        _http_workers(section, files, {slot: targets.get(slot) for slot in slots}),
        _part("backend turns", ["stick-table type string len 256 size 100k store gpc0"]),
        _part(
            "backend grpc_rest",
            [_refusal(503, 14, _ENDING), f"server gateway unix@{files.rest_grpc} proto h2"],
        ),
        _part("backend http_rest", [_failure(503, _ENDING), f"server gateway unix@{files.rest_http}"]),
    ]
    return "\n".join(parts)


_ENDING = "the gateway starts or ends: try again in a while"


def _global(section: GatewaySection, files: Files, token: bytes | None) -> str:
    lines = [
        f"stats socket unix@{files.admin} mode 600 level admin",
        "log ring@told format raw local0",
        # Another HAProxy on the same port would take some of the requests.
        "noreuseport",
        # After a soft stop, which also follows the gateway's death.
        f"hard-stop-after {_ms(section.drain_s)}",
        f"nbthread {section.processes}",
        "tune.h2.max-concurrent-streams 1000",
    ]
    if token is not None:
        lines.append(f"set-var proc.token bin({token.hex()})")
    if section.tls_certificate is not None:
        lines.append("ssl-default-bind-options ssl-min-ver TLSv1.2")
    if section.worker_ca is not None:
        lines.append("ssl-default-server-options ssl-min-ver TLSv1.2")
    told = [
        "format raw",
        "size 1048576",
        "maxlen 1024",
        "timeout connect 1s",
        f"timeout server {_FOR_EVER}",
        f"server gateway unix@{files.told}",
    ]
    return _part("global", lines) + "\n" + _part("ring told", told)


def _defaults(section: GatewaySection) -> str:
    connect = _ms(section.probe_timeout_s)
    lines = [
        "mode http",
        "log global",
        # As `told` reads it.
        'log-format "%[var(txn.model)] %s %ST %[var(txn.code)] %[date(0,us),sub(txn.start)] %ts"',
        f"timeout connect {connect}",
        f"timeout check {connect}",
        "timeout http-request 60s",
        # Clients keep their connections, and streams may be silent.
        f"timeout http-keep-alive {_FOR_EVER}",
        f"timeout client {_FOR_EVER}",
        # Of connections that are idle when it is told to end.
        "timeout client-fin 1s",
        f"timeout server {_FOR_EVER}",
        "option clitcpka",
        "option srvtcpka",
        "option abortonclose",
        # Where nothing was answered, another worker is asked; not a third, as a request may end whoever gets it.
        "retries 1",
        "option redispatch 1",
        "retry-on conn-failure empty-response",
    ]
    return _part("defaults", lines)


def _grpc_frontend(section: GatewaySection, address: str, files: Files) -> str:
    wait = section.request_timeout_s
    lines = [
        f"bind {_bind(section, files, address, 'h2')}",
        "http-request set-log-level silent",
        "acl infer path /inference.GRPCInferenceService/ModelInfer",
        # Until the message is complete, or as much of it is there as HAProxy holds.
        f"http-request wait-for-body time {_ms(wait)} if infer",
        "http-request set-var(txn.model) req.body,bytes(5),protobuf(1) if infer",
        # Parameters come before the first input: with that, all of them are there.
        f"acl read req.body,bytes(5,{_FRONT}),protobuf(5) -m found",
        f"acl parameters req.body,bytes(5,{_FRONT}),protobuf(4) -m found",
        # A search in the bytes themselves would end at the first zero.
        f"acl sequence req.body,bytes(5,{_FRONT}),hex -m sub {b'sequence_id'.hex().upper()}",
        *_routed(section, files, ["read !parameters", "read !sequence"], "req.body,bytes(1,4),hex,hex2i"),
        f"use_backend {GRPC_WORKERS} if {{ var(txn.route) -m found }}",
        "default_backend grpc_rest",
        _refusal(408, 4, f"the message did not arrive within {wait:g} s"),
    ]
    return _part("frontend grpc", lines)


def _http_frontend(section: GatewaySection, address: str, files: Files) -> str:
    lines = [
        f"bind {_bind(section, files, address, 'http/1.1')}",
        "http-request set-log-level silent",
        "acl infer path_reg ^/v2/models/[^/]+(/versions/[0-9]+)?/(infer|generate|generate_stream)$",
        f"http-request wait-for-body time {_ms(section.request_timeout_s)} if infer",
        "http-request set-var(txn.model) path,field(4,/) if infer",
        # Of the JSON, which is all of the body, or what this header says. Without a length, who knows.
        "http-request set-var(txn.json) req.hdr_val(content-length) if infer",
        "http-request set-var(txn.json) req.hdr_val(inference-header-content-length) if infer",
        "http-request set-var(txn.held) req.body_len if infer",
        "acl read var(txn.json),sub(txn.held) le 0",
        "acl compressed req.hdr(content-encoding) -m found",
        "acl sequence req.body -m sub sequence_id",
        *_routed(section, files, ["read !compressed !sequence"], "req.hdr_val(content-length)"),
        f"use_backend {HTTP_WORKERS} if {{ var(txn.route) -m found }}",
        "default_backend http_rest",
    ]
    return _part("frontend http", lines)


def _routed(section: GatewaySection, files: Files, clear: Iterable[str], length: str) -> Iterable[str]:
    """Finds the route, for requests that may go to workers: of which one of `clear` holds. `length` is the message's."""
    also = ""
    if section.max_message_bytes < _ANY_SIZE:
        yield f"acl fits {length} le {section.max_message_bytes}"
        also += " fits"
    if section.token_file is not None:
        yield "acl bearer req.hdr(authorization) -m beg -i 'Bearer '"
        yield f"acl trusted req.hdr(authorization),bytes({len('Bearer ')}),secure_memcmp(proc.token) -m bool"
        also += " bearer trusted"
    condition = " or ".join(f"infer {one}{also}" for one in clear)
    yield f"http-request set-var(txn.route) var(txn.model),map({files.routes}) if {condition}"


def _grpc_workers(section: GatewaySection, files: Files, slots: Mapping[str, Target | None]) -> str:
    lines = [
        # A client that has set a deadline sees to it by itself.
        f"http-request set-timeout server {_FOR_EVER} if {{ req.hdr(grpc-timeout) -m found }}",
        *_choice(section, files),
        # Triton's refusals have no message, so that they are in the header and not in a trailer.
        "http-response set-var(txn.code) res.hdr(grpc-status)",
        "acl unavailable var(txn.code) -m str 14",
    ]
    for tag, code in MEANT.items():
        meant = f'if unavailable {{ res.hdr(grpc-message) -m sub "[rsrv:{tag}]" }}'
        lines.append(f"http-response set-header grpc-status {code.value[0]} {meant}")
    lines += [
        "http-response set-var(txn.code) res.hdr(grpc-status) if unavailable",
        _refusal(502, 14, _BROKEN),
        _refusal(503, 14, _UNREACHABLE),
        _refusal(504, 4, _late(section)),
        "option httpchk",
        "http-check send meth POST uri /rsrv.Health/Check ver HTTP/2 hdr host worker hdr content-type application/grpc hdr te trailers",
        "http-check expect status 200",
        f"default-server proto h2 tcp-ut {_SILENCE}{_tls(section, files, 'h2 check-alpn h2')}",
        f"default-server check inter {_ms(section.probe_s)} fall 3 rise 1",
    ]
    for slot, target in slots.items():
        lines.append(f"server {slot} {_where(None if target is None else target.grpc)}")
    return _part(f"backend {GRPC_WORKERS}", lines)


def _http_workers(section: GatewaySection, files: Files, slots: Mapping[str, Target | None]) -> str:
    lines = [
        *_choice(section, files),
        # Over HTTP, unlike gRPC, a refusal has a status that HAProxy looks at before it answers: the worker does not
        # have the model that it was asked for, as it is about to end.
        "retry-on conn-failure empty-response 404",
        # generate says 400 to any error of a model.
        "acl refused status 400 503",
        "http-response wait-for-body time 1s if refused",
    ]
    for tag, code in MEANT.items():
        meant = f'if refused {{ res.body -m sub "[rsrv:{tag}]" }}'
        lines.append(f"http-response set-status {STATUSES[code]} {meant}")
    lines.append("http-response set-header retry-after 1 if { status 429 }")
    lines += [
        _failure(502, _BROKEN),
        _failure(503, _UNREACHABLE),
        _failure(504, _late(section)),
        # Triton itself has no HTTPS; then something in front of it has, or requests go nowhere.
        *([f"default-server{_tls(section, files, 'http/1.1')}"] if section.worker_ca is not None else []),
    ]
    for slot, target in slots.items():
        where = _where(None if target is None else target.http)
        lines.append(f"server {slot} {where} track {GRPC_WORKERS}/{slot}")
    return _part(f"backend {HTTP_WORKERS}", lines)


_BROKEN = "the connection to the worker broke"
_UNREACHABLE = "no worker of this model can be reached: try again in a while"


def _late(section: GatewaySection) -> str:
    return f"no answer within {section.request_timeout_s:g} s"


def _choice(section: GatewaySection, files: Files) -> Iterable[str]:
    """The worker of a request whose model has a route."""
    yield "http-request set-log-level info"
    yield "http-request set-var(txn.start) date(0,us)"
    if section.token_file is not None:
        yield "http-request del-header authorization"
    yield f"timeout server {_ms(section.request_timeout_s)}"
    yield "acl turns var(txn.route) -m sub /"
    yield "http-request set-var(txn.worker) var(txn.route) if !turns"
    yield "http-request set-var(txn.replicas) var(txn.route),field(1,/) if turns"
    yield "http-request set-var(txn.quantum) var(txn.route),field(2,/) if turns"
    yield "http-request track-sc0 var(txn.model) table turns if turns"
    yield (
        "http-request set-var(txn.turn) "
        "sc_inc_gpc0(0),div(txn.quantum),mod(txn.replicas),concat(/,txn.model,) if turns"
    )
    yield f"http-request set-var(txn.worker) var(txn.turn),map({files.turns}) if turns"
    # If that one is down, or its name is *: of those that are up, the one with the fewest requests.
    yield "use-server %[var(txn.worker)] if { var(txn.worker) -m found }"
    # When a connection is refused, HAProxy asks another worker, but only after a second (or its timeout connect) unless
    # it takes turns or draws lots, and knows two workers that are up. So it draws twenty and takes the best, which hardly
    # ever leaves one of a few out, and a refusal alone does not mark a worker as down: the gateway takes it out.
    yield "balance random(20)"
    # Lots are drawn in parts of a circle, which are about equal when each worker has many.
    yield "default-server weight 16"


def _tls(section: GatewaySection, files: Files, protocols: str) -> str:
    if section.worker_ca is None:
        return ""
    shown = "" if section.worker_certificate is None else f" crt {files.worker_certificate}"
    # A worker that is known by its address only has no name, and then only its certificate's issuer counts.
    return (
        f" ssl verify required ca-file {_path(section.worker_ca)}{shown} alpn {protocols}"
        f" sni srv_name,map({files.names})"
    )


def _bind(section: GatewaySection, files: Files, address: str, protocol: str) -> str:
    socket = address.startswith("unix:")
    where = f"unix@{address.removeprefix('unix:')} mode 600" if socket else f"{address} tcp-ut {_SILENCE}"
    if section.tls_certificate is None:
        return f"{where} proto h2" if protocol == "h2" else where
    clients = section.tls_client_ca
    verified = "" if clients is None else f" ca-file {_path(clients)} verify required"
    return f"{where} ssl crt {files.certificate} alpn {protocol}{verified}"


def _where(address: tuple[str, int] | None) -> str:
    """Of a server. Slots that are free need an address, too."""
    if address is None:
        return "127.0.0.1:1 disabled"
    host, port = address
    return f"ipv6@[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refusal(status: int, code: int, message: str) -> str:
    """What a gRPC client gets instead of HAProxy's own answer with this status; `message` is ASCII."""
    return f'http-error status {status} hdr grpc-status {code} hdr grpc-message "{message}"'


def _failure(status: int, message: str) -> str:
    return f'http-error status {status} content-type application/json string \'{{"error":"{message}"}}\''


def _path(path: Path) -> str:
    return f"'{path.expanduser().absolute()}'"


def _ms(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _part(head: str, lines: Iterable[str]) -> str:
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"
