"""Pure online detectors over the ranks of one training job."""
