"""The state of jobs as it is stored: snapshots, and the rows of idle jobs."""
