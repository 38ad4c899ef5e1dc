"""The cluster model: a second source of labelled jobs, which shares no assumption with `rankwatch_service.simulate`."""
