"""What runs in an api process beside the requests: threads, tasks and caches."""
