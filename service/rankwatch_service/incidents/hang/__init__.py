"""What the ranks of a hang answer: where they stand, and whom they wait for."""
