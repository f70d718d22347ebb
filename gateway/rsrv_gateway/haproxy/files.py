"""Where the plane's files and sockets are: all in one directory that only this user can enter."""

from pathlib import Path


class Files:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.configuration = directory / "haproxy.cfg"
        #: the gateway's certificate chain and its key; and those that workers are shown
        self.certificate = directory / "gateway.pem"
        self.worker_certificate = directory / "worker.pem"
        #: where each model goes, the replicas of those that have several, and the names of who is in the slots
        self.routes = directory / "routes.map"
        self.turns = directory / "turns.map"
        self.names = directory / "names.map"
        #: HAProxy's admin socket, and the one on which it tells what became of requests
        self.admin = directory / "admin.sock"
        self.told = directory / "told.sock"
        #: where the plane behind listens
        self.rest_grpc = directory / "rest-grpc.sock"
        self.rest_http = directory / "rest-http.sock"

    def remove(self) -> None:
        """All but the directory; keys are among them."""
        for path in vars(self).values():
            if path != self.directory:
                path.unlink(missing_ok=True)
