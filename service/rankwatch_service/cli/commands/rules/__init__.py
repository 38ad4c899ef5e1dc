"""`rankwatch rules`: rules on metrics that jobs log."""
