"""Which Slipstream this is. A file of its own, so that any room may ask."""

VERSION = "0.1.0"
