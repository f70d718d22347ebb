"""`python -m rsrv_node`: the command rsrv-node."""

import sys

from rsrv_node.cli import main

sys.exit(main())
