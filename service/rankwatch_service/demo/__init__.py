"""The main job: four real ranks train a small GPT, faults are injected, and rankwatch has to find and mend them all."""
