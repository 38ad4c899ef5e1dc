"""The stream's detectors and correlator over recorded telemetry: rows of files in, incidents out."""
