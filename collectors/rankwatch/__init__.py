"""What runs beside the job: the SDK in the training process and the agent on its host."""
