"""Background work of an api process: threads, tasks and caches."""
