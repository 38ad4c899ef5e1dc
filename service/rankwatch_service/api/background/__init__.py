"""What runs beside the requests of an API process."""
