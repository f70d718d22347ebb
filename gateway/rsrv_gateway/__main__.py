"""`python -m rsrv_gateway` is `rsrv-gateway`."""

import sys

from rsrv_gateway.cli import main

if __name__ == "__main__":
    sys.exit(main())
