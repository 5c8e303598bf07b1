"""What operators see: counters on the device, a log line, a block in `/server_info`, a self-check."""
