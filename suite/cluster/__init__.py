"""The cluster model: a second source of labelled jobs, with other models than `rankwatch_service.simulate`."""
