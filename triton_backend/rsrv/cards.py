"""Figures and profiles of GPUs, with which modules are compiled on machines without such a GPU. A profile is made on a GPU.

The figures of H100, A100 and B200 are from XLA's own target configurations (xla/backends/gpu/target_config/specs in
openxla/xla). The figures of L4 and T4, and all rates of tensor cores, are from NVIDIA's data sheets.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as XLA's compiler sees it."""

    #: Name that the driver reports. It equals jax's `device_kind`.
    kind: str
    capability: tuple[int, int]
    #: Number of streaming multiprocessors.
    cores: int
    #: Number of f32 units in each core.
    units: int
    clock_ghz: float
    memory_bytes: int
    #: Bandwidth of the device memory, in bytes per second.
    bandwidth: int
    l2_bytes: int
    #: Bytes of shared memory of a core.
    shared_bytes: int
    #: Bytes of a core's shared memory that one block of threads may take.
    block_bytes: int
    threads_per_core: int
    #: FLOP per second of dense products in TF32. None: the card has no TF32.
    tf32_rate: float | None

    @property
    def f32_rate(self) -> float:
        """FLOP per second of f32 outside of tensor cores."""
        return self.cores * self.units * 2 * self.clock_ghz * 1e9

    def seconds(self, flop: float, nbytes: float, kernels: int, *, tf32: bool) -> float:
        """Estimate the seconds of one execution. The estimate was never calibrated.

        It is the time for computing or for moving bytes, whichever is longer, plus the launches of the kernels.
        """
        rate = self.tf32_rate if tf32 and self.tf32_rate is not None else self.f32_rate
        return max(flop / rate, nbytes / self.bandwidth) + kernels * _KERNEL_S

    def target(self) -> str:
        """Return the card as text of XLA's GpuTargetConfigProto, as the versions in docker/requirements.txt expect it."""
        major, minor = self.capability
        # From compute capability 9.0 on, some instructions, such as wgmma, exist in only one generation of GPUs. Allow these.
        extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores}
  fpus_per_core: {self.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.block_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.kind}"
"""


CARDS = {
    "a100": Card(
        kind="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        units=64,
        clock_ghz=1.41,
        memory_bytes=85_100_068_864,
        bandwidth=2_039_040_000_000,
        l2_bytes=40 << 20,
        shared_bytes=164 << 10,
        block_bytes=163 << 10,
        threads_per_core=2048,
        tf32_rate=156e12,
    ),
    "b200": Card(
        kind="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        units=128,
        clock_ghz=1.965,
        memory_bytes=191_514_411_008,
        bandwidth=7_672_320_000_000,
        l2_bytes=132_644_864,
        shared_bytes=228 << 10,
        block_bytes=227 << 10,
        threads_per_core=2048,
        tf32_rate=1112e12,
    ),
    "h100": Card(
        kind="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        cores=132,
        units=128,
        clock_ghz=1.98,
        memory_bytes=84_942_979_072,
        bandwidth=3_352_320_000_000,
        l2_bytes=50 << 20,
        shared_bytes=228 << 10,
        block_bytes=227 << 10,
        threads_per_core=2048,
        tf32_rate=494e12,
    ),
    "l4": Card(
        kind="NVIDIA L4",
        capability=(8, 9),
        cores=58,
        units=128,
        clock_ghz=2.04,
        memory_bytes=23_572_185_088,
        bandwidth=300_096_000_000,
        l2_bytes=48 << 20,
        shared_bytes=100 << 10,
        block_bytes=99 << 10,
        threads_per_core=1536,
        tf32_rate=60e12,
    ),
    "t4": Card(
        kind="Tesla T4",
        capability=(7, 5),
        cores=40,
        units=64,
        clock_ghz=1.59,
        memory_bytes=15_655_829_504,
        bandwidth=320_064_000_000,
        l2_bytes=4 << 20,
        shared_bytes=64 << 10,
        block_bytes=64 << 10,
        threads_per_core=1024,
        tf32_rate=None,
    ),
}

#: Seconds that a GPU needs for each kernel in addition to its work.
_KERNEL_S = 3e-6
#: Version of the format of a profile's file.
_FORMAT = 1


class ProfileError(Exception):
    """A file is not a card's profile."""


@dataclass(frozen=True, slots=True)
class CardProfile:
    """A card, and the results of XLA's tuning of kernels on it."""

    #: Name that the driver reports.
    card: str
    #: CUDA compute capability.
    capability: str
    #: Versions of jax and its plugin.
    versions: str
    #: The card and its driver, as text of XLA's GpuTargetConfigProto.
    target: str
    #: Text of XLA's AutotuneResults.
    tuning: str

    @property
    def kernels(self) -> int:
        """Number of kernels whose tuning is known."""
        return self.tuning.count("\nresults {")


def write_profile(path: Path, profile: CardProfile) -> None:
    """Write a profile. Raises OSError."""
    path.write_text(json.dumps({"format": _FORMAT, **asdict(profile)}, indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> CardProfile:
    """Read a profile. Raises ProfileError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("another version of rsrv wrote it")
        profile = CardProfile(**content)
        if not all(isinstance(value, str) for value in content.values()):
            raise ValueError("its values are not all text")
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"{path} is not a profile of a card ({error}). Make one on the card's machine: rsrv gpu profile"
        ) from None
    return profile
