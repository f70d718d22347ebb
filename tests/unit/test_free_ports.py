"""Ports for the servers of tests and tools."""

from local_triton import free_ports


def test_no_port_is_given_twice_by_this_process_or_the_kernel() -> None:
    """Another socket must not get a port on which a server listens seconds later. Linux's own begin at 32768."""
    ports = free_ports(3) + free_ports(3)

    assert len(set(ports)) == 6
    assert max(ports) < 32_768
