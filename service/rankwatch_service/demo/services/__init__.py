"""What the demo starts beside the training job."""
