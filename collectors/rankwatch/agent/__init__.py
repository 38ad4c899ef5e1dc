"""The agent: one per host and job. It reads what ranks record, sends it to the service, and relays orders back.

Nothing in the training process imports this package. It needs msgspec and the standard library only; `nvml`
alone uses `pynvml`, if that is installed.
"""
