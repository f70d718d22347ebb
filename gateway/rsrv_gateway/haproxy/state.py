"""What HAProxy is to know: as files for its start, and as commands while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rsrv_gateway.haproxy.admin import Admin
from rsrv_gateway.haproxy.config import GRPC_WORKERS, HTTP_WORKERS, Target
from rsrv_gateway.haproxy.files import Files
from rsrv_gateway.haproxy.maps import Maps, changes, commands, text

#: changes of the maps that are told one by one; of more, the whole maps are
_FEW = 300


@dataclass(frozen=True, slots=True)
class State:
    #: who is in which slot
    targets: Mapping[str, Target] = field(default_factory=dict)
    maps: Maps = field(default_factory=Maps)

    def servers(self) -> dict[str, tuple[str, int]]:
        """Addresses by BACKEND/SLOT."""
        grpc = {f"{GRPC_WORKERS}/{slot}": target.grpc for slot, target in self.targets.items()}
        http = {f"{HTTP_WORKERS}/{slot}": target.http for slot, target in self.targets.items()}
        return grpc | {server: address for server, address in http.items() if address is not None}

    def names(self) -> dict[str, str]:
        """What the certificate of who is in a slot must bear, where that is a name."""
        return {slot: target.name for slot, target in self.targets.items() if target.name is not None}


def write_maps(state: State, files: Files) -> None:
    files.routes.write_text(text(state.maps.routes))
    files.turns.write_text(text(state.maps.turns))
    files.names.write_text(text(state.names()))


async def tell(admin: Admin, files: Files, old: State, new: State) -> None:
    """Turn one state into the other while requests come: who joins is there before any are sent to it, and nobody goes
    while any are. Raises AdminError; then nobody knows which state holds."""
    before, after = old.servers(), new.servers()
    joined = {server: address for server, address in after.items() if before.get(server) != address}
    for server, (host, port) in joined.items():
        await admin.move(server, host, port)
    await admin.do(changes(old.names(), new.names(), files.names))
    await admin.do(f"set server {server} state ready" for server in joined)
    told = commands(old.maps, new.maps, files.routes, files.turns)
    if len(told) <= _FEW:
        await admin.do(told)
    else:
        await admin.replace(files.turns, new.maps.turns)
        await admin.replace(files.routes, new.maps.routes)
    await admin.do(f"set server {server} state maint" for server in before if server not in after)
