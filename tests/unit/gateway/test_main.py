"""The program: its command line, its settings, its life and its end."""

import asyncio
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from local_triton import free_ports
from rsrv.settings import SettingsError
from rsrv_gateway.main import read
from rsrv_gateway.members import MembersError
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc
from tests.unit.gateway.test_admin import get
from tests.unit.gateway.workers import FakeTriton, looped, serving

GATEWAY = (sys.executable, "-m", "rsrv_gateway")
