"""OpenAI's endpoints of a server that `rsrv serve` started. Without keys they are off, and a finding reports this."""

from __future__ import annotations

import json
import signal
from hashlib import sha256
from pathlib import Path

import openai
import pytest

from local_triton import LOOPBACK, free_ports
from rsrv.cli import main as cli
from tests.e2e import stateful
from tests.e2e.test_serve import serving
from tests.waiting import wait_until

pytestmark = pytest.mark.long


def test_keys_open_the_port_of_a_running_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without its file of keys, the server serves all but OpenAI's endpoints, and the doctor names the file.

    When the file exists, the port opens.
    """
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "teller").symlink_to(stateful.ensure() / "teller")
    (port,) = free_ports(1)
    keys = tmp_path / "keys.yaml"
    settings = f"openai: {{listen: '0.0.0.0:{port}', keys_file: {keys}}}\n"

    with serving(tmp_path, "--drain=5", settings=settings) as terminal:
        terminal.wait_for("Stop with Ctrl-C")

        def findings() -> set[str]:
            assert cli.main(["doctor", "--json", "--server", str(terminal.grpc_port)]) in (0, 1)
            return {finding["name"] for finding in json.loads(capfd.readouterr().out).get("findings", ())}

        wait_until(lambda: "openai_closed" in findings())
        keys.write_text(f"a: {{sha256: {sha256(b'secret').hexdigest()}}}\n")
        terminal.wait_for(f"OpenAI's clients: http://0.0.0.0:{port}/v1")
        with openai.OpenAI(
            base_url=f"http://{LOOPBACK}:{port}/v1", api_key="secret", max_retries=9
        ) as client:
            # The list has the model, so the process has the key of the server's operators.
            wait_until(lambda: [model.id for model in client.models.list().data] == ["teller"])
            answer = client.completions.create(model="teller", prompt="Once", max_tokens=8)
            assert answer.choices[0].text == stateful.told(b"Once", 8)
        wait_until(lambda: "openai_closed" not in findings())
        terminal.process.send_signal(signal.SIGINT)
        wait_until(lambda: terminal.status == 0)
    log = (tmp_path / ".rsrv" / "serve.log").read_text()
    assert "OpenAI's endpoints are off: " in log
    assert "keys.yaml: No such file" in log
    assert "Traceback" not in log
    assert "secret" not in log
