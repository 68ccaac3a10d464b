"""Sources: the only code that does input. One file each, one protocol (``base``), one registry (``catalog``)."""
