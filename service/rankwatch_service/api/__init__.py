"""The HTTP surface: ingest, REST, event streams. One file for each resource."""
