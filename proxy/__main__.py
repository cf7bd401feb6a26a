"""`python -m proxy` is `prefix-proxy`."""

import sys

from proxy.commands import main

if __name__ == "__main__":
    sys.exit(main())
