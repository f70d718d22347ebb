"""`python -m rsrv.serve`: the command rsrv-node."""

import sys

from rsrv.serve.node_cli import main

sys.exit(main())
