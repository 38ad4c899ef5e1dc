"""The roles of the service, in this process and as processes."""
