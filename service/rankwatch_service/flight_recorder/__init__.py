"""Who a hang waits for, from the dumps of torch's flight recorder."""
