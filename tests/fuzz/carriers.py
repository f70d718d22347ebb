"""Changes to the transport of a request: HTTP's lines, headers and encodings, and gRPC's calls, metadata and frames."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from functools import partial

from tests.fuzz.drafts import NOT_UTF8, Draft, Random, piece, text_bytes

TRACES = (
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-1-2-3", "00-" + "f" * 5000,
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-zz", "----",
)  # fmt: skip

# --- HTTP ---------------------------------------------------------------------------------------------------------

_PATHS = (
    "/", "*", "//v2", "/v2/", "/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/exact", "/v2/models/exact/infer/",
    "/v2/models/exact/versions/-1/infer", "/v2/models/exact/versions/" + "9" * 40 + "/infer", "/v2/models/../exact/infer",
    "/v2/models/%2e%2e/infer", "/v2/models/%00/infer", "/v2/models/%ff/infer", "/v2/models/%zz/ready", "/v2/models/ex act/infer",
    "/v2/models/exact/infer?" + "a=b&" * 500, "/v2/models/exact/infer#x", "/v2/models/" + "x" * 60_000 + "/infer", "/v2/models/\udcff/infer",
    "/v2/models/exact/generate", "/v2/models/exact/generate_stream", "/v2/models/exact/config", "/v2/models/stats", "/v2/health/ready",
    "/v2/repository/index", "/v2/repository/models/exact/unload", "/v2/repository/models/exact/load", "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/r/register", "/v2/cudasharedmemory/region/r/register", "/v2/logging", "/v2/trace/setting", "/metrics",
    "http://elsewhere/v2/models/exact/infer", "elsewhere:443", "/v2/models/exact\0/infer",
)  # fmt: skip
_METHODS = (
    b"GET",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"post",
    b"P\0ST",
    b"X" * 5000,
    b"",
)
_JUNK = (
    b"\r\n\r\n",
    b"\0" * 50,
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET\r\n\r\n",
    b"\xff\xfe",
)
_HEADERS = (
    (b"X-Junk", b"x" * 9000), (b"X-Huge", b"x" * 200_000), (b"X-Bytes", bytes(range(128, 256))), (b"X-Nul", b"a\0b"), (b"\xff", b"x"),
    (b"", b"x"), (b"no token", b""), (b"X-Folded", b"a\r\n b"), (b"Host", b""), (b"Connection", b"upgrade"), (b"Upgrade", b"h2c"),
    (b"Expect", b"100-continue"), (b"Expect", b"the worst"), (b"Accept-Encoding", b"gzip;q=nan, *;q=-1"), (b"Accept", b"\xff" * 50),
    (b"Authorization", b"Bearer " + b"x" * 5000), (b"Content-Type", b"\xc3\x28"), (b"rsrv_run", b"1"), (b"triton_grpc_error", b"true"),
    (b"Content-Length", b"-1"), (b"Content-Length", b"x"), (b"Content-Length", b"18446744073709551617"), (b"Content-Length", b"1, 2"),
    (b"Content-Length", b"9999999999"), (b"Content-Length", b"0"), (b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"x"),
)  # fmt: skip
_LENGTHS = (b"0", b"1", b"-1", b"9999", b"x", b"", b"18446744073709551616", b"1e3", b"4294967296")
#: Compress without a timestamp, so that the result depends only on the data.
_gzip = partial(gzip.compress, mtime=0)
_COMPRESSED: tuple[Callable[[bytes], bytes], ...] = (
    _gzip,
    zlib.compress,
    bytes,
    lambda body: _gzip(body)[:-9],
    lambda body: _gzip(body) + b"junk",
    lambda body: _gzip(bytes(8 << 20)),
    lambda body: _gzip(b"[" * 400 + b" " * (1 << 20)),
    lambda body: b"",
)


@piece("http")
def path(rng: Random, draft: Draft) -> None:
    draft.path, draft.method, draft.cut = text_bytes(rng.choice(_PATHS)), rng.choice((b"POST", b"GET")), True


@piece("http")
def method(rng: Random, draft: Draft) -> None:
    draft.method, draft.cut = rng.choice(_METHODS), True


@piece("http")
def junk_request_line(rng: Random, draft: Draft) -> None:
    junk = rng.choice(_JUNK)
    draft.damage, draft.cut = lambda data: junk + data, True


@piece("http")
def header(rng: Random, draft: Draft) -> None:
    for _ in range(rng.choice((1, 1, 3))):
        pair = rng.choice(_HEADERS)
        draft.headers += [pair] * rng.choice((1, 1, 2, 40 if len(pair[1]) < 1000 else 1))
    draft.cut = True


@piece("http")
def header_length(rng: Random, draft: Draft) -> None:
    draft.headers.append((b"Inference-Header-Content-Length", rng.choice(_LENGTHS)))


@piece()
def trace_header(rng: Random, draft: Draft) -> None:
    trace = rng.choice(TRACES)
    draft.headers.append((b"traceparent", trace.encode()))
    draft.metadata.append(("traceparent", trace))


@piece("http")
def not_utf8_trace_header(rng: Random, draft: Draft) -> None:
    """Send a trace header that is not UTF-8. With the flags of docs/monitoring.md, Triton passes the header on as a parameter."""
    draft.headers.append((b"traceparent", text_bytes(rng.choice(NOT_UTF8))))


@piece("http")
def compression(rng: Random, draft: Draft) -> None:
    draft.encode = rng.choice(_COMPRESSED)
    name = rng.choice((b"gzip", b"gzip", b"deflate", b"br", b"gzip, gzip", b"x" * 200, b"\xff"))
    draft.headers.append((b"Content-Encoding", name))


def _late(body: bytes) -> bytes:
    return b'{"x": "' + b"i" * 600_000 + b'", ' + body[1:]


#: Number of spellings at the beginning of _SPELLINGS that do not change the length of the JSON.
_SAME_LENGTH = 3
#: Ways to write JSON, with their Content-Encoding.
_SPELLINGS: tuple[tuple[Callable[[bytes], bytes], bytes], ...] = (
    (bytes, b"identity"),
    (_gzip, b"gzip"),
    (zlib.compress, b"deflate"),
    (lambda body: _gzip(_late(body)), b"gzip"),
    (_late, b"identity"),
    (lambda body: body.replace(b"e_", b"e\\u005F").replace(b"sha", b"sh\\u0061"), b"identity"),
    (lambda body: b"\xef\xbb\xbf \n" + body + b"\0 the end", b"identity"),
    (lambda body: _gzip(body) + _gzip(b"more"), b"deflate"),
    (lambda body: body.replace(b'{"', b'{"shape": [1], "sequence_id": 1, "', 1), b"identity"),
)


@piece("http")
def spelling(rng: Random, draft: Draft) -> None:
    """Write the JSON in another way that Triton accepts. If binary data follow it, the JSON must keep its length."""
    spell, name = rng.choice(_SPELLINGS[:_SAME_LENGTH] if draft.binary else _SPELLINGS)
    encode = draft.encode
    draft.encode = lambda body: spell(encode(body))
    draft.headers.append((b"Content-Encoding", name))


@piece("http")
def chunks(rng: Random, draft: Draft) -> None:
    """Send a body in a few chunks, some of them wrong. Thousands of chunks would harm Triton before 25.07 (CVE-2025-23310)."""
    wrong = rng.choice(
        (b"", b"-1\r\n", b"zz\r\nx\r\n", b"ffffffffffffffff\r\n", b"5;" + b"x" * 3000 + b"\r\nhello\r\n")
    )
    draft.encode = lambda body: b"%x\r\n%s\r\n" % (len(body), body) + b"1\r\n \r\n" * 9 + wrong + b"0\r\n\r\n"
    draft.headers.append((b"Transfer-Encoding", b"chunked"))
    draft.cut = True


# --- gRPC ---------------------------------------------------------------------------------------------------------

_CALLS = (
    "ModelStreamInfer", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex",
    "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings",
    "Nothing", "", "ModelInfer/", "../ModelInfer", "x" * 3000,
)  # fmt: skip
_METADATA: tuple[tuple[str, str | bytes], ...] = (
    ("x-junk", "x" * 7000), ("x-bin", bytes(range(256))), ("triton_grpc_error", "true"), ("rsrv_run", "1"), ("authorization", "Bearer x"),
    ("grpc-trace-bin", b"\xff" * 30), ("grpc-accept-encoding", "x"), ("content-length", "-1"), ("x-percent", "%ff%00%zz"),
)  # fmt: skip
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@piece("grpc")
def call(rng: Random, draft: Draft) -> None:
    draft.call = rng.choice(_CALLS)
    most = rng.choice((0, 40, None))
    draft.damage = lambda data: data[:most]


@piece("grpc")
def metadata(rng: Random, draft: Draft) -> None:
    draft.metadata += rng.choices(_METADATA, k=rng.choice((1, 2, 3)))


@piece("grpc")
def frames(rng: Random, draft: Draft) -> None:
    """Send HTTP/2 frames of any type, length and stream."""
    data = rng.choice((b"", _PREFACE, _PREFACE + b"\0\0\0\4\0\0\0\0\0", _PREFACE + b"\0\0\0\4\0\0\0\0\0"))
    for _ in range(rng.choice((1, 5, 40))):
        load = rng.randbytes(rng.choice((0, 4, 8, 60)))
        length = len(load) if rng.random() < 0.9 else rng.randrange(1 << 24)
        head = length.to_bytes(3, "big") + bytes((rng.choice((*range(11), 255)), rng.randrange(256)))
        data += head + rng.choice((0, 1, 2, 3, 2**31 - 1, 2**31)).to_bytes(4, "big") + load
    draft.damage, draft.cut, draft.h2 = lambda _: data, True, True
