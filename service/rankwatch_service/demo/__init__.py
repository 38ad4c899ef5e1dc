"""The demo: four real ranks train a small GPT, faults are injected, and rankwatch must find and repair them."""
