"""The private directory of a runtime: its owner, and the removal of directories of ended servers."""

import os
import socket
from pathlib import Path

import pytest

from rsrv.wire import paths
from rsrv.wire.frames import MAX_FRAME, ProtocolError
from rsrv.wire.socket import Closed, NoDescriptors, Receiver, connect, lacks_descriptors, listen, send
from tests.held import open_files


def test_the_directory_is_private(tmp_path: Path) -> None:
    """The directory of the socket is accessible to this user only."""
    directory = tmp_path / "base" / "one"

    paths.make_private(directory)
    paths.make_private(directory)

    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """A directory that other users may enter is refused, because another user may have made it and may listen in it."""
    (tmp_path / "open").mkdir(mode=0o755)

    with pytest.raises(paths.RuntimeDirectoryError, match="mode 0700"):
        paths.make_private(tmp_path / "open")


def test_a_link_in_the_directorys_place_is_refused(tmp_path: Path) -> None:
    """A symbolic link in place of the directory is refused, because it may point to any directory."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(paths.RuntimeDirectoryError):
        paths.make_private(tmp_path / "link")


def test_leftovers_of_dead_servers_are_swept_and_the_living_kept(tmp_path: Path) -> None:
    """Directories of ended servers are removed, and those of running servers and of other programs stay.

    If a new process has the pid of an ended server, its start time is another one, so the server's directory is removed.
    """
    alive = tmp_path / f"{os.getpid()}-{paths.start_time(os.getpid())}-gpu0"
    reused = tmp_path / f"{os.getpid()}-1-gpu0"
    dead = tmp_path / "4194303-77-gpu0"
    foreign = tmp_path / "something-else-gpu0"
    for directory in (alive, reused, dead, foreign):
        directory.mkdir()
        (directory / paths.LOCK).touch()

    paths.sweep(tmp_path)

    assert sorted(tmp_path.iterdir()) == sorted([alive, foreign])


def test_every_file_of_a_dead_server_is_swept(tmp_path: Path) -> None:
    """All files in the directory of an ended server are removed.

    They include reasons of failed starts, and files that were only partly written.
    """
    dead = tmp_path / "4194303-77-gpu0"
    dead.mkdir()
    texts = {text for key, text in vars(paths).items() if key.isupper() and isinstance(text, str)}
    names = texts - {paths.NOT_PRIVATE}
    assert {paths.SOCKET, paths.FAILURE, paths.NO_DEVICE, paths.MODULES} < names
    for name in names - {paths.COMPILED}:
        (dead / name).touch()
    (dead / paths.COMPILED).mkdir()
    (dead / paths.COMPILED / "k-checked").touch()
    for name in (paths.NO_DEVICE, paths.OVERRIDES, paths.DEATHS, paths.DEVICES, paths.PLACEMENT):
        (dead / f"{name}.new").touch()

    paths.sweep(tmp_path)

    assert not dead.exists()


def test_a_directory_has_one_runtime_and_is_not_swept_under_it(tmp_path: Path) -> None:
    """Only one runtime can hold the lock of a directory. While it holds the lock, the directory is not removed.

    This matters if no process has the server's pid, for example because the server is in another container.
    """
    directory = tmp_path / "4194303-77-gpu0"
    directory.mkdir()
    claim = paths.hold(directory)
    assert claim is not None

    assert paths.hold(directory) is None
    paths.sweep(tmp_path)
    assert directory.exists()

    os.close(claim)
    paths.sweep(tmp_path)
    assert not directory.exists()


def test_frames_pass_the_socket_whole_with_their_descriptors(tmp_path: Path) -> None:
    """One call of `send` is received as one frame with its descriptors, at any size up to the limit."""
    listener = listen(tmp_path / "s")
    client = connect(tmp_path / "s")
    server, _ = listener.accept()
    receiver = Receiver(server)
    big = os.urandom(MAX_FRAME)

    send(client, b"small", [client.fileno()])
    frame, fds = receiver.receive()
    assert (bytes(frame), len(fds)) == (b"small", 1)
    os.close(fds[0])
    send(client, big)
    assert bytes(receiver.receive()[0]) == big

    client.close()
    with pytest.raises(Closed):
        receiver.receive()
    with pytest.raises(Closed):
        send(server, b"to nobody")
    server.close()
    listener.close()


@pytest.mark.parametrize(("nbytes", "descriptors"), [(MAX_FRAME + 1, 0), (MAX_FRAME + 1, 1), (1, 5)])
def test_an_oversized_frame_is_a_protocol_error(nbytes: int, descriptors: int) -> None:
    """A frame with too many bytes or descriptors raises ProtocolError. It is never read as a shorter frame.

    Its descriptors are closed.
    """
    sender, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sender, peer:
        before = open_files()
        socket.send_fds(sender, [b"x" * nbytes], descriptors * [sender.fileno()])
        with pytest.raises(ProtocolError, match="larger than"):
            Receiver(peer).receive()
        assert open_files() <= before


def test_a_lack_of_descriptors_is_no_fault_of_the_peer(few_descriptors: list[int]) -> None:
    """If this process may open no more files, the kernel drops the descriptors of a received frame.

    The error names the limit of open files, and does not blame the peer.
    """
    assert few_descriptors
    first, second = few_descriptors.pop(), few_descriptors.pop()
    os.close(first)
    os.close(second)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        send(left, b"frame", [left.fileno()])
        with pytest.raises(NoDescriptors, match="has reached its limit of open files") as failed:
            Receiver(right).receive()
    assert lacks_descriptors(failed.value)


def test_frames_of_a_peer_that_ended_with_frames_unread_arrive() -> None:
    """Frames that a peer sent before its end are received, although the kernel reports the end first."""
    sender, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sender, peer:
        receiver = Receiver(peer)
        send(peer, b"unread")
        send(sender, b"answer")
        sender.close()

        assert bytes(receiver.receive()[0]) == b"answer"
        with pytest.raises(Closed):
            receiver.receive()
