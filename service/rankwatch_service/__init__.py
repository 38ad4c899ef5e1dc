"""The service: log, stream, incidents, commands, notifications, API, dashboard and command line."""
