"""``python -m kvpressure``: the same as the ``kvpressure`` command."""

import sys

from kvpressure.cli import main

sys.exit(main())
