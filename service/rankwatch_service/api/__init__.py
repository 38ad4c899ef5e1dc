"""The HTTP service: ingest, REST, event streams."""
