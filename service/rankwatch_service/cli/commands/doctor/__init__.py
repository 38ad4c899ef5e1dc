"""`rankwatch doctor`: checks of this machine, the service and the GPUs."""
