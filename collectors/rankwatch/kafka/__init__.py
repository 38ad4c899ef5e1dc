"""kafka-python behind settings of our own: used by agents and the service, never by a training process."""
