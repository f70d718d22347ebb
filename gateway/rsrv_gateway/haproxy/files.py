"""Where the plane's files and sockets are: all in one directory that only this user can enter."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Files:
    directory: Path

    @property
    def configuration(self) -> Path:
        return self.directory / "haproxy.cfg"

    @property
    def certificate(self) -> Path:
        """The gateway's certificate chain and its key."""
        return self.directory / "gateway.pem"

    @property
    def worker_certificate(self) -> Path:
        """What workers are shown, and its key."""
        return self.directory / "worker.pem"

    @property
    def admin(self) -> Path:
        """HAProxy's admin socket."""
        return self.directory / "admin.sock"

    @property
    def told(self) -> Path:
        """The socket on which HAProxy says what became of each request."""
        return self.directory / "told.sock"

    @property
    def routes(self) -> Path:
        return self.directory / "routes.map"

    @property
    def turns(self) -> Path:
        return self.directory / "turns.map"

    @property
    def names(self) -> Path:
        """A map of slots to the names that their certificates must bear."""
        return self.directory / "names.map"

    @property
    def rest_grpc(self) -> Path:
        """Where the plane behind listens."""
        return self.directory / "rest-grpc.sock"

    @property
    def rest_http(self) -> Path:
        return self.directory / "rest-http.sock"
