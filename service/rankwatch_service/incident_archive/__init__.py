"""The incident archive: all that is known of an incident in one ZIP file, which outlives the service and its job."""
