"""What other settings would have done.

Other tunings: a job's stored telemetry as a file, and a replay of it with both. Another policy: its decisions about the
stored incidents.
"""
