"""Training scripts as strangers write them, with the real packages, clean and with real faults."""
