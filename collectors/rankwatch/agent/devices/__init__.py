"""The devices of a host: their counters and errors, read by a process of its own that may hang in the driver.

`reader` runs in that process and is the only part that calls the driver; `sampler` runs in the worker and watches it.
"""
