"""kafka-python behind rankwatch's settings: used by agents and the service, never by a training process."""
